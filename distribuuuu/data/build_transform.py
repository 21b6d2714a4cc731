"""Transforms from a config: crops, further views of an image, and stages of the augmentation."""

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.derived import eval_crop_size
from distribuuuu.config.options import WHOLE_IMAGE
from distribuuuu.config.registry import task_class
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.transforms import CenterCrop, ResizedCrop, Transform

if TYPE_CHECKING:
    from distribuuuu.data.crops import EvalCrop

# The name of the training loader of the config, among those of the task.
MAIN = "train"
# First letters of the options that a view of an image, and a stage, may set.
_OF_VIEW = ("TRAIN.IM_SIZE", "DATA.CROP", "DATA.FLIP", "DATA.VFLIP", "DATA.INTERPOLATION",
            "AUG.POLICY", "AUG.COLOR_JITTER", "AUG.OPERATIONS", "AUG.ERASING")  # fmt: skip
_OF_STAGE = tuple(key for key in _OF_VIEW if key != "TRAIN.IM_SIZE")


def depends_on_epoch(cfg) -> bool:
    """Tell whether the transform of the training images depends on the epoch."""
    return bool(cfg.TRAIN.IM_SIZE_START or task_class(cfg).augmentation_stages(cfg))


def build_transform(cfg, images: ImageDataset, train: bool, name: str = MAIN) -> Transform:
    """Return the transform from an image to uint8 (3, H, W), or to several views of a training image."""
    if not train:
        return build_eval_crop(cfg)
    stages = {0: build_views(cfg, images, name)}
    for epoch, options in sorted(task_class(cfg).augmentation_stages(cfg).items()):
        from distribuuuu.config.reader import override

        stages[epoch] = build_views(override(cfg, options, f"stage from epoch {epoch}", _OF_STAGE), images, name)
    if not depends_on_epoch(cfg):
        return stages[0]
    from distribuuuu.data.views import EpochTransforms, build_im_size

    return EpochTransforms(stages, build_im_size(cfg))


def build_views(cfg, images: ImageDataset, name: str) -> Transform:
    """Return the transform of the training images of a loader."""
    views = []
    for number, options in enumerate(task_class(cfg).views(cfg, name), 1):
        own = cfg
        if options:
            from distribuuuu.config.reader import override

            own = override(cfg, options, f"view {number} of loader {name}", _OF_VIEW)
        if cfg.TRAIN.IM_SIZE_START and own.TRAIN.IM_SIZE != cfg.TRAIN.IM_SIZE:
            message = f"got {cfg.TRAIN.IM_SIZE_START}; with views of several sizes, expected 0; fix: set it to 0"
            raise ConfigError(Problem("TRAIN.IM_SIZE_START", message), cfg.origins)
        views.append(build_view(own, images))
    if not views:
        raise ConfigError(f"TASK.NAME: {task_class(cfg).__name__}.views returns no view of loader {name}")
    if len(views) == 1:
        return views[0]
    from distribuuuu.data.views import Views

    return Views(tuple(views))


def build_eval_crop(cfg) -> "EvalCrop":
    """Return the transform of an evaluation image to uint8 (3, H, W)."""
    test, size = cfg.TEST, eval_crop_size(cfg)
    if test.CROP == "center":
        return CenterCrop(test.IM_SIZE, size, test.INTERPOLATION)
    from distribuuuu.data.crops import WholeImage

    return WholeImage(size, test.CROP, interpolation=test.INTERPOLATION)


def build_view(cfg, images: ImageDataset) -> Transform:
    """Return the transform of a training image to uint8 (3, H, W)."""
    data = cfg.DATA
    im_size = cfg.TRAIN.IM_SIZE
    crop: Transform
    kind = images.crop if data.CROP == "auto" else data.CROP
    if kind in WHOLE_IMAGE:
        from distribuuuu.data.crops import WholeImage

        crop = WholeImage(im_size, kind, data.FLIP, data.INTERPOLATION, data.VFLIP)
    elif kind == "resized":
        crop = ResizedCrop(im_size, data.CROP_SCALE, data.FLIP, data.CROP_RATIO, data.INTERPOLATION, data.VFLIP)
    else:
        from distribuuuu.data.crops import PaddedCrop

        mode = data.CROP_PADDING_MODE
        crop = PaddedCrop(im_size, data.CROP_PADDING, data.FLIP, data.INTERPOLATION, data.VFLIP, mode)
    aug = cfg.AUG
    if aug.POLICY == "none" and not (any(aug.COLOR_JITTER) or aug.OPERATIONS or aug.ERASING):
        return crop
    from distribuuuu.data.augment import build_augmentation

    return build_augmentation(cfg, crop, *statistics_of(cfg, images))


def statistics_of(cfg, images: ImageDataset) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and the standard deviation per channel, in [0, 1], that images are normalized with.

    Of float32 images (DATA.PIXELS), they are in the units of the files. For one channel, three values are averaged.
    """
    mean, std = cfg.DATA.MEAN or images.mean, cfg.DATA.STD or images.std
    if cfg.DATA.CHANNELS == 1:
        mean, std = (fmean(mean),), (fmean(std),)
    for key, values in (("DATA.MEAN", mean), ("DATA.STD", std)):
        if len(values) != cfg.DATA.CHANNELS:
            message = f"got {list(values)}; expected {cfg.DATA.CHANNELS} numbers, one per channel"
            raise ConfigError(Problem(key, f"{message}; fix: `distribuuuu doctor --statistics` finds them"))
    return mean, std
