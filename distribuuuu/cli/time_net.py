"""Timing of the parts of a training step: model, exchange of gradients, loader, both together.

Everything is built as training builds it, and nothing of the run is touched: no checkpoint is read or written.
"""

import itertools
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from distribuuuu.cli.time_report import Speeds, diagnose_bottleneck, find_remedies, show_parts
from distribuuuu.data.batch_plan import GRAPH_MODES
from distribuuuu.data.loader import TrainLoader, build_loader
from distribuuuu.data.workers import PREFETCH, count_workers
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.distributed.watchdog import mark_position
from distribuuuu.engine.description import describe_model
from distribuuuu.engine.out_of_memory import explain_out_of_memory
from distribuuuu.engine.preflight import resolve_num_classes
from distribuuuu.engine.setup import build_training, open_run
from distribuuuu.launch.detect import detect_launch
from distribuuuu.optim.optimizer import set_lr
from distribuuuu.report.environment import own_peak_bytes
from distribuuuu.trainer import compute_gradients, train_step

logger = logging.getLogger(__name__)

# Seconds that a part is measured for, those of a block, whose median counts, and those of the warm-up.
PART_S = 4.0
BLOCK_S = 0.4
WARM_UP_S = 0.5


@dataclass(frozen=True)
class Pace:
    """The seconds of a call, and the share of them that was spent waiting for data."""

    seconds: float
    wait: float = 0.0


def time_model(cfg) -> dict:
    """Measure, log a table and a verdict, write OUT_DIR/timing.json and return what is in it.

    Raises:
        ConfigError: the data or the model contradicts the config, or an image is broken.
    """
    cfg = resolve_num_classes(cfg)
    launch = detect_launch()
    device = pick_device(launch.local_rank)
    loader = build_loader(cfg, launch, device, train=True)
    with open_run(cfg, launch, device, log_name=""):
        step = Step(cfg, loader)
        describe_model(cfg, step.state.model)
        logger.info("step: %s", loader.plan)
        logger.info("measuring, for a minute at most where a step takes no more than a second")
        # With the set on the device there are no workers while the steps go on.
        num_workers, most_workers = (
            0 if cfg.DATA.LOADER == "device" else count_workers(number, launch) for number in (cfg.TRAIN.WORKERS, -1)
        )
        result = measure(cfg, step, loader, num_workers)
        speeds = Speeds(*(result[name]["images_per_s"] for name in ("step", "loader", "together")), result["wait"])
        remedies = find_remedies(cfg, loader.images, num_workers)
        verdict = diagnose_bottleneck(speeds, num_workers, most_workers, remedies, shares_cores=device.type == "cpu")
        result |= {"workers": num_workers, "most_workers": most_workers, "verdict": verdict}
        for line in show_parts(result, cfg.DIST.COMPRESS):
            logger.info("%s", line)
        if dist.is_main():
            path = Path(cfg.OUT_DIR) / "timing.json"
            path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


class Step:
    """A training step in its parts; the learning rate is 0, so the weights, and with them the speed, stay the same.

    Args:
        cfg: the config.
        loader: gives the shape of the batches.
    """

    def __init__(self, cfg, loader: TrainLoader):
        self.device = loader.device
        self.accum_steps = loader.plan.accum_steps
        self.training = build_training(cfg, loader, loader.dummy_batch()[:1], latest=None)
        self.state, self.task = self.training.state, self.training.task
        self._replays_graphs = cfg.MODEL.COMPILE in GRAPH_MODES
        set_lr(self.state.optimizer, 0.0)
        self.training.model.train()
        # Noise: a GPU computes on zeros with less power, and so faster than on images.
        self.images = torch.randn_like(loader.dummy_batch())
        self.labels = torch.arange(len(self.images), device=self.device) % cfg.MODEL.NUM_CLASSES
        if loader.images.multilabel:
            self.labels = torch.nn.functional.one_hot(self.labels, cfg.MODEL.NUM_CLASSES).float()

    def _begin(self) -> None:
        """Mark the begin of a forward pass for CUDA graphs: what follows replays the graphs from the first on.

        torch takes a forward pass without its backward pass for the first half of a step, and would record a new graph
        for each pass after it. Once one step is marked, every other one has to be.
        """
        if self._replays_graphs:
            torch.compiler.cudagraph_mark_step_begin()

    def forward(self) -> None:
        """Compute the logits, ready for a backward pass."""
        for _ in range(self.accum_steps):
            self._begin()
            with self.task.autocast():
                self.state.model(self.images)

    def _marked(self, batches: Iterator) -> Iterator:
        for batch in batches:
            self._begin()
            yield batch

    def backward(self, batches: Iterator, sync: bool = True) -> None:
        """Compute the gradients of a step; without `sync`, each process keeps its own."""
        compute_gradients(self.training, self._marked(batches), 0, sync)

    def update(self, batches: Iterator) -> None:
        """Take a whole step."""
        train_step(self.training, self._marked(batches), 0)
        if self.state.ema:
            self.state.ema.update(self.state.global_batch, images_seen=self.state.global_batch)

    @torch.inference_mode()
    def evaluate(self, images: torch.Tensor, targets: torch.Tensor) -> None:
        """Compute a batch as evaluation does."""
        self._begin()
        self.task.eval_step(self.state.model, images, targets)


