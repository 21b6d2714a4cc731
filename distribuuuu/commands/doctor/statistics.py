"""Mean and standard deviation of each channel of the training images, in one pass, as a config snippet."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from distribuuuu.commands.scan.data_config import open_images
from distribuuuu.config import Config, ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.config.options import PIXEL_RANGES
from distribuuuu.data.decode import open_lazy_image
from distribuuuu.data.image_file import build_decode_options
from distribuuuu.data.loader import BadImageError
from distribuuuu.data.make_batch import reason_of
from distribuuuu.records.run_log import progress


def format_statistics(cfg: Config, workers: int, as_json: bool) -> str:
    """Return mean and standard deviation, in the units of DATA.MEAN, as JSON or YAML; each image has the same weight.

    Raises:
        ConfigError, BadImageError: the training images, or one of them, cannot be read.
    """
    images, options, one = open_images(cfg, train=True), build_decode_options(cfg), PIXEL_RANGES[cfg.DATA.PIXELS]

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

    with ThreadPoolExecutor(max(1, workers)) as pool:
        total = sum(progress(pool.map(measure, range(len(images))), "measuring", len(images)))
    mean, square = total / len(images)
    deviation = np.sqrt(np.maximum(square - mean**2, 0))
    rows = [[float(f"{value:.6g}") for value in values] for values in (mean, np.where(deviation, deviation, 1))]
    # A constant channel is divided by 1.
    data = {"CHANNELS": cfg.DATA.CHANNELS, "PIXELS": cfg.DATA.PIXELS, "MEAN": rows[0], "STD": rows[1]}
    if as_json:
        return json.dumps({"DATA": data})
    lines = [f"# of {counted(len(images), 'training image')}", "DATA:"]
    return "\n".join([*lines, *(f"  {name}: {value}" for name, value in data.items())])
