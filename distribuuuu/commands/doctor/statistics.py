"""Mean and standard deviation of each channel of the training images, in one pass, as a config snippet."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.config_node import changed
from distribuuuu.config.errors import counted
from distribuuuu.config.options import PIXEL_RANGES
from distribuuuu.config.registry import dataset_class
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import build_decode_options, open_lazy_image
from distribuuuu.data.loader import BadImageError
from distribuuuu.data.make_batch import reason_of
from distribuuuu.inference.load_run import open_data


def open_training_images(cfg: Config) -> ImageDataset:
    """Return the training images of a config, with any number of classes.

    Raises:
        ConfigError: they cannot be opened.
    """
    cfg = changed(cfg, {"MODEL.NUM_CLASSES": dataset_class(cfg).count_classes(cfg)})
    found = dataset_class(cfg).find_problems(cfg, True)
    if problems := [Problem(key, text, cfg.origins) for key, text in found if key != "MODEL.NUM_CLASSES"]:
        raise ConfigError(problems)
    return open_data(cfg, train=True)


def measure_channels(
    cfg: Config, images: ImageDataset, workers: int, update: Callable[[int], object]
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return mean and standard deviation per channel, in the units of DATA.MEAN, and the number of images.

    Each image has the same weight, whatever its size.

    Raises:
        BadImageError: an image cannot be read, and DATA.ON_BAD_IMAGE is not skip.
    """
    options, one = build_decode_options(cfg), PIXEL_RANGES[cfg.DATA.PIXELS]

    def measure(index: int) -> tuple[np.ndarray, np.ndarray] | None:
        try:
            pixels = open_lazy_image(images.read(index), cfg.DATA.DECODER, options).pixels().numpy()
        except ConfigError:
            raise
        except Exception as error:  # decoders raise nearly anything
            if cfg.DATA.ON_BAD_IMAGE == "skip":
                return None
            fix = "fix: repair or remove it, or set DATA.ON_BAD_IMAGE skip"
            reason = f"{type(error).__name__}: {reason_of(error)}"
            raise BadImageError(f"broken image: {images.describe(index)}: {reason}; {fix}") from error
        values = pixels.reshape(len(pixels), -1) / np.float64(one)
        return values.mean(1), np.square(values).mean(1)

    total, squares, num = np.zeros(options.channels), np.zeros(options.channels), 0
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for found in pool.map(measure, range(len(images))):
            update(1)
            if found:
                total, squares, num = total + found[0], squares + found[1], num + 1
    if not num:
        raise ConfigError("TRAIN.DATASET: got no image that can be read; expected training images")
    mean = total / num
    return mean, np.sqrt(np.maximum(squares / num - mean**2, 0)), num


def format_snippet(cfg: Config, mean: np.ndarray, std: np.ndarray, num: int, as_json: bool) -> str:
    """Return the options as JSON, or as YAML with the number of images and of constant channels in a comment."""
    constant = std == 0
    values = {name: [float(f"{value:.6g}") for value in found]
              for name, found in (("MEAN", mean), ("STD", np.where(constant, 1, std)))}  # fmt: skip
    data = {"CHANNELS": cfg.DATA.CHANNELS, "PIXELS": cfg.DATA.PIXELS, **values}
    if as_json:
        return json.dumps({"DATA": data})
    note = f"; {counted(int(constant.sum()), 'channel')} without any variation: STD 1" if constant.any() else ""
    lines = [f"# of {counted(num, 'training image')}{note}", "DATA:"]
    return "\n".join([*lines, *(f"  {name}: {value}" for name, value in data.items())])
