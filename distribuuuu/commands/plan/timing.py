"""Durations of calls: medians over blocks, measured by all processes together; and the bottleneck that they show."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from distribuuuu.config.derived import height_and_width
from distribuuuu.config.options import OPTIONAL_DECODERS
from distribuuuu.config.registry import dataset_name
from distribuuuu.data.batch import Batch
from distribuuuu.data.loader import TrainLoader
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.comm import mark_position

# Seconds of the measurement of a part, of the blocks that it consists of, and of the warm-up.
MEASURE_S = 4.0
BLOCK_S = 0.4
WARM_UP_S = 0.5
# Fraction of the time spent waiting for data above which the loader limits training.
MAX_DATA_FRACTION = 0.1
_IN_MEMORY = ("dummy", "cifar10", "cifar100", "mnist", "fashion_mnist")
# Maximum bytes of pixels of a data set for DATA.LOADER device.
_MAX_DEVICE_BYTES = 2e9


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
        mark_position("timing")
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
    model: float, loader: float, waiting: float, workers: int, max_workers: int, remedies: Sequence[str]
) -> str:
    """Return a sentence that names the bottleneck and its remedies.

    Args:
        model: images/s of the model alone.
        loader: images/s of the loader alone.
        waiting: fraction of the time that both together wait for data.
        workers: workers per process; 0: the training process loads the images.
        max_workers: cores per process; 0: workers are not used.
        remedies: options that make loading an image cheaper, the best first (`find_remedies`).
    """
    figures = f"the model processes {model:,.0f}, the loader provides {loader:,.0f} images/s"
    if waiting < MAX_DATA_FRACTION or loader >= 2 * model:  # such a loader waits for the cores of the model, if for any
        return f"{'model-bound' if loader >= model else 'balanced'}: {figures}"
    # The speed of workers grows about linearly up to one per core.
    wanted = min(max_workers, max(workers + 1, math.ceil(model * max(1, workers) / loader)))
    fixes = [f"TRAIN.WORKERS {wanted}"] if wanted > workers else []
    return f"loader-bound: {figures}; fix: {' or '.join([*fixes, *remedies]) or 'more cores per process'}"


def find_remedies(cfg, images, num_workers: int) -> tuple[str, ...]:
    """Return the options that would make loading a training image cheaper, the best first."""
    data, name = cfg.DATA, dataset_name(cfg)
    if data.LOADER == "device":
        return ("DATA.LOADER host with TRAIN.WORKERS -1",)
    is_array = cfg.MODEL.DUMMY_INPUT or data.NAME in _IN_MEMORY  # nothing is read or decoded
    # Assume images of at most twice the crop's width and height.
    is_small = is_array or len(images) * 3 * 4 * math.prod(height_and_width(cfg.TRAIN.IM_SIZE)) <= _MAX_DEVICE_BYTES
    is_packed = name.startswith("packed")
    is_raw = is_packed and images.meta["options"]["format"] == "raw"
    applicable = {
        "a packed data set (distribuuuu pack)": not is_array and not is_packed,
        "DATA.DECODER nvimgcodec": not is_array and not is_raw and data.DECODER not in OPTIONAL_DECODERS,
        "DATA.LOADER device": is_small and name != "dummy",
        "DATA.WORKER_KIND thread": num_workers > 0 and data.WORKER_KIND != "thread",
    }
    return tuple(remedy for remedy, applies in applicable.items() if applies)
