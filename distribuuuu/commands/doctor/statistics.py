"""Mean and standard deviation of each channel of the training images, in one pass, as a config snippet."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from distribuuuu.config import Config, ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.config.options import PIXEL_RANGES
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import open_lazy_image
from distribuuuu.data.image_file import build_decode_options
from distribuuuu.data.loader import BadImageError
from distribuuuu.data.make_batch import reason_of


def measure_channels(cfg: Config, images: ImageDataset, workers: int, update: Callable[[int], object]) -> np.ndarray:
    """Return mean and standard deviation of each channel, float64 (2, channels), in the units of DATA.MEAN.

    Each image has the same weight, whatever its size.

    Raises:
        BadImageError: an image cannot be read.
    """
    options, one = build_decode_options(cfg), PIXEL_RANGES[cfg.DATA.PIXELS]

    def measure(index: int) -> np.ndarray:
        try:
            pixels = open_lazy_image(images.read(index), cfg.DATA.DECODER, options).pixels().numpy()
        except ConfigError:
            raise
        except Exception as error:  # decoders raise nearly anything
            reason = f"{type(error).__name__}: {reason_of(error)}; fix: repair or remove it"
            raise BadImageError(f"broken image: {images.describe(index)}: {reason}") from error
        values = pixels.reshape(len(pixels), -1) / np.float64(one)
        return np.stack([values.mean(1), np.square(values).mean(1)])

    total = np.zeros((2, options.channels))
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for found in pool.map(measure, range(len(images))):
            update(1)
            total += found
    mean, square = total / len(images)
    return np.stack([mean, np.sqrt(np.maximum(square - mean**2, 0))])


def format_snippet(cfg: Config, found: np.ndarray, num: int, as_json: bool) -> str:
    """Return mean and standard deviation as JSON, or as YAML with the number of images in a comment."""
    mean, std = ([float(f"{value:.6g}") for value in values] for values in found)
    # A constant channel is divided by 1.
    data = {"CHANNELS": cfg.DATA.CHANNELS, "PIXELS": cfg.DATA.PIXELS, "MEAN": mean, "STD": [one or 1.0 for one in std]}
    if as_json:
        return json.dumps({"DATA": data})
    lines = [f"# of {counted(num, 'training image')}", "DATA:", *(f"  {name}: {value}" for name, value in data.items())]
    return "\n".join(lines)
