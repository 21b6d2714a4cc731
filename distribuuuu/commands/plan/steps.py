"""Durations of the calls of a step, and its bottleneck."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from distribuuuu.config.derived import height_and_width
from distribuuuu.config.registry import dataset_name
from distribuuuu.data.batch import PREFETCH, Batch
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.loader import TrainLoader, count_workers
from distribuuuu.launch.detect import Launch

# Seconds of the measurement of a part, of the blocks that it consists of, and of the warm-up.
MEASURE_S = 4.0
BLOCK_S = 0.4
WARM_UP_S = 0.5
# Fraction of the time spent waiting for data above which the loader limits training.
MAX_DATA_FRACTION = 0.1
# Maximum bytes of pixels of a data set for DATA.LOADER device.
_MAX_DEVICE_BYTES = 2e9


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

    Args:
        call: the function to time.
        device: synchronized before and after a block.
        group: calls per group, e.g. the number of prefetched steps; blocks and the warm-up consist of groups.
    """

    def block(num: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(num):
            call()
        synchronize(device)
        return (time.perf_counter() - start) / num

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
