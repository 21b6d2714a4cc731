"""Random images from memory: no disk and no decoding, to benchmark a model or to try a configuration."""

import math
import random

from distribuuuu.config.derived import Size, eval_resize, height_and_width
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset


@DATASETS.register("dummy")
class Dummy(ImageDataset):
    """Random images of the configured size, with labels that cycle through the configured classes."""

    num_images = 1000
    has_splits = False

    def __init__(
        self, im_size: Size, num_classes: int, length: int = num_images, channels: int = 3, pixels: str = "uint8"
    ):
        self.shape, self.pixels = (*height_and_width(im_size), channels), pixels
        self.mean, self.std = (self.mean, self.std) if channels == 3 else ((0.5,) * channels, (0.25,) * channels)
        self.labels = [index % max(1, num_classes) for index in range(length)]
        self.classes = tuple(f"class_{number}" for number in range(num_classes))

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "Dummy":
        """Return the set for TRAIN.IM_SIZE or TEST.IM_SIZE, and MODEL.NUM_CLASSES."""
        size, data = cfg.TRAIN.IM_SIZE if train else eval_resize(cfg), cfg.DATA
        return cls(size, cfg.MODEL.NUM_CLASSES, channels=data.CHANNELS, pixels=data.PIXELS)

    def read(self, index: int):
        """Return noise (H, W, C) of 0 to 255, of DATA.PIXELS, the same for the same index."""
        import numpy as np

        noise = bytearray(random.Random(index).randbytes(math.prod(self.shape)))
        return np.frombuffer(noise, np.uint8).reshape(self.shape).astype(self.pixels, copy=False)
