"""Packed data: what tools/pack_dataset.py wrote, read by memory map, with no file to open for an image."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset, class_count_mismatch

if TYPE_CHECKING:
    import numpy as np


@DATASETS.register("packed")
class Packed(ImageDataset):
    """The images of the pack root/split. All processes of a machine share its pages, those of the index too.

    Args:
        root: the folder that was named to tools/pack_dataset.py.
        split: its sub-folder with the index.
        classes: the class names to label by, when the pack has others or another order; None: its own.

    Raises:
        ConfigError: there is no such pack, it is not whole, or has a class that `classes` lacks.
    """

    def __init__(self, root: str | os.PathLike, split: str, classes: tuple[str, ...] | None = None):
        from distribuuuu.data.datasets.packed_format import INDEX, find_wrong_rows, read_index

        self._made_from = (root, split, classes)
        self.folder = Path(root) / split
        self.meta, self._columns = read_index(self.folder)
        if problem := find_wrong_rows(self.meta, self._columns):
            raise ConfigError(f"{self.folder / INDEX} is damaged: {problem}; pack the data again")
        own = tuple(self.meta["classes"])
        self.classes = classes or own
        if extra := sorted(set(own) - set(self.classes)):
            raise ConfigError(f"{self.folder} {_lacking(extra)}")
        self.mean, self.std, self.crop = tuple(self.meta["mean"]), tuple(self.meta["std"]), self.meta["crop"]
        number_of = {name: number for number, name in enumerate(self.classes)}
        self._label_of = [number_of[name] for name in own]
        self._is_raw = self.meta["options"]["format"] == "raw"
        self._shards: dict[int, memoryview | np.ndarray] = {}

    def __reduce__(self):
        # Maps cannot be pickled, and need not be.
        return type(self), self._made_from

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "Packed":
        """Return the set; evaluation labels by the training classes."""
        if train:
            return cls(cfg.TRAIN.DATASET, cfg.TRAIN.SPLIT)
        return cls(cfg.TEST.DATASET, cfg.TEST.SPLIT, _classes_of(Path(cfg.TRAIN.DATASET) / cfg.TRAIN.SPLIT) or None)

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for a pack that is missing or not whole, and a wrong number of classes."""
        section = "TRAIN" if train else "TEST"
        root, split = Path(cfg[section].DATASET), cfg[section].SPLIT
        found = list(_folder_problems(section, root, split))
        yield from found
        if found:
            return
        training = Path(cfg.TRAIN.DATASET) / cfg.TRAIN.SPLIT
        own, trained = _classes_of(root / split), _classes_of(training)
        if cfg.DATA.EXIF_ROTATE and _has_lost_exif(root / split):
            how = f"pack the data again with DATA.EXIF_ROTATE True, or set it to False for {root / split}"
            yield "DATA.EXIF_ROTATE", f"True, but the packed images are not rotated and their EXIF is gone; {how}"
        if trained and (extra := sorted(set(own) - set(trained))):
            yield f"{section}.SPLIT", f"{root / split} {_lacking(extra)}"
        elif len(trained or own) != cfg.MODEL.NUM_CLASSES:
            where = training if trained else root / split
            yield "MODEL.NUM_CLASSES", class_count_mismatch(cfg.MODEL.NUM_CLASSES, len(trained or own), str(where))

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return the number of classes of the training pack; without one, of the evaluation's."""
        folders = (Path(section.DATASET) / section.SPLIT for section in (cfg.TRAIN, cfg.TEST))
        return next((len(names) for names in map(_classes_of, folders) if names), 0)

    @classmethod
    def count_images(cls, cfg, most: int) -> int:
        """Return the number of training images; 0 when the pack cannot be read."""
        from distribuuuu.data.datasets.packed_format import read_index

        try:
            return len(read_index(Path(cfg.TRAIN.DATASET) / cfg.TRAIN.SPLIT)[1]["label"])
        except ConfigError:
            return 0

    def __len__(self) -> int:
        return len(self._columns["label"])

    def read(self, index: int) -> "memoryview | np.ndarray":
        """Return the file (format jpeg) or the pixels (raw) of image `index`, in the mapped memory: nothing is copied.

        Both can be written to, which tensors ask for; what is written stays in this process and is not in the file.
        """
        columns = self._columns
        number = int(columns["shard"][index])
        shard = self._shards.get(number)
        if shard is None:
            shard = self._shards[number] = self._map(number)
        start = int(columns["offset"][index])
        data = shard[start : start + int(columns["length"][index])]
        return data.reshape(columns["height"][index], columns["width"][index], 3) if self._is_raw else data

    def stamp(self, index: int) -> tuple[int, ...]:
        """Return the checksum of the stored bytes."""
        return (int(self._columns["crc32"][index]),)

    def label(self, index: int) -> int:
        """Return the class of image `index`, from 0."""
        return self._label_of[self._columns["label"][index]]

    def describe(self, index: int) -> str:
        """Return what image `index` was called before it was packed, and where it is now."""
        from distribuuuu.data.datasets.packed_format import image_name

        return f"{image_name(self._columns, index)} (image {index} of {self.folder})"

    def _map(self, number: int) -> "memoryview | np.ndarray":
        import numpy as np

        from distribuuuu.data.datasets.packed_format import FOREIGN_SHARD, HEADER_SIZE, shard_header

        path = self.folder / self.meta["shards"][number]["name"]
        with open(path, "rb") as file:
            if file.read(HEADER_SIZE) != shard_header(number, self.meta):
                raise ConfigError(f"{path} {FOREIGN_SHARD}")
            try:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError:  # a kernel that sets memory aside for all that could be written; readers will copy
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, np.uint8) if self._is_raw else memoryview(mapped)


def _classes_of(folder: Path) -> tuple[str, ...]:
    """Return the classes of a pack; empty when it cannot be read."""
    from distribuuuu.data.datasets.packed_format import read_index

    try:
        return tuple(read_index(folder)[0]["classes"])
    except ConfigError:
        return ()


def _has_lost_exif(folder: Path) -> bool:
    """Tell whether the images of a pack were encoded again without regard to their EXIF."""
    from distribuuuu.data.datasets.packed_format import read_index

    options = read_index(folder)[0]["options"]
    return (options["format"] == "raw" or options["quality"] is not None) and not options.get("exif_rotate")


def _folder_problems(section: str, root: Path, split: str) -> Iterator[tuple[str, str]]:
    from distribuuuu.data.datasets.packed_format import read_index

    if not root.is_dir():
        beside = _folders_in(root.parent)
        yield (
            f"{section}.DATASET",
            f"no such folder: {root}; it should hold {split}/index.bin{did_you_mean(root.name, beside)}",
        )
    elif not (root / split).is_dir():
        beside = _folders_in(root)
        has = f"it has {', '.join(beside[:5])}" if beside else f"it should hold {split}/index.bin"
        yield f"{section}.SPLIT", f"no folder {split!r} in {root}; {has}{did_you_mean(split, beside)}"
    else:
        try:
            read_index(root / split)
        except ConfigError as error:
            yield from ((f"{section}.SPLIT", str(problem)) for problem in error.problems)


def _folders_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()) if folder.is_dir() else []


def _lacking(extra: list[str]) -> str:
    return f"has classes that the training data lacks: {', '.join(extra[:5])}" + ", ..." * (len(extra) > 5)
