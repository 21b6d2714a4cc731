"""Images in tar and ZIP archives and in webdataset shards, read without unpacking."""

import glob
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import first_few
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset, class_count_mismatch, image_extensions, unknown_classes
from distribuuuu.data.datasets.imagefolder import notes_on
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.image_files import sort_splits
from distribuuuu.hints.sources import describe_file, list_archives, missing_root, split_of_archive

if TYPE_CHECKING:
    import numpy as np

    from distribuuuu.data.datasets.archive_index import ArchiveIndex, ArchiveSource

# Archives of a brace pattern.
_MOST = 100_000


@DATASETS.register("archive")
class Archive(ImageDataset):
    """The images of archives, in the order of a folder with the same files.

    Args:
        index: the images.
        classes: the class names that define the labels, if they differ from those of the index; None: its own.
        order: the images of the index that the set has, int (N,); None: all.
        labels: the class of each of them, int (N,); None: those of the index.

    Raises:
        ConfigError: the index has a class that is not in `classes`.
    """

    # Whether the index may be stored beside the archives; otherwise it is stored in the cache folder.
    index_in_root = True
    holds_files = True

    def __init__(
        self,
        index: "ArchiveIndex",
        classes: tuple[str, ...] | None = None,
        order: "np.ndarray | None" = None,
        labels: "np.ndarray | None" = None,
    ):
        import numpy as np

        self.index, self.classes, self._order = index, classes or index.classes, order
        if labels is None:
            labels = index.arrays["label"]
            if self.classes != index.classes:
                if extra := sorted(set(index.classes) - set(self.classes)):
                    raise ConfigError(unknown_classes(str(index.source), extra))
                numbers = {name: number for number, name in enumerate(self.classes)}
                labels = np.array([numbers[name] for name in index.classes], np.int32)[labels]
        self.labels = labels

    @classmethod
    def open_index(cls, cfg, name: str) -> "ArchiveIndex":
        """Return the index of cfg.TRAIN or cfg.TEST; raise ConfigError if there is no archive, or one is unusable."""
        from distribuuuu.data.datasets.archive_index import open_archives

        if name == "TEST" and "{" in (dataset := cfg.TEST.DATASET) and dataset == cfg.TRAIN.DATASET:
            message = f"got {dataset}, the archives of the training images; fix: set it to those of the evaluation"
            raise ConfigError(Problem("TEST.DATASET", message))
        source = find_archives(name, cfg[name].DATASET, cfg[name].SPLIT)
        try:
            source = source._replace(extensions=image_extensions(cfg))
            return open_archives(source, cache_folder(cfg.DATA.CACHE_DIR), cls.index_in_root)
        except ConfigError as error:
            raise ConfigError([Problem(f"{name}.SPLIT", problem.message) for problem in error.problems]) from error

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "ImageDataset":
        """Return the set; classes without evaluation images are allowed."""
        return cls(cls.open_index(cfg, "TRAIN")) if train else cls(cls.open_index(cfg, "TEST"), cls.read_classes(cfg))

    @classmethod
    def read_classes(cls, cfg, name: str = "TRAIN") -> tuple[str, ...]:
        """Return the classes of cfg.TRAIN or cfg.TEST; empty if it cannot be read."""
        try:
            return cls.open_index(cfg, name).classes
        except ConfigError:
            return ()

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for problems with the archives, unknown classes and a wrong number of classes.

        Archives without an index are scanned.
        """
        try:
            found = len(cls.from_cfg(cfg, train).classes)
        except ConfigError as error:
            key = "TRAIN.SPLIT" if train else "TEST.SPLIT"
            yield from ((str(problem.key or key), problem.message) for problem in error.problems)
            return
        if found != cfg.MODEL.NUM_CLASSES:
            yield "MODEL.NUM_CLASSES", class_count_mismatch(cfg.MODEL.NUM_CLASSES, found, f"DATA.NAME {cfg.DATA.NAME}")

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return the number of training classes; without training data, of evaluation classes."""
        return len(cls.read_classes(cfg)) or len(cls.read_classes(cfg, "TEST"))

    @classmethod
    def count_images(cls, cfg, most: int) -> int:
        """Return the number of training images; 0 if the archives cannot be read."""
        try:
            return len(cls.from_cfg(cfg, train=True))
        except ConfigError:
            return 0

    def read(self, index: int) -> bytearray:
        """Return the file of image `index`."""
        return self.index.read(self._place(index))

    def stamp(self, index: int) -> tuple[int, ...]:
        """Return the size and the modification time of the archive, and the place of the image in it."""
        place = self._place(index)
        number, offset = (int(self.index.arrays[name][place]) for name in ("archive", "offset"))
        return (*self.index.meta["archives"][number], offset)

    def notes(self) -> list[str]:
        """Return warnings about ignored files, and about class names that differ only by case."""
        return list(notes_on(str(self.index.source), self.index.meta, self.index.classes))

    def describe(self, index: int) -> str:
        """Return the archive and the name of image `index` in it, e.g. 'train.tar:cat/1.jpg'."""
        place = self._place(index)
        return f"{os.path.basename(self.index.path(place))}:{self.index.name(place)}"

    def _place(self, index: int) -> int:
        """Return the number of image `index` in the index."""
        if not 0 <= index < len(self.labels):
            raise IndexError(f"no image {index} among {len(self.labels)}")
        return index if self._order is None else int(self._order[index])