@explain_out_of_memory("measuring the steps")
def measure(cfg, step: Step, loader: TrainLoader, num_workers: int) -> dict:
    """Return the seconds of a step and the images/s of each part, and the memory; all processes take part."""
    plan, device = loader.plan, step.device
    in_memory = itertools.repeat((step.images, step.labels))

    def time_part(call: Callable[[], object]) -> dict:
        return _as_part(dist.all_reduce_max([time_calls(call, device).seconds])[0], plan.global_batch)

    parts = {"forward": time_part(step.forward), "forward_backward": time_part(lambda: step.backward(in_memory))}
    if dist.is_distributed():
        parts["not_exchanged"] = time_part(lambda: step.backward(in_memory, sync=False))
    parts |= {"optimizer": time_part(step.state.optimizer.step), "step": time_part(lambda: step.update(in_memory))}
    # Steps that the workers have ready: without them in the blocks the loader would seem faster than it is.
    ahead = max(1, math.ceil(PREFETCH * num_workers / plan.accum_steps))
    parts |= measure_loader(step, loader, ahead, parts["step"])
    memory = {**count_bytes(step), "training": peak_bytes(device)}
    images = evaluation_images(cfg, parts["forward"], device, plan.micro_batch)
    targets = loader.zero_targets(len(images))
    step.state.model.eval()
    seconds = dist.all_reduce_max([time_calls(lambda: step.evaluate(images, targets), device).seconds])[0]
    parts["evaluation"] = _as_part(seconds, len(images) * plan.world_size)
    return {**parts, "memory": {**memory, "evaluation": peak_bytes(device)}, "processes": plan.world_size}


def measure_loader(step: Step, loader: TrainLoader, ahead: int, model: dict) -> dict:
    """Return the parts of the loader alone and of training with it, on one stream of images: none is read twice.

    Args:
        step: the training step.
        loader: the training loader.
        ahead: steps that the workers are ahead.
        model: the part of a step on a batch in memory.
    """
    plan, device = loader.plan, step.device
    pixels = endless_batches(loader, step.state.stream_seed)
    batches = map(loader.to_device, pixels)

    def time_loader(source: Iterator) -> dict:
        pace = time_calls(lambda: [next(source) for _ in range(plan.accum_steps)], device, ahead)
        images_per_s = sum(dist.gather_objects(plan.per_process / pace.seconds))
        return _as_part(plan.global_batch / images_per_s, plan.global_batch)

    parts = {"pixels": time_loader(pixels), "loader": time_loader(batches)}
    # Where the model is the slower one, batches are ready all the time, and a few long steps are enough.
    enough = ahead if parts["loader"]["seconds"] > model["seconds"] else max(1, int(PART_S / model["seconds"]))
    pace = time_calls(lambda: step.update(batches), device, min(ahead, enough), loader.pop_data_time)
    seconds, wait = dist.all_reduce_max([pace.seconds, pace.wait])
    return {**parts, "together": _as_part(seconds, plan.global_batch), "wait": wait}


def endless_batches(loader: TrainLoader, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of a run as they come from the workers, from its first one on: (uint8 images, labels)."""
    for epoch in itertools.count():
        loader.sampler.set_position(seed, epoch, first_step=0)
        yield from loader.host_batches()


def evaluation_images(cfg, forward: dict, device: torch.device, micro_batch: int) -> torch.Tensor:
    """Return noise for a batch of evaluation; of a training step's size where TEST.BATCH_SIZE would take too long."""
    fits = cfg.TEST.BATCH_SIZE * dist.world_size() / forward["images_per_s"] < PART_S
    size = cfg.TEST.CROP_SIZE or cfg.TRAIN.IM_SIZE
    images = torch.randn(cfg.TEST.BATCH_SIZE if fits else micro_batch, 3, size, size, device=device)
    return images.to(memory_format=torch.channels_last) if cfg.MODEL.CHANNELS_LAST else images


def time_calls(
    call: Callable[[], object], device: torch.device, group: int = 1, pop_data_time: Callable[[], float] = lambda: 0.0
) -> Pace:
    """Return the medians over blocks of calls, after a warm-up; every process makes equally many calls.

    Args:
        call: what to time.
        device: is waited for before and after a block.
        group: a block and the warm-up have at least so many calls: those that are answered faster at first.
        pop_data_time: the seconds spent waiting for data since it was called before.
    """

    def time_block(num: int) -> Pace:
        mark_position("timing")
        synchronize(device)
        pop_data_time()
        start = time.perf_counter()
        for _ in range(num):
            call()
        synchronize(device)
        seconds = time.perf_counter() - start
        return Pace(seconds / num, min(1.0, pop_data_time() / seconds))

    def count(seconds: float, pace: Pace) -> int:
        return max(1, int(seconds / (group * dist.all_reduce_max([pace.seconds])[0]))) * group

    # The first calls compile, allocate, try out algorithms and record CUDA graphs.
    before, pace = time_block(group), time_block(group)
    while dist.all_reduce_max([before.seconds])[0] > 2 * dist.all_reduce_max([pace.seconds])[0]:
        before, pace = pace, time_block(group)
    warm = time_block(count(WARM_UP_S, pace))
    num = count(BLOCK_S, warm)
    num_blocks = max(1, count(PART_S, warm) // num)
    blocks = [time_block(num) for _ in range(num_blocks)]
    return Pace(*(statistics.median(values) for values in zip(*((b.seconds, b.wait) for b in blocks), strict=True)))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def count_bytes(step: Step) -> dict[str, int]:
    """Return the bytes of the parameters, of their gradients and of the optimizer's state."""
    parameters = list(step.state.model.parameters())
    states = [value for entry in step.state.optimizer.state.values() for value in entry.values()]
    tensors = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer": [value for value in states if isinstance(value, torch.Tensor)],
    }
    return {name: sum(value.numel() * value.element_size() for value in found) for name, found in tensors.items()}


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that a process has had so far: on its CUDA device, else of the machine; 0: not known."""
    return int(dist.all_reduce_max([own_peak_bytes(device)])[0])


def _as_part(seconds: float, num_images: int) -> dict:
    return {"seconds": seconds, "images": num_images, "images_per_s": num_images / seconds}
