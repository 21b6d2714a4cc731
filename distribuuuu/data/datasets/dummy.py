"""Random images from memory: no disk and no decoding, to benchmark a model or to try a configuration."""

import random

from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset


@DATASETS.register("dummy")
class Dummy(ImageDataset):
    """Random images of the configured size, with labels that cycle through the configured classes."""

    num_images = 1000
    has_splits = False

    def __init__(self, im_size: int, num_classes: int, length: int = num_images):
        self.im_size = im_size
        self.labels = [index % max(1, num_classes) for index in range(length)]
        self.classes = tuple(f"class_{number}" for number in range(num_classes))

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "Dummy":
        """Return the set for TRAIN.IM_SIZE or TEST.IM_SIZE, and MODEL.NUM_CLASSES."""
        return cls(cfg.TRAIN.IM_SIZE if train else cfg.TEST.IM_SIZE, cfg.MODEL.NUM_CLASSES)

    def read(self, index: int):
        """Return uint8 noise (H, W, 3), the same for the same index."""
        import numpy as np

        noise = bytearray(random.Random(index).randbytes(3 * self.im_size**2))
        return np.frombuffer(noise, np.uint8).reshape(self.im_size, self.im_size, 3)