def find_archives(name: str, dataset: str, split: str) -> "ArchiveSource":
    """Return the archives of a DATASET and a SPLIT.

    These are a brace pattern; or an archive with a folder for each split; or, in a folder, the file SPLIT, SPLIT.tar,
    SPLIT.zip or SPLIT-*.tar.

    Args:
        name: TRAIN or TEST.
        dataset, split: of the section.

    Raises:
        ConfigError: there is none, or there are several.
    """
    from distribuuuu.data.datasets.archive_index import ArchiveSource

    root, folder = Path(dataset), re.split(r"[-_.{]", os.path.basename(split))[0]
    if "{" in dataset and not root.exists():
        return ArchiveSource(_expand(f"{name}.DATASET", dataset), folder)
    if root.is_file():
        if not list_archives([root.name]):
            raise ConfigError(Problem(f"{name}.DATASET", f"{root} is {describe_file(root)}"))
        return ArchiveSource((dataset,), split, is_inside=True)
    if not root.is_dir():
        raise ConfigError(Problem(*missing_root(name, root, f"{split}.tar, {split}.zip or {split}-*.tar")))
    if "{" in split or (root / split).is_file():
        return ArchiveSource(_expand(f"{name}.SPLIT", str(root / split)), folder)
    shards = sorted(glob.glob(f"{glob.escape(str(root / split))}-*.tar"))
    found = [[path] for ending in (".tar", ".zip") if os.path.isfile(path := str(root / f"{split}{ending}"))]
    found += [shards] if shards else []
    if len(found) == 1:
        return ArchiveSource(tuple(found[0]), folder)
    if found:
        named = first_few([os.path.basename(paths[0]) for paths in found])
        raise ConfigError(Problem(f"{name}.SPLIT", f"{root} has {named} for {split}; fix: set {name}.SPLIT to one"))
    raise ConfigError(Problem(*_no_archive(name, root, split)))


def _no_archive(name: str, root: Path, split: str) -> tuple[str, str]:
    """Return (key, message) for a folder without the archive of a split."""
    expected = f"no {split}.tar, {split}.zip or {split}-*.tar in {root}"
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_file())
    if packed := [entry for entry in names if re.fullmatch(rf"{re.escape(split)}\.t.*", entry)]:
        return f"{name}.SPLIT", f"{expected}; {root / packed[0]} is {describe_file(root / packed[0])}"
    if archives := list_archives(names):
        fix = f"fix: set {name}.SPLIT {split_of_archive(archives[0])}"
        if len(archives) == 1 and not sort_splits([split_of_archive(archives[0])]):  # it may hold all splits
            fix = f"fix: set {name}.DATASET {root / archives[0]}, which reads its folder {split}/"
        return f"{name}.SPLIT", f"{expected}; it has {first_few(archives)}; {fix}"
    if (root / split).is_dir():
        expected += f"; fix: {root / split} is a folder: set DATA.NAME imagefolder"
    return f"{name}.SPLIT", expected


def _expand(key: str, pattern: str) -> tuple[str, ...]:
    """Return the paths of a brace pattern, 'train-{000..009}.tar' or '{a,b}.tar'; raise ConfigError if it is none."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices: list[list[str]] = []
    for number, part in enumerate(parts):
        if ends := re.fullmatch(r"(\d{1,12})\.\.(\d{1,12})", part) if number % 2 else None:
            first, last = int(ends[1]), int(ends[2])
            if not first <= last < first + _MOST:
                raise ConfigError(Problem(key, f"got {{{part}}}; expected first..last, at most {_MOST:,} archives"))
            choices.append([f"{value:0{len(ends[1])}}" for value in range(first, last + 1)])
        else:
            choices.append(part.split(",") if number % 2 else [part])
    paths = tuple("".join(words) for words in itertools.islice(itertools.product(*choices), _MOST + 1))
    if len(paths) > _MOST or any("{" in part or "}" in part for part in parts[::2]):
        expected = f"expected at most {_MOST:,} archives, e.g. train-{{000..009}}.tar"
        raise ConfigError(Problem(key, f"got {pattern}; {expected}"))
    if missing := [path for path in paths if not os.path.isfile(path)]:
        named = first_few([os.path.basename(path) for path in missing])
        raise ConfigError(Problem(key, f"{pattern}: no such files: {named}; fix: check the first and the last number"))
    return paths
