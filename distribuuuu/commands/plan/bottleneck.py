"""Diagnosis of the bottleneck of a run, and its remedies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distribuuuu.config.derived import height_and_width
from distribuuuu.config.errors import counted
from distribuuuu.config.options import OPTIONAL_DECODERS
from distribuuuu.config.registry import dataset_name
from distribuuuu.records.step_timing import MAX_DATA_FRACTION

_IN_MEMORY = ("dummy", "cifar10", "cifar100", "mnist", "fashion_mnist")
# Fraction of the slower one's speed below which loader and model slow down each other when they run together.
_MIN_COMBINED = 0.8
# Maximum bytes of pixels of a data set for DATA.LOADER device.
_MAX_DEVICE_BYTES = 2e9


@dataclass(frozen=True)
class Speeds:
    """Images per second of all processes.

    Attributes:
        model: steps on a batch in memory.
        loader: the loader alone, including normalization on the device.
        combined: steps on the batches of the loader.
        data_fraction: fraction of the time of these steps that was spent waiting for data.
    """

    model: float
    loader: float
    combined: float
    data_fraction: float


def diagnose_bottleneck(
    speeds: Speeds, num_workers: int, max_workers: int, remedies: Sequence[str], shares_cores: bool = False
) -> str:
    """Return a sentence that names the bottleneck and its remedies.

    Args:
        num_workers: workers per process; 0: the training process loads the images.
        max_workers: cores per process; 0: workers are not used.
        remedies: options that make loading an image cheaper, the best first (`find_remedies`).
        shares_cores: the model runs on the CPU too.
    """
    model, loader = f"the model processes {speeds.model:,.0f}", f"the loader provides {speeds.loader:,.0f} images/s"
    if speeds.data_fraction < MAX_DATA_FRACTION and speeds.loader >= speeds.model:
        return f"model-bound: {model}, {loader}"
    if speeds.data_fraction < MAX_DATA_FRACTION:
        return f"balanced: {model}, {loader}; {speeds.data_fraction:.0%} of the time is spent waiting for data"
    start = f"loader-bound: {model}, {loader}"
    if num_workers == 0 and max_workers:
        start = f"{start}, in the same process"
        if shares_cores:  # the speed of a worker does not follow from that of the process, which uses all cores
            return f"{start}; set TRAIN.WORKERS 1 or more and measure again; alternatives: {_join(remedies)}"
        return f"{start}; {_recommend_workers(speeds, 0, max_workers, remedies)}"
    slower = min(speeds.loader, speeds.model)
    if speeds.loader >= speeds.model or num_workers and speeds.combined < _MIN_COMBINED * slower:
        return f"{start}, but both together reach only {speeds.combined:,.0f}; fix: {_join(remedies)}"
    return f"{start}; {_recommend_workers(speeds, num_workers, max_workers, remedies)}"


def _recommend_workers(speeds: Speeds, num_workers: int, max_workers: int, remedies: Sequence[str]) -> str:
    """Return a recommended number of workers, at most one per core, assuming that the speed scales linearly."""
    if max_workers == 0:
        return f"fix: {_join(remedies)}"
    per_worker = speeds.loader / max(1, num_workers)
    needed = max(num_workers + 1, math.ceil(speeds.model / per_worker))
    if needed <= max_workers:
        more = needed - num_workers
        workers = f"{counted(more, 'more worker' if num_workers else 'worker')} per process (TRAIN.WORKERS {needed})"
        return f"fix: {' or '.join([workers, *remedies[:1]])}"
    if num_workers < max_workers:
        speed = f"{max_workers * per_worker:,.0f} images/s"
        return f"TRAIN.WORKERS {max_workers}, one per core, would provide about {speed}; beyond that: {_join(remedies)}"
    used = f"TRAIN.WORKERS {num_workers} on {counted(max_workers, 'core')} per process"
    return f"all cores are used ({used}); fix: {_join(remedies)}"


def _join(remedies: Sequence[str]) -> str:
    return " or ".join(remedies) or "more cores per process"


def is_in_memory(cfg) -> bool:
    """Return whether the images are an array in memory: nothing is read or decoded."""
    return cfg.MODEL.DUMMY_INPUT or cfg.DATA.NAME in _IN_MEMORY


def find_remedies(cfg, images, num_workers: int) -> tuple[str, ...]:
    """Return the options that would make loading a training image cheaper, the best first."""
    data, name, is_array = cfg.DATA, dataset_name(cfg), is_in_memory(cfg)
    if data.LOADER == "device":
        return ("DATA.LOADER host with TRAIN.WORKERS -1",)
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
