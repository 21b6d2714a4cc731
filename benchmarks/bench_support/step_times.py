"""Durations of the calls of a step."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from distribuuuu.data.batch import PREFETCH, Batch
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.loader import TrainLoader, count_workers
from distribuuuu.launch.detect import Launch

# Seconds of the measurement of a part, of the blocks that it consists of, and of the warm-up.
MEASURE_S = 4.0
BLOCK_S = 0.4
WARM_UP_S = 0.5


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
