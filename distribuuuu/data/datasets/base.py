"""The interface of a data set: images by index, their labels and the class names."""

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import DataError, counted
from distribuuuu.config.settings import build_settings
from distribuuuu.files.image_files import ALL_EXTENSIONS, EXTENSIONS

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

# Images whose names and labels enter the digest of a data set without an index.
DIGEST_SAMPLES = 10_000


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
    # numbers and arrays for a task of your own.
    targets: str = "label"
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
            yield "MODEL.NUM_CLASSES", class_count_mismatch(cfg, cls.num_classes)

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return the number of training classes, or 0 if the set must be opened to count them; imports no torch."""
        return cls.num_classes

    @classmethod
    def count_images(cls, cfg) -> int:
        """Return the number of training images, or 0 if the set must be opened to count them."""
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

    def notes(self) -> list[str]:
        """Return warnings to log at the start of a run."""
        return []

    def find_own_problems(self, cfg) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each further conflict of an opened set with the config."""
        yield from ()

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
    """A data set of files with two splits; evaluation images are labeled with the training classes.

    A family defines `open_split`.
    """

    # The option, of TRAIN and TEST, that is at fault in messages.
    fault = "SPLIT"
    # Further arguments of `open_split` in the checks before a start.
    check_options: tuple[Any, ...] = ()

    @classmethod
    def open_split(cls, cfg, name: str, trained: ImageDataset | None = None) -> ImageDataset:
        """Return the images of cfg.TRAIN or cfg.TEST; raise ConfigError with all problems, of which `fault` is the key.

        The training images define the labels of the others; without any, a split has classes of its own.
        """
        raise TypeError(f"{cls.__name__} must define open_split")

    @classmethod
    def open_training(cls, cfg) -> ImageDataset | None:
        """Return the training images to label an evaluation set with; None if they cannot be read."""
        try:
            images = cls.open_split(cfg, "TRAIN")
        except ConfigError:
            return None
        return images if len(images) else None

    @classmethod
    def from_cfg(cls, cfg, train: bool, *options: Any) -> ImageDataset:
        """Return the set; classes without evaluation images are allowed. `options` are those of `open_split`."""
        name = "TRAIN" if train else "TEST"
        try:
            return cls.open_split(cfg, name, None if train else cls.open_training(cfg), *options)
        except ConfigError as error:
            named = [Problem(problem.key or f"{name}.{cls.fault}", problem.message) for problem in error.problems]
            raise ConfigError(named) from error

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for problems with the files and the classes; a split without an index is scanned."""
        try:
            images = cls.from_cfg(cfg, train, *cls.check_options)
        except ConfigError as error:
            yield from ((str(problem.key), problem.message) for problem in error.problems)
            return
        if len(images.classes) != cfg.MODEL.NUM_CLASSES and not cfg.TEST.LABELS:
            yield "MODEL.NUM_CLASSES", class_count_mismatch(cfg, len(images.classes))
        yield from images.find_own_problems(cfg)

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return the number of training classes; without training data, of evaluation classes."""
        for train in (True, False) if not cls.num_classes else ():
            with contextlib.suppress(ConfigError):
                return len(cls.from_cfg(cfg, train, *cls.check_options).classes)
        return cls.num_classes

    @classmethod
    def count_images(cls, cfg) -> int:
        """Return the number of training images; 0 if they cannot be read."""
        with contextlib.suppress(ConfigError):
            return cls.num_images or len(cls.from_cfg(cfg, True, *cls.check_options))
        return 0


# ------------------------------------------------------------------------------------- messages


def class_count_mismatch(cfg, found: int) -> str:
    """Return the message for a MODEL.NUM_CLASSES that differs from the number of classes in the data."""
    source = f"{cfg.MODEL.NUM_CLASSES}, but DATA.NAME {cfg.DATA.NAME}"
    some = "; to evaluate on some of the classes, set TEST.LABELS weights" * (found < cfg.MODEL.NUM_CLASSES)
    some += ", or imagenet if the weights do not name their classes" * (cfg.MODEL.NUM_CLASSES == 1000 > found)
    some *= cfg.DATA.NAME == "imagefolder"
    return f"{source} has {counted(found, 'class')}; set MODEL.NUM_CLASSES {found}{some}"


# ---------------------------------------------------------------------------------------- files


def image_extensions(cfg) -> tuple[str, ...]:
    """Return the extensions of image files; with other channels or pixels than 8-bit RGB, .npy is one of them."""
    is_rgb = (cfg.DATA.CHANNELS, cfg.DATA.PIXELS) == (3, "uint8")
    return EXTENSIONS if is_rgb else ALL_EXTENSIONS


def is_file(image: object) -> TypeGuard[bytes | bytearray | memoryview]:
    """Return whether `ImageDataset.read` returned the bytes of an image file rather than pixels."""
    return isinstance(image, (bytes, bytearray, memoryview))


def name_at(text: Any, offsets: Any, index: int) -> str:
    """Return name `index` of names whose bytes are concatenated, from `offsets[index]` to `offsets[index + 1]`."""
    return os.fsdecode(bytes(text[offsets[index] : offsets[index + 1]]))


def packed_name(arrays: Mapping[str, Any], prefix: str, index: int) -> str:
    """Return name `index` of the arrays of `pack_names`."""
    return name_at(arrays[f"{prefix}_bytes"], arrays[f"{prefix}_offsets"], index)


def open_nonblocking(path: str, flags: int) -> int:
    """Open a file without waiting: a named pipe with the name of an image then reads as empty."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_file(path: str) -> bytearray:
    """Return the bytes of an image file in writable memory; raise DataError if the disk or the network fails."""
    try:
        file = open_nonblocking(path, os.O_RDONLY)
        try:
            data, size = bytearray(os.fstat(file).st_size), 0
            while size < len(data) and (num := os.readv(file, [memoryview(data)[size:]])):
                size += num
            del data[size:]
        finally:
            os.close(file)
    except FileNotFoundError:  # the image was deleted
        raise
    except OSError as error:
        raise DataError.of_read(path, error) from error
    return data
