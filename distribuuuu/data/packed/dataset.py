"""Packed data: the output of distribuuuu pack, memory-mapped, so that no file is opened per image."""

import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset, SplitDataset, packed_name
from distribuuuu.data.datasets.targets import unknown_names

if TYPE_CHECKING:
    import numpy as np


def is_url(root: str | os.PathLike) -> bool:
    """Tell whether TRAIN.DATASET is a URL rather than a folder."""
    return "://" in str(root)


@DATASETS.register("packed")
class Packed(SplitDataset):
    """The images of the pack root/split. All processes of a machine share its memory pages.

    Args:
        root: the output folder of distribuuuu pack, or its URL.
        split: its sub-folder with the index.
        classes: the class names that define the labels, if they differ from those of the pack; None: its own.
        copy: for a URL, the folder of `copy_pack`.
    """

    holds_files = True
    check_options = (True,)

    def __init__(
        self, root: str | os.PathLike, split: str, classes: tuple[str, ...] | None = None, copy: Path | None = None
    ):
        from distribuuuu.data.packed.format import read_index, read_index_file  # they import numpy

        self._init_args = (root, split, classes, copy)
        self.folder = _join(root, split)
        self._files = copy or Path(self.folder)
        self.meta, self.columns = read_index_file(copy) if copy else read_index(self._files)
        own = tuple(self.meta["classes"])
        self.classes = classes or own
        if extra := sorted(set(own) - set(self.classes)):
            raise ConfigError(unknown_names(str(self.folder), extra, self.classes))
        self.mean, self.std, self.crop = tuple(self.meta["mean"]), tuple(self.meta["std"]), self.meta["crop"]
        number_of = {name: number for number, name in enumerate(self.classes)}
        self._label_of = [number_of[name] for name in own]
        self._shards: dict[int, np.ndarray] = {}

    def __reduce__(self):
        # Maps cannot be pickled; a copy opens its own.
        return type(self), self._init_args

    @classmethod
    def open_split(cls, cfg, name: str, trained: ImageDataset | None = None, only_index: Any = False) -> "Packed":
        """Return the images of cfg.TRAIN or cfg.TEST; for `only_index`, of a pack at a URL, see `copy_pack`."""
        dataset, split = cfg[name].DATASET, cfg[name].SPLIT
        if not is_url(dataset) and not (Path(dataset) / split).is_dir():
            from distribuuuu.hints.sources import missing_split

            raise ConfigError(Problem(*missing_split(name, Path(dataset), split, f"{split}/index.bin")))
        copy = None
        if is_url(dataset):
            from distribuuuu.data.packed.remote import copy_pack

            try:
                copy = copy_pack(str(_join(dataset, split)), cfg.DATA.CACHE_DIR, cfg.DATA.TIMEOUT_S, only_index)
            except ConfigError as error:
                problems = [Problem(one.key or f"{name}.DATASET", one.message) for one in error.problems]
                raise ConfigError(problems) from error
        return cls(dataset, split, tuple(trained.classes) if trained else None, copy)

    @classmethod
    def open_training(cls, cfg) -> ImageDataset | None:
        """Return the training images to label an evaluation set with; a network failure must not change the labels."""
        return cls.open_split(cfg, "TRAIN", None, "labels") if is_url(cfg.TRAIN.DATASET) else super().open_training(cfg)

    def find_own_problems(self, cfg) -> Iterator[tuple[str, str]]:
        """Yield a problem if the EXIF orientation of the images is lost."""
        options = self.meta["options"]
        is_encoded = options["format"] == "raw" or options.get("quality") is not None
        if cfg.DATA.EXIF_ROTATE and is_encoded and not options.get("exif_rotate"):
            fix = f"pack the data again with DATA.EXIF_ROTATE True, or set it to False for {self.folder}"
            yield "DATA.EXIF_ROTATE", f"True, but the packed images were encoded without their EXIF; {fix}"

    def __len__(self) -> int:
        return len(self.columns["label"])

    def read(self, index: int) -> "memoryview | np.ndarray":
        """Return the file (format jpeg) or the pixels (raw) of image `index` as a view of the mapped memory.

        Tensors need writable memory, which this is; a write stays in this process and does not reach the file.
        """
        columns = self.columns
        number, start = int(columns["shard"][index]), int(columns["offset"][index])
        if number not in self._shards:
            self._shards[number] = self._map(number)
        data = self._shards[number][start : start + int(columns["length"][index])]
        if self.meta["options"]["format"] == "raw":
            return data.reshape(columns["height"][index], columns["width"][index], 3)
        return data.data

    @property
    def digest(self) -> str:
        """The digest of the classes, and of the checksum of the index; see `ImageDataset.digest`."""
        own = f"{self.meta['crc32']} {self.meta['classes']} {self.classes}"
        return hashlib.sha256(own.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def label(self, index: int) -> int:
        """Return the class index of image `index`."""
        return self._label_of[self.columns["label"][index]]

    def describe(self, index: int) -> str:
        """Return the original name of image `index` and its place in the pack."""
        return f"{packed_name(self.columns, 'name', index)} (image {index} of {self.folder})"

    def _map(self, number: int) -> "np.ndarray":
        import numpy as np

        from distribuuuu.data.packed.format import FOREIGN_SHARD, HEADER_SIZE, shard_header

        path = self._files / self.meta["shards"][number]["name"]
        with open(path, "rb") as file:
            if file.read(HEADER_SIZE) != shard_header(number, self.meta):
                raise ConfigError(f"{path} {FOREIGN_SHARD}")
            try:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError:  # a kernel that reserves memory for all that could be written; readers will copy
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, np.uint8)


def _join(root: str | os.PathLike, split: str) -> Path | str:
    return f"{str(root).rstrip('/')}/{split}" if is_url(root) else Path(root) / split
