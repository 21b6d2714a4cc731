"""Timing of the parts of a training step: model, all-reduce of the gradients, loader, model and loader combined.

Everything is built as for training, but no checkpoint is read or written.
"""

import itertools
import json
import logging
import math
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from distribuuuu import trainer
from distribuuuu.config.derived import height_and_width
from distribuuuu.config.registry import dataset_name
from distribuuuu.data.batch import PREFETCH, Batch
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.loader import TrainLoader, build_loader, count_workers
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.engine.auto_batch_size import resolve_batch_size
from distribuuuu.engine.build import build_training, open_run
from distribuuuu.engine.preflight import resolve_cfg
from distribuuuu.engine.run import Training
from distribuuuu.engine.run_description import describe_model
from distribuuuu.files.atomic_file import replacing
from distribuuuu.launch.detect import Launch, detect_launch
from distribuuuu.optim.schedules import set_lr

logger = logging.getLogger(__name__)

# Seconds of the measurement of a part, of the blocks that it consists of, and of the warm-up.
MEASURE_S = 4.0
BLOCK_S = 0.4
WARM_UP_S = 0.5
# Fraction of the time spent waiting for data above which the loader limits training.
MAX_DATA_FRACTION = 0.1
# Maximum bytes of pixels of a data set for DATA.LOADER device.
_MAX_DEVICE_BYTES = 2e9
# Line width of the report; with the time before it, a line has 80 columns.
_WIDTH = 71
_NAMES = {
    "forward_backward": "model: forward + backward",
    "optimizer": "optimizer step",
    "step": "training step, batch in memory",
    "loader": "loader: normalized, on the device",
    "together": "loader + model",
}


def measure_steps(cfg) -> dict:
    """Measure the parts, log a table and a diagnosis, write OUT_DIR/timing.json and return its content.

    Raises:
        ConfigError: the data or the model contradicts the config, or an image is broken.
    """
    cfg = resolve_batch_size(resolve_cfg(cfg), trainer.take_step)
    launch = detect_launch()
    device = pick_device(launch.local_rank)
    loader = build_loader(cfg, launch, device, train=True)
    with open_run(cfg, launch, device, log_name=""):
        training = build_training(cfg, loader, loader.zero_images(loader.plan.micro_batch)[:1], latest=None)
        describe_model(cfg, training.state.model)
        logger.info("step: %s", loader.plan)
        logger.info("measuring: about a minute if a step takes less than a second")
        num_workers, max_workers = count_own_workers(cfg, launch)
        result = measure(training, loader, num_workers)
        speeds = result["step"]["images_per_s"], result["loader"]["images_per_s"], result["wait"]
        result["verdict"] = diagnose_bottleneck(cfg, loader.images, *speeds, num_workers, max_workers)
        result |= {"workers": num_workers, "most_workers": max_workers}
        for line in format_report(result):
            logger.info("%s", line)
        if dist.is_main():
            with replacing(Path(cfg.OUT_DIR) / "timing.json", "w", encoding="utf-8") as file:
                file.write(json.dumps(result, indent=2) + "\n")
    return result


def measure(training: Training, loader: TrainLoader, num_workers: int) -> dict:
    """Return the seconds and the images/s of each part. A collective.

    The learning rate is 0, so the weights and therefore the speed stay the same.
    """
    plan, state = loader.plan, training.state
    set_lr(state.optimizer, 0.0)
    training.model.train()
    # Not zeros, with which a GPU draws less power, and is therefore faster, than with images.
    in_memory = itertools.repeat(loader.sample_batch())

    def backward(all_reduce: bool = True) -> None:
        trainer.Step(training, in_memory, 0).gradients(all_reduce)

    def update(batches: Iterator[Batch]) -> None:
        trainer.take_step(training, batches, 0)
        for average in state.averages.values():
            average.update(state.global_batch, images_seen=state.global_batch)

    def time_part(call: Callable[[], object], group: int = 1) -> dict:
        seconds = time_calls(call, loader.device, group)
        return {"seconds": seconds, "images": plan.global_batch, "images_per_s": plan.global_batch / seconds}

    parts = {"forward_backward": time_part(backward)}
    if dist.is_distributed():
        parts["not_exchanged"] = time_part(lambda: backward(all_reduce=False))
    parts |= {"optimizer": time_part(state.optimizer.step), "step": time_part(lambda: update(in_memory))}
    ahead = count_ahead(plan, num_workers)  # shorter blocks would overestimate the loader
    batches = endless_batches(loader, state.stream_seed)
    parts["loader"] = time_part(lambda: [next(batches) for _ in range(plan.accum_steps)], ahead)
    if parts["loader"]["seconds"] < parts["step"]["seconds"]:  # batches are always ready, and a few steps suffice
        ahead = min(ahead, max(1, int(MEASURE_S / parts["step"]["seconds"])))
    loader.pop_data_time()
    started = time.perf_counter()
    parts["together"] = time_part(lambda: update(batches), ahead)
    wait = min(1.0, loader.pop_data_time() / (time.perf_counter() - started))
    return {**parts, "wait": dist.all_reduce_max([wait])[0], "processes": plan.world_size}


