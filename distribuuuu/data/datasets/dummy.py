"""Random images from memory: no disk, no decoding, to measure a model or to try a set-up."""

from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset


@DATASETS.register("dummy")
class Dummy(ImageDataset):
    """A thousand random images of the configured size, their labels spread over the configured classes."""

    num_images = 1000
    has_splits = False

    def __init__(self, im_size: int, num_classes: int, length: int = num_images):
        self.im_size = im_size
        self.length = length
        self.classes = tuple(f"class_{number}" for number in range(num_classes))

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "Dummy":
        """Return the set for TRAIN.IM_SIZE or TEST.IM_SIZE, and MODEL.NUM_CLASSES."""
        return cls(cfg.TRAIN.IM_SIZE if train else cfg.TEST.IM_SIZE, cfg.MODEL.NUM_CLASSES)

    def __len__(self) -> int:
        return self.length

    def read(self, index: int):
        """Return the pixels of image `index`, uint8 (H, W, 3): the same noise each time."""
        import random

        import numpy as np

        size = self.im_size
        noise = bytearray(random.Random(index).randbytes(3 * size * size))
        return np.frombuffer(noise, np.uint8).reshape(size, size, 3)

    def label(self, index: int) -> int:
        """Return the class of image `index`, from 0."""
        return index % len(self.classes)
