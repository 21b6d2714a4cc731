"""Packed data: the output of distribuuuu pack, memory-mapped, so that no file is opened per image."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from distribuuuu.config import ConfigError
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import SplitDataset, missing_root, missing_split, unknown_classes

if TYPE_CHECKING:
    import numpy as np


@DATASETS.register("packed")
class Packed(SplitDataset):
    """The images of the pack root/split. All processes of a machine share its memory pages.

    Args:
        root: the output folder of distribuuuu pack.
        split: its sub-folder with the index.
        classes: the class names that define the labels, if they differ from those of the pack; None: its own.

    Raises:
        ConfigError: the pack is missing or incomplete, or has a class that is not in `classes`.
    """

    def __init__(self, root: str | os.PathLike, split: str, classes: tuple[str, ...] | None = None):
        self._init_args = (root, split, classes)
        self.folder = Path(root) / split
        self.meta, self._columns = _read_index(self.folder, check_rows=True)
        own = tuple(self.meta["classes"])
        self.classes = classes or own
        if extra := sorted(set(own) - set(self.classes)):
            raise ConfigError(unknown_classes(self.folder, extra))
        self.mean, self.std, self.crop = tuple(self.meta["mean"]), tuple(self.meta["std"]), self.meta["crop"]
        number_of = {name: number for number, name in enumerate(self.classes)}
        self._label_of = [number_of[name] for name in own]
        self._shards: dict[int, np.ndarray] = {}

    def __reduce__(self):
        # Maps cannot be pickled; a copy opens its own.
        return type(self), self._init_args

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "Packed":
        """Return the training or the evaluation set."""
        if train:
            return cls(cfg.TRAIN.DATASET, cfg.TRAIN.SPLIT)
        return cls(cfg.TEST.DATASET, cfg.TEST.SPLIT, cls.training_classes(cfg))

    @classmethod
    def read_classes(cls, path: Path) -> tuple[str, ...]:
        """Return the classes of a pack; empty if it cannot be read."""
        try:
            return tuple(_read_index(path)[0]["classes"])
        except ConfigError:
            return ()

    @classmethod
    def find_split_problems(cls, name: str, section, trained: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for a pack that is missing or incomplete."""
        root, split = Path(section.DATASET), section.SPLIT
        layout = f"{split}/index.bin"
        if not root.is_dir():
            yield missing_root(name, root, layout)
        elif not (root / split).is_dir():
            yield missing_split(name, root, split, layout)
        else:
            try:
                _read_index(root / split)
            except ConfigError as error:
                yield from ((f"{name}.SPLIT", str(problem)) for problem in error.problems)

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for problems with the pack, its classes, and images whose EXIF orientation is lost."""
        yield from super().find_problems(cfg, train)
        folder = cls.split_path(cfg.TRAIN if train else cfg.TEST)
        if cfg.DATA.EXIF_ROTATE and cls.read_classes(folder):
            options = _read_index(folder)[0]["options"]
            is_encoded = options["format"] == "raw" or options["quality"] is not None
            if is_encoded and not options.get("exif_rotate"):
                fix = f"pack the data again with DATA.EXIF_ROTATE True, or set it to False for {folder}"
                yield "DATA.EXIF_ROTATE", f"True, but the packed images were encoded without their EXIF; {fix}"

    @classmethod
    def count_images(cls, cfg, most: int) -> int:
        """Return the number of training images; 0 if the pack cannot be read."""
        try:
            return len(_read_index(cls.split_path(cfg.TRAIN))[1]["label"])
        except ConfigError:
            return 0

    def __len__(self) -> int:
        return len(self._columns["label"])

    def read(self, index: int) -> "memoryview | np.ndarray":
        """Return the file (format jpeg) or the pixels (raw) of image `index` as a view of the mapped memory.

        Tensors need writable memory, which this is; a write stays in this process and does not reach the file.
        """
        columns = self._columns
        number, start = int(columns["shard"][index]), int(columns["offset"][index])
        if number not in self._shards:
            self._shards[number] = self._map(number)
        data = self._shards[number][start : start + int(columns["length"][index])]
        if self.meta["options"]["format"] == "raw":
            return data.reshape(columns["height"][index], columns["width"][index], 3)
        return data.data

    def stamp(self, index: int) -> tuple[int, ...]:
        """Return the checksum of the stored bytes."""
        return (int(self._columns["crc32"][index]),)

    def label(self, index: int) -> int:
        """Return the class index of image `index`."""
        return self._label_of[self._columns["label"][index]]

    def describe(self, index: int) -> str:
        """Return the original name of image `index` and its place in the pack."""
        from distribuuuu.data.datasets.packed_format import describe_image

        return describe_image(self.folder, self._columns, index)

    def _map(self, number: int) -> "np.ndarray":
        import numpy as np

        from distribuuuu.data.datasets.packed_format import FOREIGN_SHARD, HEADER_SIZE, shard_header

        path = self.folder / self.meta["shards"][number]["name"]
        with open(path, "rb") as file:
            if file.read(HEADER_SIZE) != shard_header(number, self.meta):
                raise ConfigError(f"{path} {FOREIGN_SHARD}")
            try:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError:  # a kernel that reserves memory for all that could be written; readers will copy
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, np.uint8)


def _read_index(folder: Path, check_rows: bool = False) -> tuple[dict, dict[str, "np.ndarray"]]:
    from distribuuuu.data.datasets.packed_format import read_index  # it imports numpy

    return read_index(folder, check_rows)