def format_report(result: dict) -> Iterator[str]:
    """Yield the table of the measurements in timing.json, line by line, and the diagnosis."""
    yield f"{'per step':<36} {'images':>8} {'ms':>10} {'images/s':>10}"
    for key, name in _NAMES.items():
        part = result[key]
        yield f"{name:<36} {part['images']:>8,} {1e3 * part['seconds']:>10.2f} {part['images_per_s']:>10,.0f}"
    yield f"of which waiting for data: {result['wait']:.0%}"
    if "not_exchanged" in result:
        exposed_ms = 1e3 * (result["forward_backward"]["seconds"] - result["not_exchanged"]["seconds"])
        yield f"all-reduce of the gradients: {max(0.0, exposed_ms):.2f} ms of the backward pass"
    yield from textwrap.wrap(f"diagnosis: {result['verdict']}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


# ---------------------------------------------------------------------- durations of calls, the bottleneck


def count_own_workers(cfg, launch: Launch) -> tuple[int, int]:
    """Return the workers of a process during its steps, of which a data set on the device has none, and the most."""
    if cfg.DATA.LOADER == "device":
        return 0, 0
    return count_workers(cfg.TRAIN.WORKERS, launch), count_workers(-1, launch)


def count_ahead(plan: BatchPlan, num_workers: int) -> int:
    """Return the number of steps that the workers prepare ahead."""
    return max(1, math.ceil(PREFETCH * num_workers / plan.accum_steps))


def endless_batches(loader: TrainLoader, seed: int) -> Iterator[Batch]:
    """Yield the batches of a run from the workers, starting at epoch 0, on the device."""
    for epoch in itertools.count():
        loader.sampler.set_position(seed, epoch, first_step=0)
        yield from map(loader.to_device, loader.host_batches())


def time_calls(call: Callable[[], object], device: torch.device, group: int = 1) -> float:
    """Return the seconds of a call, the median over blocks after a warm-up.

    A collective: all processes make equally many calls, and the slowest one counts.

    Args:
        call: the function to time.
        device: synchronized before and after a block.
        group: calls per group, e.g. the number of prefetched steps; blocks and the warm-up consist of groups.
    """

    def block(num: int) -> float:
        dist.mark_position("timing")
        synchronize(device)
        start = time.perf_counter()
        for _ in range(num):
            call()
        synchronize(device)
        return dist.all_reduce_max([(time.perf_counter() - start) / num])[0]

    def count(seconds: float, of_call: float) -> int:
        return max(1, int(seconds / (group * of_call))) * group

    # The first calls compile, allocate memory, benchmark algorithms and record CUDA graphs.
    previous, current = block(group), block(group)
    while previous > 2 * current:
        previous, current = current, block(group)
    warm = block(count(WARM_UP_S, current))
    num = count(BLOCK_S, warm)
    return statistics.median(block(num) for _ in range(max(1, count(MEASURE_S, warm) // num)))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def diagnose_bottleneck(
    cfg, images, model: float, loader: float, waiting: float, workers: int, max_workers: int
) -> str:
    """Return a sentence that names the bottleneck and its remedies.

    Args:
        cfg: the config.
        images: those of the training.
        model: images/s of the model alone.
        loader: images/s of the loader alone.
        waiting: fraction of the time that both together wait for data.
        workers: workers per process; 0: the training process loads the images.
        max_workers: cores per process; 0: workers are not used.
    """
    figures = f"the model processes {model:,.0f}, the loader provides {loader:,.0f} images/s"
    if waiting < MAX_DATA_FRACTION or loader >= 2 * model:  # such a loader waits for the cores of the model, if for any
        return f"{'model-bound' if loader >= model else 'balanced'}: {figures}"
    if cfg.DATA.LOADER == "device":
        return f"loader-bound: {figures}; fix: DATA.LOADER host with TRAIN.WORKERS -1"
    # The speed of workers grows about linearly up to one per core.
    wanted = min(max_workers, max(workers + 1, math.ceil(model * max(1, workers) / loader)))
    fixes = [f"TRAIN.WORKERS {wanted}"] if wanted > workers else []
    if (images.has_files or images.holds_files) and not dataset_name(cfg).startswith("packed"):
        fixes.append("a packed data set (distribuuuu pack)")
    # Assume images of at most twice the crop's width and height.
    num_bytes = len(images) * 3 * 4 * math.prod(height_and_width(cfg.TRAIN.IM_SIZE))
    if num_bytes <= _MAX_DEVICE_BYTES and not cfg.MODEL.DUMMY_INPUT:
        fixes.append("DATA.LOADER device")
    return f"loader-bound: {figures}; fix: {', '.join(fixes)}{' or ' * bool(fixes)}an option of docs/large_data.md"
