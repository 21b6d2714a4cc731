"""Synchronization with a GPU, simulated on any machine."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from support.batches import ALONE, CPU
from support.calls import Operations
from support.fake_cuda import CUDA, SECOND, Timeline, fake_cuda
from support.processes import on_processes
from support.tables import slow
from torch.testing._internal.distributed.fake_pg import FakeStore

from distribuuuu.checkpoint import manager
from distribuuuu.data import transforms
from distribuuuu.data.batch import Batch, Normalizer
from distribuuuu.data.device_samples import DeviceDataset, DeviceSamples
from distribuuuu.data.loader import Loader, TrainLoader, build_loader
from distribuuuu.data.transforms import resize
from distribuuuu.distributed import ddp
from distribuuuu.engine.build import build_state, build_training, set_backends
from distribuuuu.engine.run import Run
from distribuuuu.engine.static_step import use_static_steps
from distribuuuu.launch.detect import Launch
from distribuuuu.optim.optimizer import build_optimizer
from distribuuuu.optim.precision import Precision, build_clipper, build_precision
from distribuuuu.optim.schedules import build_lr
from distribuuuu.tasks.base import build_task
from distribuuuu.tasks.metrics import Meter
from distribuuuu.trainer import take_step, train_epoch


def make_normalizer(device: torch.device) -> Normalizer:
    return Normalizer(device, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), channels_last=True)


def host_batches(num: int, pinned: bool = True) -> list[tuple]:
    """Return batches of twelve images of three classes, like those of workers with and without TRAIN.PIN_MEMORY."""
    pixels, labels = torch.arange(12 * 3 * 16 * 16).remainder(251).to(torch.uint8), torch.arange(12) % 3
    pixels = pixels.view(12, 3, 16, 16)
    tensors = pixels, labels, torch.arange(12)
    return [(Batch(*(tensor.pin_memory() for tensor in tensors) if pinned else tensors), ())] * num


def read_all(loader: Loader, timeline: Timeline) -> list[int]:
    """Read every batch like a step; return, for each copy, how many operations of the main stream precede it."""
    after = []
    for images, targets, *_ in loader:
        assert images.is_cuda and targets.is_cuda and images.dtype is torch.float32
        (images * 2).sum() + targets.sum()
        after.append(loader._stream.seen.get(timeline.main, 0))
        del images, targets
    return after


def overlap(small_cfg, monkeypatch, num: int, pinned: bool = True) -> tuple[Timeline, list[int]]:
    """Read batches of the host as in training; return the timeline and the result of `read_all`."""
    parts = build_loader(small_cfg(), ALONE, CPU, train=False)
    with fake_cuda(monkeypatch) as timeline:
        loader = Loader(parts.samples, parts.sampler, host_batches(num, pinned), make_normalizer(CUDA))
        timeline.waits.clear()
        return timeline, read_all(loader, timeline)


def test_the_copy_of_a_batch_overlaps_with_the_previous_step(small_cfg, monkeypatch):
    timeline, after = overlap(small_cfg, monkeypatch, 5)
    assert timeline.faults == {}
    assert after == after[:1] * 5, "a copy waited for a step"
    assert timeline.recorded == [timeline.main] * 15, "images, targets and index of each batch"


def test_memory_that_is_not_pinned_is_copied_before_the_next_batch(small_cfg, monkeypatch):
    """With TRAIN.PIN_MEMORY False, the slot of a batch becomes free when the loop drops its pixels."""
    timeline, after = overlap(small_cfg, monkeypatch, 3, pinned=False)
    assert timeline.faults == {"waits": ["_to_copy from cpu"] * 3}, "only for the copy, on the stream of the copies"
    assert after == after[:1] * 3 and not timeline.is_awaited(timeline.main, timeline.main.num)


@pytest.mark.parametrize("crop, interpolation, together", [
    slow("resized", "random", False), slow("resized", "bilinear", True), ("center", "bilinear", True),
    ("pad", "bilinear", True),
])  # fmt: skip
def test_crops_on_the_device_are_normalized_without_a_race(small_cfg, monkeypatch, crop, interpolation, together):
    """Images that are on the device and are resized, cropped and erased there: a batch together, or image by image."""
    train = crop != "center"
    words = ("AUG.ERASING", together / 2, "DATA.CROP", crop, "DATA.INTERPOLATION") if train else ("TEST.INTERPOLATION",)
    parts = build_loader(small_cfg(*words, interpolation), ALONE, CPU, train)
    positions, num_resized = list(parts.sampler)[:3], 0

    def counting(pixels: torch.Tensor, height: int, width: int, interpolation: str) -> torch.Tensor:
        nonlocal num_resized
        num_resized += pixels.is_cuda and tuple(pixels.shape[-2:]) != (height, width)
        return resize(pixels, height, width, interpolation)

    monkeypatch.setattr(transforms, "resize", counting)
    draw = "distribuuuu.data.augment.Erasing.rectangles"  # it needs values, which tensors do not have in the block
    monkeypatch.setattr(draw, lambda self, rng, *shape: [rng.uniform().astype(int)] * 4)
    with fake_cuda(monkeypatch) as timeline:
        images = DeviceDataset(parts.images, "auto", CUDA, num_threads=0)
        images.same_size = images.same_size if together else None
        samples = DeviceSamples(images, parts.samples.transform, "auto", skip_broken=False)
        loader = Loader(samples, parts.sampler, map(samples.batch, positions), make_normalizer(CUDA))
        timeline.waits.clear()
        assert len(read_all(loader, timeline)) == len(positions)
    assert timeline.faults == {} and (num_resized >= len(positions) or crop == "resized" and together)


def prepare(cfg) -> tuple:
    """Return a config, its training loader and its state, on the CPU."""
    loader = build_loader(cfg, ALONE, CPU, train=True)
    task = build_task(cfg, loader.images.classes, CPU, Precision())
    return cfg, loader, build_state(cfg, task, loader, Precision(), pretrained=False)


def take_steps(cfg, parts, state, device: torch.device, num: int, begin: Callable[[], object]):
    """Train for less than an epoch, so the metrics are not read; call `begin` after the second step."""
    loader = TrainLoader(parts.samples, parts.sampler, host_batches(num), make_normalizer(device))
    precision = build_precision(cfg, device)
    task = build_task(cfg, loader.images.classes, device, precision)
    meter = Meter(task.train_metrics, len(task.classes), device)
    state = dataclasses.replace(state, model=state.model.to(device), precision=precision, meter=meter)
    state.averages["ema"].model.to(device)
    state.averages["ema"].pair_with(state.model)
    state.optimizer = build_optimizer(cfg, state.model)
    task.prepare_training(loader.plan, loader.images, loader.num_steps)
    checks = iter(range(1, num + 1))
    run = Run(
        cfg, task, state, state.model, loader, build_lr(cfg, loader.plan.global_batch), build_clipper(cfg), loader,
        checkpoints=None,
        results=None,
        log=SimpleNamespace(steps=lambda epoch, step, end: range(num), show_step=lambda *position: None,
                            set_stage=lambda *stage: None),
        stop=SimpleNamespace(begin_phase=lambda phase: None, check=lambda position: next(checks) == 2 and begin()),
    )  # fmt: skip
    if cfg.MODEL.COMPILE == "step":
        use_static_steps(run)
    train_epoch(run)
    return state


EVERYTHING = ("AUG.MIXUP", 0.2, "AUG.CUTMIX", 1.0, "LOSS.LABEL_SMOOTHING", 0.1, "OPTIM.CLIP_NORM", 1.0,
              "EMA.HALF_LIFE", 30, "TRAIN.PRINT_FREQ", 100)  # fmt: skip
STEPS = [
    ("LOSS.NAME", "bce", "AUG.MIX_BY", "step"),
    slow(("TRAIN.AMP", "bf16", "MODEL.CHANNELS_LAST", True, "LOSS.CLASS_WEIGHTS", [1, 2, 3])),
    slow(("TRAIN.AMP", "fp16", "OPTIM.NAME", "adamw")),
    ("MODEL.COMPILE", "step"),
    slow(("MODEL.COMPILE", "step", "OPTIM.NAME", "adamw", "TRAIN.AMP", "bf16")),
]


@pytest.mark.parametrize("overrides", STEPS)
def test_a_step_does_not_synchronize(small_cfg, monkeypatch, overrides):
    """The backward pass needs a GPU; it is replaced by a function that sets a zero gradient for each weight."""
    cfg, parts, state = prepare(small_cfg(*EVERYTHING, *overrides))

    def backward(loss: torch.Tensor) -> None:
        for parameter in state.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    @contextlib.contextmanager
    def capture(graph: object, capture_error_mode: str) -> Iterator[None]:
        before = len(timeline.waits)
        yield
        events.append(timeline.waits[before:])

    events: list[object] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: events.append("replay")))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.Tensor, "backward", backward)
    with fake_cuda(monkeypatch) as timeline:
        state = take_steps(cfg, parts, state, CUDA, 3, timeline.waits.clear)
    assert timeline.faults == {} and timeline.num_operations > 500
    assert events == ([[], *["replay"] * 3] if "MODEL.COMPILE" in overrides else []), "one capture, without a wait"
    assert state.optimizer.defaults["fused"] and next(state.model.parameters()).is_cuda
    assert all(parameter.grad is not None for parameter in state.model.parameters())
    timeline.main.synchronize()
    found = state.clock.pop()  # an operation of the simulated card takes a millisecond
    assert [*found] == (["step"] if "MODEL.COMPILE" in overrides else ["forward", "backward", "optimizer"])
    assert state.clock.pop() == {} and sum(found.values()) < 1e-3 * timeline.num_operations


def test_the_matmul_precision_is_set_only_on_cuda(small_cfg, monkeypatch):
    calls: list[tuple] = []
    for device in (CPU, CUDA):
        note = lambda precision, device=device: calls.append((precision, device))  # noqa: E731
        monkeypatch.setattr(torch, "set_float32_matmul_precision", note)
        set_backends(small_cfg("TRAIN.MATMUL_PRECISION", "medium"), device)
    assert calls == [("medium", CUDA)]


@pytest.mark.parametrize("device", [CUDA, SECOND])
def test_a_checkpoint_is_copied_from_the_device_with_one_wait(monkeypatch, device):
    with fake_cuda(monkeypatch) as timeline:
        weights = [torch.zeros(3, 4, device=device) for _ in range(20)]
        content = manager.snapshot({"model": dict(enumerate(weights)), "step": torch.ones(2), "lr": 0.1})
        weights[0].add_(1)  # the next step
        copies = [*content["model"].values(), content["step"]]
        assert not any(copy.is_cuda for copy in copies) and content["lr"] == 0.1
        for copy in copies:
            copy.abs()
        assert timeline.faults == {"waits": ["event"]}


def step_on_eight_processes(cfg) -> dict[str, int]:
    """Take the second step of the first of eight processes that do not communicate; return its counts."""
    calls = Operations()

    def count_bucket(state, bucket):  # DDP checks annotations
        calls.counts["bucket"] += 1
        reduced = torch.futures.Future()
        reduced.set_result(bucket.buffer())
        return reduced

    class CountedParallel(ddp.DistributedDataParallel):
        @functools.wraps(ddp.DistributedDataParallel.__init__)
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            self.register_comm_hook(None, count_bucket)

    ddp.DistributedDataParallel = CountedParallel
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    launch = Launch("alone", rank=0, local_rank=0, world_size=8, local_world_size=8)
    loader = build_loader(cfg, launch, CPU, train=True)
    training = build_training(cfg, loader, loader.zero_images(loader.plan.micro_batch)[:1], latest=None)
    batches = loader.batches_from(0, 0, 0)
    training.model.train()
    take_step(training, batches, 0)
    calls.counts.clear()
    with calls:
        take_step(training, batches, 1)
    prefixes = ("bucket", "c10d::", "aten::_local_scalar_dense")  # collectives, and reads of values
    return {name.rpartition(":")[2]: num for name, num in calls.counts.items() if name.startswith(prefixes)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process that has used a GPU cannot be forked")
@pytest.mark.parametrize("shard, expected", [
    ("none", {"bucket": 1}),
    # Four units: three stages of blocks, and the rest of the model, whose weights stay for the backward pass.
    ("fsdp", {"_allgather_base_": 7, "_reduce_scatter_base_": 4, "allreduce_": 1}),
])  # fmt: skip
def test_a_step_of_eight_processes_exchanges_only_gradients_and_weights(small_cfg, shard, expected):
    """With fsdp, the norm of the gradients, by which they are clipped, is one more collective."""
    cfg = small_cfg("TRAIN.BATCH_SIZE", 2, "DIST.SHARD", shard, "OPTIM.CLIP_NORM", 1.0, "EMA.HALF_LIFE", 30)
    assert on_processes(1, step_on_eight_processes, cfg) == [expected]
