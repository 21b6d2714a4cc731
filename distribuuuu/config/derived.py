"""Values that several options decide together, and the conditions without which options have no effect."""

import math
from collections.abc import Callable
from typing import Any

from distribuuuu.config.registry import dataset_class, task_class

# The module of the class `Task`, which is not imported here: its `predict_step` applies TEST.FLIP and TEST.SHIFT.
_BASE_TASK = "distribuuuu.tasks.base"
# A side of a square, or a height and a width, in pixels.
Size = int | tuple[int, int]

# Options of preprocessing that follow initial weights unless they are set; of the sizes, all do or none.
STATISTICS = ("DATA.MEAN", "DATA.STD")
SIZES = ("TRAIN.IM_SIZE", "TEST.IM_SIZE", "TEST.CROP_SIZE", "TEST.CROP")
FOLLOWING = (*STATISTICS, "DATA.INTERPOLATION", "TEST.INTERPOLATION", *SIZES, "MODEL.LICENSE")


def height_and_width(size: Size) -> tuple[int, int]:
    """Return the height and the width of a size."""
    return (size, size) if isinstance(size, int) else size


def show_size(size: Size) -> str:
    """Return a size for messages: "224", or "96 x 320", height first."""
    return str(size) if isinstance(size, int) else f"{size[0]} x {size[1]}"


def eval_crop_size(cfg) -> Size:
    """Return the size of evaluation images after resize and crop, in pixels."""
    return cfg.TEST.CROP_SIZE or cfg.TRAIN.IM_SIZE


def eval_resize(cfg) -> Size:
    """Return TEST.IM_SIZE; where the whole image is kept (TEST.CROP), the size of evaluation images."""
    return cfg.TEST.IM_SIZE if cfg.TEST.CROP == "center" else eval_crop_size(cfg)


def part_of_epoch(num_steps: int, fraction: float) -> int:
    """Return the steps of a fraction of an epoch, rounded up."""
    return min(num_steps, math.ceil(num_steps * fraction - 1e-9))  # 0.28 x 25 is 7.000000000000001


def total_steps(cfg, num_steps: int) -> int:
    """Return the steps of a run, with `num_steps` in a whole epoch."""
    return (cfg.OPTIM.MAX_EPOCH - 1) * num_steps + part_of_epoch(num_steps, cfg.OPTIM.LAST_EPOCH)


def training_crop(cfg) -> str | None:
    """Return the training crop, "resized", "pad", ...; None if it is known only once the data set is opened."""
    if cfg.DATA.CROP != "auto":
        return cfg.DATA.CROP
    return None if cfg.DATA.NAME.startswith("packed") else dataset_class(cfg).crop


def stage_without_augmentation(cfg) -> dict[int, dict[str, Any]]:
    """Return, by its first epoch from 0, the options of the stage of AUG.OFF_EPOCHS; empty if there is none."""
    off = {"AUG.POLICY": "none", "AUG.COLOR_JITTER": (), "AUG.OPERATIONS": (), "AUG.ERASING": 0.0}
    return {math.ceil(cfg.OPTIM.MAX_EPOCH) - cfg.AUG.OFF_EPOCHS: off} if cfg.AUG.OFF_EPOCHS else {}


def needs_statistics(cfg) -> bool:
    """Tell whether the data set has no mean and deviation of its own for DATA.CHANNELS and DATA.PIXELS."""
    family, data = dataset_class(cfg), cfg.DATA
    is_rgb_range = data.PIXELS == "uint8" and data.CHANNELS in (1, 3)
    has_own = any("mean" in vars(base) for base in family.__mro__[:-2]) and len(family.mean) == data.CHANNELS
    return data.NAME != "packed" and not is_rgb_range and not has_own


# The condition in words, which `Option.needs` names, and whether a config fulfills it.
CONDITIONS: dict[str, Callable[[Any], object]] = {
    "AUG.ERASING above 0": lambda cfg: cfg.AUG.ERASING,
    "AUG.MIXUP or AUG.CUTMIX above 0": lambda cfg: cfg.AUG.MIXUP or cfg.AUG.CUTMIX,
    "both AUG.MIXUP and AUG.CUTMIX above 0": lambda cfg: cfg.AUG.MIXUP and cfg.AUG.CUTMIX,
    "data at a URL": lambda cfg: "://" in cfg.TRAIN.DATASET + cfg.TEST.DATASET,
    "DATA.CROP pad": lambda cfg: training_crop(cfg) in ("pad", None),
    "DATA.CROP resized": lambda cfg: training_crop(cfg) in ("resized", None),
    "DATA.FLIP above 0": lambda cfg: cfg.DATA.FLIP,
    "a DATA.NAME with folders of splits": lambda cfg: dataset_class(cfg).has_splits,
    "a DISTILL.TEACHER": lambda cfg: cfg.DISTILL.TEACHER,
    "a DISTILL.TEACHER and DISTILL.KIND soft": lambda cfg: cfg.DISTILL.TEACHER and cfg.DISTILL.KIND == "soft",
    "EMA.HALF_LIFE above 0": lambda cfg: cfg.EMA.HALF_LIFE,
    "LOG.TENSORBOARD True": lambda cfg: cfg.LOG.TENSORBOARD or "tensorboard" in cfg.LOG.TRACKERS,
    "LOSS.NAME bce": lambda cfg: cfg.LOSS.NAME == "bce",
    "LOSS.NAME focal": lambda cfg: cfg.LOSS.NAME == "focal",
    "MODEL.PRETRAINED False": lambda cfg: not cfg.MODEL.PRETRAINED,
    "MODEL.WEIGHTS": lambda cfg: cfg.MODEL.WEIGHTS,
    "OPTIM.LR_POLICY steps": lambda cfg: cfg.OPTIM.LR_POLICY == "steps",
    "an OPTIM.LR_POLICY other than steps": lambda cfg: cfg.OPTIM.LR_POLICY != "steps",
    "OPTIM.LR_SCALE linear or sqrt": lambda cfg: cfg.OPTIM.LR_SCALE != "none",
    "an OPTIM.NAME other than sgd": lambda cfg: cfg.OPTIM.NAME.lower() != "sgd",
    "OPTIM.NAME sgd": lambda cfg: cfg.OPTIM.NAME.lower() == "sgd",
    "OPTIM.WARMUP_EPOCHS above 0": lambda cfg: cfg.OPTIM.WARMUP_EPOCHS,
    "a task without a predict_step of its own": lambda cfg: task_class(cfg).predict_step.__module__ == _BASE_TASK,
    "TEST.CROP center": lambda cfg: cfg.TEST.CROP == "center",
    "TRAIN.IM_SIZE_START": lambda cfg: cfg.TRAIN.IM_SIZE_START,
}
