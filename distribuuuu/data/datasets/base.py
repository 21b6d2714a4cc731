"""The interface of a data set: images by index, their labels and the class names."""

import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from distribuuuu.config.errors import counted, first_few
from distribuuuu.config.registry import DATASETS
from distribuuuu.config.settings import build_settings
from distribuuuu.files.image_files import ALL_EXTENSIONS, EXTENSIONS, file_stamp, read_file

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

# Images whose names and labels enter the digest of a data set without an index.
DIGEST_SAMPLES = 10_000
# Kinds of targets, see `ImageDataset.targets`.
TARGETS = ("label", "labels", "structured")


class ImageDataset:
    """Images with labels.

    A data set derives from it, defines `from_cfg`, sets `classes` and `labels`, and defines either `read` or, with
    `has_files = True`, `describe`. The other attributes and methods have defaults.
    """

    # Name of each class, in the order of the labels.
    classes: tuple[str, ...] = ()
    # Class index of each image; not needed if `__len__` and `label` are defined.
    labels: "Sequence[int] | np.ndarray | torch.Tensor" = ()
    # Whether `describe(index)` is the path of an image file.
    has_files: bool = False
    # Whether `read(index)` returns the bytes of an image file that another file holds, which a pickled copy reopens.
    holds_files: bool = False
    # What `label` returns: "label", one class; "labels", any number of classes; or "structured", a dict or a tuple of
    # numbers and arrays for a task of your own. `multilabel = True` in a class is another form of "labels".
    targets: str = "label"
    # Reader of images at a URL, a `RemotePack`; it reads ahead.
    remote: Any = None
    # Whether TRAIN.SPLIT and TEST.SPLIT select its training and evaluation images.
    has_splits: bool = True
    # Mean and standard deviation of each channel in the range 0 to 1 (default: ImageNet).
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    # Training crop for DATA.CROP auto: "resized" (random resized crop) or "pad" (pad, then random crop).
    crop: str = "resized"
    # Numbers of classes and of training images if they are known before the data is read, else 0.
    num_classes: int = 0
    num_images: int = 0

    def __init_subclass__(cls) -> None:
        if getattr(cls, "multilabel", False) and cls.targets == "label":
            cls.targets = "labels"

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "ImageDataset":
        """Return the training or the evaluation set of a config; download or generate it if necessary."""
        raise TypeError(f"{cls.__name__} must define from_cfg")

    @classmethod
    def read_settings(cls, cfg) -> Any:
        """Return DATA.KWARGS: an instance of the dataclass `Settings` that the class declares."""
        return build_settings(cfg, "DATA.KWARGS", cls)

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each conflict between the config and the files; imports no torch."""
        if cls.num_classes and cfg.MODEL.NUM_CLASSES != cls.num_classes:
            source = f"DATA.NAME {cfg.DATA.NAME}"
            yield "MODEL.NUM_CLASSES", class_count_mismatch(cfg.MODEL.NUM_CLASSES, cls.num_classes, source)

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return the number of training classes, or 0 if the set must be opened to count them; imports no torch."""
        return cls.num_classes

    @classmethod
    def count_images(cls, cfg, most: int) -> int:
        """Return the number of training images, counted up to `most`, or 0 if the set must be opened to count them."""
        return cls.num_images

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> "bytes | bytearray | memoryview | np.ndarray | torch.Tensor | Image":
        """Return image `index` with as little work as possible; the loader decodes and crops it.

        Allowed are the bytes of an image file; uint8 pixels as an array (H, W) or (H, W, 3) or as a tensor (3, H, W);
        and a PIL image of any mode; with other DATA.CHANNELS or DATA.PIXELS, arrays of these. Any exception means that
        the image is broken.
        """
        if not self.has_files:
            raise TypeError(f"{type(self).__name__} must define read")
        return read_file(self.describe(index))

    def label(self, index: int) -> Any:
        """Return the label of image `index`, by the kind of `targets`.

        It is a class index, a float32 multi-hot vector (classes,), or a dict or tuple, also nested, of numbers and
        arrays with the same names and shapes for all images. A batch stacks these: integers as int64, floating-point
        numbers as float32. Crops and flips do not change them.
        """
        return int(self.labels[index])

    def stamp(self, index: int) -> tuple[int, ...]:
        """Return numbers that change when image `index` is modified in place; empty if this cannot be detected."""
        return file_stamp(self.describe(index)) if self.has_files else ()

    def check_record(self) -> tuple[Path | None, str]:
        """Return the path for the results of the file check, None to store none, and the version of the image list."""
        return None, ""

    def notes(self) -> list[str]:
        """Return warnings to log at the start of a run."""
        return []

    @functools.cached_property
    def digest(self) -> str:
        """128 bits of a SHA-256 of the classes and of the names and labels of the images, in hexadecimal digits.

        The processes of a run compare it, and a resumed run compares it with that of its checkpoint. A name does not
        depend on where the data is. Of a large set, evenly spaced images are taken.
        """
        found = hashlib.sha256(repr((len(self), tuple(self.classes))).encode("utf-8", "surrogateescape"))
        for index in range(0, len(self), max(1, len(self) // DIGEST_SAMPLES)):
            name = self.describe(index)
            name = "/".join(name.split(os.sep)[-2:]) if self.has_files else name
            found.update(f"{name}\0{self.label(index)}\0".encode("utf-8", "surrogateescape"))
        return found.hexdigest()[:32]

    def describe(self, index: int) -> str:
        """Return the name of image `index` for messages: its file or its index."""
        return f"image {index}"


class SplitDataset(ImageDataset):
    """A data set with one folder or file per split; evaluation images are labeled with the training classes.

    A family defines `read_classes`, `find_split_problems` and `from_cfg`.
    """

    @classmethod
    def split_path(cls, section) -> Path:
        """Return the folder or file of cfg.TRAIN or cfg.TEST."""
        return Path(section.DATASET) / section.SPLIT

    @classmethod
    def read_classes(cls, path: Path) -> tuple[str, ...]:
        """Return the class names of a split in the order of its labels; empty if it cannot be read."""
        raise TypeError(f"{cls.__name__} must define read_classes")

    @classmethod
    def find_split_problems(cls, name: str, section) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each problem with the files of a split.

        Args:
            name: TRAIN or TEST.
            section: cfg.TRAIN or cfg.TEST.
        """
        raise TypeError(f"{cls.__name__} must define find_split_problems")

    @classmethod
    def training_classes(cls, cfg) -> tuple[str, ...] | None:
        """Return the classes to label an evaluation set with; None if the training data cannot be read."""
        return cls.read_classes(cls.split_path(cfg.TRAIN)) or None

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for problems with the files, unknown classes and a wrong number of classes."""
        name = "TRAIN" if train else "TEST"
        path, training_path = cls.split_path(cfg[name]), cls.split_path(cfg.TRAIN)
        trained = cls.read_classes(training_path)
        problems = list(cls.find_split_problems(name, cfg[name]))
        yield from problems
        own = () if problems else cls.read_classes(path)
        num_classes, source = (len(trained), training_path) if trained else (len(own), path)
        if trained and (extra := sorted(set(own) - set(trained))):
            yield f"{name}.SPLIT", unknown_classes(path, extra)
        elif own and num_classes != cfg.MODEL.NUM_CLASSES:
            yield "MODEL.NUM_CLASSES", class_count_mismatch(cfg.MODEL.NUM_CLASSES, num_classes, str(source))

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return the number of training classes; without training data, of evaluation classes."""
        counts = (len(cls.read_classes(cls.split_path(section))) for section in (cfg.TRAIN, cfg.TEST))
        return cls.num_classes or next(filter(None, counts), 0)


def get_dataset(name: str) -> type[ImageDataset]:
    """Return the data set class that is registered under a name.

    Raises:
        UnknownNameError: there is none.
    """
    return cast(type[ImageDataset], DATASETS.get(name))


# ------------------------------------------------------------------------------------- messages


def class_count_mismatch(num_classes: int, found: int, source: str) -> str:
    """Return the message for a MODEL.NUM_CLASSES that differs from the number of classes in the data."""
    return f"{num_classes}, but {source} has {counted(found, 'class')}; set MODEL.NUM_CLASSES {found}"


def unknown_classes(path: Path | str, names: Sequence[str]) -> str:
    """Return the message for evaluation classes that are not among the training classes."""
    return f"{path} has classes that the training data lacks: {first_few(names)}"


# ---------------------------------------------------------------------------------------- files


def image_extensions(cfg) -> tuple[str, ...]:
    """Return the extensions of image files; with other channels or pixels than 8-bit RGB, .npy is one of them."""
    is_rgb = (cfg.DATA.CHANNELS, cfg.DATA.PIXELS) == (3, "uint8")
    return EXTENSIONS if is_rgb else ALL_EXTENSIONS


def is_file(image: object) -> TypeGuard[bytes | bytearray | memoryview]:
    """Return whether `ImageDataset.read` returned the bytes of an image file rather than pixels."""
    return isinstance(image, (bytes, bytearray, memoryview))
