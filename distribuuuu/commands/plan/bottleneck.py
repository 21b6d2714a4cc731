"""Diagnosis of the bottleneck of a run, and its remedies."""

import math
from collections.abc import Sequence

from distribuuuu.config.derived import height_and_width
from distribuuuu.config.options import OPTIONAL_DECODERS
from distribuuuu.config.registry import dataset_name

# Fraction of the time spent waiting for data above which the loader limits training.
MAX_DATA_FRACTION = 0.1
_IN_MEMORY = ("dummy", "cifar10", "cifar100", "mnist", "fashion_mnist")
# Maximum bytes of pixels of a data set for DATA.LOADER device.
_MAX_DEVICE_BYTES = 2e9


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
    if waiting < MAX_DATA_FRACTION:
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
