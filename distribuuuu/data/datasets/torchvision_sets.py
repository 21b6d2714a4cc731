"""Data sets of torchvision, which reads and downloads them: four by a name of their own, others as torchvision/NAME."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.registry import DATASETS
from distribuuuu.config.settings import setting
from distribuuuu.data.datasets.base import ImageDataset, class_count_mismatch, name_at, read_file
from distribuuuu.files.locks import take_turn

# Seconds to wait for another process that downloads.
DOWNLOAD_WAIT_S = 3600


def open_source(source: str, root: str, key: str, download: bool, **arguments: Any) -> Any:
    """Return a data set of torchvision, by the name of its class; raise ConfigError, with the key, if that fails.

    One of several processes downloads it while the others wait.
    """
    try:
        import torchvision.datasets

        dataset = getattr(torchvision.datasets, source)
        with contextlib.ExitStack() as turn:
            if download:
                # Before the first look: torchvision takes a folder that another process unpacks for the whole.
                lock = Path(root) / f".{source}.lock"
                with contextlib.suppress(OSError):  # a folder that is read-only
                    turn.enter_context(take_turn(lock, DOWNLOAD_WAIT_S))
                    turn.callback(lock.unlink, missing_ok=True)
            try:
                return dataset(root, **arguments)
            except (RuntimeError, OSError):
                if not download:
                    raise
                return dataset(root, **arguments, download=True)
    except ImportError as error:
        fix = f"fix: pip install {error.name}" if error.name else error
        raise ConfigError(f"DATA.NAME: torchvision's {source} needs another package; {fix}") from error
    except Exception as error:  # torchvision's parsers raise nearly anything
        reason = " ".join(str(error).split()).replace("download=True", "DATA.DOWNLOAD True")
        problem = f"{source} is not in {root} or is damaged, and cannot be downloaded: {type(error).__name__}: {reason}"
        raise ConfigError(f"{key}: {problem}") from error


class Source(NamedTuple):
    """A class of torchvision.datasets.

    Attributes:
        num_classes: 0: it depends on the settings.
        splits: the values of TRAIN.SPLIT and TEST.SPLIT.
        keyword: the argument that selects them; of `train`, the value is true for the split train.
        settings: the names in DATA.KWARGS that are arguments.
    """

    num_classes: int
    splits: tuple[str, ...] = ("train", "test")
    keyword: str = "split"
    settings: tuple[str, ...] = ()


_WITH_VAL = ("train", "val", "test")
_SMALL = Source(10, keyword="train")
SOURCES = {
    "CIFAR10": _SMALL,
    "CIFAR100": _SMALL._replace(num_classes=100),
    "DTD": Source(47, _WITH_VAL, settings=("partition",)),
    "EMNIST": _SMALL._replace(num_classes=0, settings=("split",)),
    "FGVCAircraft": Source(0, (*_WITH_VAL, "trainval"), settings=("annotation_level",)),
    "FashionMNIST": _SMALL,
    "Flowers102": Source(102, _WITH_VAL),
    "Food101": Source(101),
    "GTSRB": Source(43),
    "Imagenette": Source(10, ("train", "val"), settings=("size",)),
    "KMNIST": _SMALL,
    "MNIST": _SMALL,
    "OxfordIIITPet": Source(37, ("trainval", "test")),
    "Places365": Source(365, ("train-standard", "train-challenge", "val"), settings=("small",)),
    "QMNIST": _SMALL,
    "STL10": Source(10),
    "SVHN": Source(10, ("train", "test", "extra")),
    "StanfordCars": Source(196),
    "USPS": _SMALL,
}
_PREFIX = "torchvision/"
# Splits in the place of the default, if a set has no split of that name.
_OTHER_NAMES = {"train": ("trainval", "train-standard"), "val": ("test",)}


@DATASETS.register("torchvision/DTD")
@DATASETS.register("torchvision/FGVCAircraft")
@DATASETS.register("torchvision/Flowers102")
@DATASETS.register("torchvision/Food101")
@DATASETS.register("torchvision/GTSRB")
@DATASETS.register("torchvision/Imagenette")
@DATASETS.register("torchvision/OxfordIIITPet")
@DATASETS.register("torchvision/Places365")
@DATASETS.register("torchvision/STL10")
@DATASETS.register("torchvision/StanfordCars")
class NamedSet(ImageDataset):
    """The set DATA.NAME torchvision/NAME below TRAIN.DATASET and TEST.DATASET."""

    # The name in torchvision of a set with a DATA.NAME of its own.
    source = ""

    @dataclass
    class Settings:
        """DATA.KWARGS: the arguments of all sets, each for the set that its help names."""

        annotation_level: str = setting("variant", "FGVCAircraft", choices=("variant", "family", "manufacturer"))
        partition: int = setting(1, "DTD", 1, 10)
        size: str = setting("full", "Imagenette", choices=("full", "320px", "160px"))
        small: bool = setting(False, "Places365: images of 256 px")
        split: str = setting("balanced", "EMNIST", choices=("byclass", "bymerge", "balanced", "letters", "digits"))

    def __init__(self, name: str, data: Any, key: str):
        import numpy as np

        self.name = f"{_PREFIX}{name}"
        self.labels = labels = _find_labels(data)
        given = getattr(data, "classes", None) or getattr(data, "categories", None)
        names = given or range(SOURCES[name].num_classes or int(labels.max(initial=0)) + 1)
        self.classes = tuple(", ".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in names)
        if labels.ndim != 1 or not len(labels) or labels.min() < 0 or labels.max() >= len(self.classes):
            raise ConfigError(f"{key}: {self.name} has no images, or labels outside of its {len(self.classes)} classes")
        self._files = _find_files(data)
        self.has_files = self._files is not None
        # An array where it has one, not lists: counting references would copy these into each loader worker.
        pixels = getattr(data, "data", None)
        self._data: Any = None if self.has_files else data if pixels is None else np.asarray(pixels)
        if isinstance(self._data, np.ndarray) and self._data.ndim == 4 and self._data.shape[1] == 3:
            self._data = self._data.transpose(0, 2, 3, 1)

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "NamedSet":
        """Return the images of a split."""
        name, section, settings = cls._name_of(cfg), cfg.TRAIN if train else cfg.TEST, cls.read_settings(cfg)
        source, key = SOURCES[name], f"{'TRAIN' if train else 'TEST'}.DATASET"
        arguments = {argument: getattr(settings, argument) for argument in source.settings}
        split = _find_split(source, section.SPLIT)
        arguments[source.keyword] = split == "train" if source.keyword == "train" else split
        return cls(name, open_source(name, section.DATASET, key, cfg.DATA.DOWNLOAD, **arguments), key)

    @classmethod
    def _name_of(cls, cfg) -> str:
        return cls.source or cfg.DATA.NAME.removeprefix(_PREFIX)

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for a wrong number of classes, a split or a setting that the set does not have."""
        name, section, settings = cls._name_of(cfg), "TRAIN" if train else "TEST", cfg.DATA.KWARGS
        source, split = SOURCES[name], cfg[section].SPLIT
        if source.num_classes and cfg.MODEL.NUM_CLASSES != source.num_classes:
            yield "MODEL.NUM_CLASSES", class_count_mismatch(cfg, source.num_classes)
        for setting_name in sorted({*settings}.difference(source.settings)):
            expected = f"expected one of {', '.join(source.settings)}" if source.settings else "it has none"
            yield f"DATA.KWARGS.{setting_name}", f"no such setting of {cfg.DATA.NAME}; {expected}"
        if not _find_split(source, split):
            hint = did_you_mean(split, source.splits)
            yield f"{section}.SPLIT", f"got {split!r}; {cfg.DATA.NAME} has {', '.join(source.splits)}{hint}"

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return the number of classes; 0 if it depends on the settings."""
        return SOURCES[cls._name_of(cfg)].num_classes

    def read(self, index: int) -> Any:
        """Return the bytes of an image file, its pixels, or what torchvision decodes."""
        if self._files:
            return read_file(self.describe(index))
        item = self._data[index]
        return item[0] if isinstance(item, tuple) else item

    def describe(self, index: int) -> str:
        """Return the file of image `index`, or its number in torchvision's data set."""
        number = f"image {index}" if self.source else f"image {index} of {self.name}"
        return name_at(*self._files, index) if self._files else number


