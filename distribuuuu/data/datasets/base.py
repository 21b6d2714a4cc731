"""What a data set is to the rest of the package: images by number, their labels and their class names."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from distribuuuu.config.errors import counted

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

# Folders that systems and tools leave behind, in lower case; at any depth they hold no images of the data.
JUNK_FOLDERS = (
    "__macosx", "@eadir", "$recycle.bin", "lost+found", "system volume information", ".ipynb_checkpoints",
)  # fmt: skip
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageDataset:
    """Images with labels. A family derives from it and sets what differs."""

    # Mean and standard deviation of each channel, of 1.0 (here ImageNet's).
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    # Training crop that suits the set: "resized" (random resized crop) or "pad" (pad, then random crop).
    crop: str = "resized"
    # Name of each class, in the order of the labels.
    classes: tuple[str, ...] = ()
    # Number of classes when it is known before the data is read, else 0.
    num_classes: int = 0
    # Number of training images when it is known before the data is read, else 0.
    num_images: int = 0
    # Whether `where(index)` is the path of the file of an image.
    has_files: bool = False
    # Whether an image may be of several classes, or of none.
    multilabel: bool = False
    # Whether TRAIN.SPLIT and TEST.SPLIT select its training and evaluation images.
    has_splits: bool = True

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "ImageDataset":
        """Return the training or evaluation set that the config describes, fetched or drawn if it must be."""
        raise TypeError(f"{cls.__name__} must define from_cfg")

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for what the config says that the disk contradicts; imports no torch."""
        if cls.num_classes and cfg.MODEL.NUM_CLASSES != cls.num_classes:
            where = f"DATA.NAME {cfg.DATA.NAME}"
            yield "MODEL.NUM_CLASSES", class_count_mismatch(cfg.MODEL.NUM_CLASSES, cls.num_classes, where)

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return the number of classes of the training data, 0 when only its images tell; imports no torch."""
        return cls.num_classes

    @classmethod
    def count_images(cls, cfg, most: int) -> int:
        """Return the number of training images, counted up to `most`; 0 if only the opened set tells it."""
        return cls.num_images

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} must define __len__")

    def read(self, index: int) -> "bytes | bytearray | memoryview | np.ndarray | torch.Tensor | Image":
        """Return image `index`, as cheaply as the set can: it is decoded and cropped later.

        The bytes of an image file; or its pixels, uint8 (H, W) or (H, W, 3), as a tensor (3, H, W); or a PIL image of
        any mode. Any exception means that the image is broken.
        """
        raise TypeError(f"{type(self).__name__} must define read")

    def label(self, index: int) -> "int | np.ndarray":
        """Return the class of image `index`, from 0; of a multilabel set float32 (classes,): 1 for each of its."""
        raise TypeError(f"{type(self).__name__} must define label")

    def stamp(self, index: int) -> tuple[int, ...]:
        """Return numbers that change when image `index` is changed in place; none where the set cannot tell."""
        return file_stamp(self.describe(index)) if self.has_files else ()

    def check_place(self) -> tuple[Path | None, str]:
        """Return the file beside which the record of a check may lie, None for nowhere, and the version of the list."""
        return None, ""

    def notes(self) -> list[str]:
        """Return what a run should warn of at its start."""
        return []

    def describe(self, index: int) -> str:
        """Return what to call image `index` in a message: its file, or its number."""
        return f"image {index}"


def file_stamp(path: str) -> tuple[int, ...]:
    """Return the size of a file in bytes and the time of its last change in ns; nothing if it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_size, status.st_mtime_ns


def class_count_mismatch(num_classes: int, found: int, where: str) -> str:
    """Return the message for a number of classes that is not the data's."""
    return f"{num_classes}, but {where} has {counted(found, 'class')}; set MODEL.NUM_CLASSES {found}"


def is_class(name: str) -> bool:
    """Tell by its name whether a folder is a class: hidden ones and those of systems and tools are none."""
    return not name.startswith(".") and name.lower() not in JUNK_FOLDERS


def is_image(name: str) -> bool:
    """Tell by its name whether a file is an image: by the extension, and hidden ones are none."""
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe that bears the name of an image is empty then, and would be waited for otherwise."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_file(path: str) -> bytearray:
    """Return the bytes of an image file, in memory of their own that may be written to."""
    with open(path, "rb", opener=open_at_once) as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        del data[file.readinto(data) :]
    return data
