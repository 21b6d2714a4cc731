"""Durations of calls: medians over blocks, measured by all processes together."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from distribuuuu.data.batch import Batch
from distribuuuu.data.loader import TrainLoader
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.stall_timer import mark_position

# Seconds of the measurement of a part, of the blocks that it consists of, and of the warm-up.
MEASURE_S = 4.0
BLOCK_S = 0.4
WARM_UP_S = 0.5


@dataclass(frozen=True)
class CallTime:
    """Duration of a call in seconds, and the fraction of it spent waiting for data."""

    seconds: float
    data_fraction: float = 0.0


def endless_batches(loader: TrainLoader, seed: int) -> Iterator[Batch]:
    """Yield the batches of a run from the workers, starting at epoch 0, with uint8 images."""
    for epoch in itertools.count():
        loader.sampler.set_position(seed, epoch, first_step=0)
        yield from loader.host_batches()


def time_calls(
    call: Callable[[], object], device: torch.device, group: int = 1, pop_data_time: Callable[[], float] = lambda: 0.0
) -> CallTime:
    """Return the median over blocks of calls after a warm-up. A collective: all processes make equally many calls.

    Args:
        call: the function to time.
        device: synchronized before and after a block.
        group: calls per group, e.g. the number of prefetched steps; blocks and the warm-up consist of groups.
        pop_data_time: returns the seconds spent waiting for data since its last call.
    """

    def block(num: int) -> float:
        return dist.all_reduce_max([time_block(call, num, device, pop_data_time).seconds])[0]

    def count(seconds: float, of_call: float) -> int:
        return max(1, int(seconds / (group * of_call))) * group

    # The first calls compile, allocate memory, benchmark algorithms and record CUDA graphs.
    previous, current = block(group), block(group)
    while previous > 2 * current:
        previous, current = current, block(group)
    warm = block(count(WARM_UP_S, current))
    num = count(BLOCK_S, warm)
    num_blocks = max(1, count(MEASURE_S, warm) // num)
    blocks = [time_block(call, num, device, pop_data_time) for _ in range(num_blocks)]
    seconds = statistics.median(block.seconds for block in blocks)
    return CallTime(seconds, statistics.median(block.data_fraction for block in blocks))


def time_block(
    call: Callable[[], object], num: int, device: torch.device, pop_data_time: Callable[[], float] = lambda: 0.0
) -> CallTime:
    """Return the mean time of a call over a block of `num` calls; see `time_calls`."""
    mark_position("timing")
    synchronize(device)
    pop_data_time()
    start = time.perf_counter()
    for _ in range(num):
        call()
    synchronize(device)
    seconds = time.perf_counter() - start
    return CallTime(seconds / num, min(1.0, pop_data_time() / seconds))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