@DATASETS.register("torchvision/EMNIST")
@DATASETS.register("torchvision/KMNIST")
@DATASETS.register("torchvision/QMNIST")
@DATASETS.register("torchvision/SVHN")
@DATASETS.register("torchvision/USPS")
class SmallNamedSet(NamedSet):
    """A set of small images."""

    crop = "pad"


@DATASETS.register("cifar10")
class Cifar10(SmallNamedSet):
    """CIFAR-10 (Krizhevsky, 2009): 50,000 + 10,000 images of 32 px in 10 classes."""

    source, num_classes, has_splits = "CIFAR10", 10, False
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@DATASETS.register("cifar100")
class Cifar100(SmallNamedSet):
    """CIFAR-100 (Krizhevsky, 2009): 50,000 + 10,000 images of 32 px in 100 classes."""

    source, num_classes, has_splits = "CIFAR100", 100, False
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


@DATASETS.register("mnist")
class Mnist(SmallNamedSet):
    """MNIST (LeCun et al., 1998): 60,000 + 10,000 gray images of 28 px in 10 classes."""

    source, num_classes, has_splits = "MNIST", 10, False
    mean, std = (0.1307,) * 3, (0.3081,) * 3


@DATASETS.register("fashion_mnist")
class FashionMnist(SmallNamedSet):
    """Fashion-MNIST (Xiao et al., arXiv 1708.07747): 60,000 + 10,000 gray images of 28 px in 10 classes."""

    source, num_classes, has_splits = "FashionMNIST", 10, False
    mean, std = (0.2860,) * 3, (0.3530,) * 3


def _find_split(source: Source, split: str) -> str:
    """Return the name in torchvision of a split; empty if there is none."""
    return next((name for name in (split, *_OTHER_NAMES.get(split, ())) if name in source.splits), "")


def _find_labels(data: Any) -> Any:
    """Return the labels of a data set, int64 (N,), without decoding images where its attributes tell."""
    import numpy as np

    for name in ("targets", "labels", "_labels", "y", "_samples", "samples"):
        values = getattr(data, name, None)
        if values is not None and len(values) == len(data):
            is_pair = len(values) > 0 and isinstance(values[0], tuple)
            labels = np.asarray([pair[1] for pair in values] if is_pair else values, dtype=np.int64)
            return labels[:, 0] if labels.ndim == 2 else labels  # QMNIST describes an image by several numbers
    return np.array([data[index][1] for index in range(len(data))], dtype=np.int64)


def _find_files(data: Any) -> tuple[bytes, Any] | None:
    """Return the image files of a data set as bytes and offsets, see `name_at`; None if it reads them otherwise."""
    import numpy as np

    for name in ("_image_files", "_images", "_samples", "samples"):
        values = getattr(data, name, None)
        if isinstance(values, list) and values and len(values) == len(data):
            paths = [value[0] if isinstance(value, tuple) else value for value in values]
            if isinstance(paths[0], (str, Path)):
                names = [os.fsencode(path) for path in paths]
                return b"".join(names), np.cumsum([0, *map(len, names)])
    return None
