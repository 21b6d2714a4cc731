"""Folders of images, one sub-folder per class: ROOT/SPLIT/CLASS/IMAGE, at any depth below CLASS."""

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from distribuuuu.config.errors import first_few
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset, SplitDataset, image_extensions
from distribuuuu.data.datasets.imagenet_labels import RealLabels, find_folder_problems, folder_names, read_classes
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.image_files import ALL_EXTENSIONS, EXTENSIONS, list_classes, walk_images
from distribuuuu.hints.sources import (
    describe_archives,
    describe_arrays,
    describe_imagenet,
    describe_table,
    holds_images,
    missing_root,
    missing_split,
)

if TYPE_CHECKING:
    from distribuuuu.data.datasets.folder_index import FolderIndex


@DATASETS.register("imagefolder")
class ImageFolder(SplitDataset):
    """The images below root/split; labels follow the sorted class names.

    Args:
        root: the folder of the data.
        split: its sub-folder with the class folders.
        classes: the class names that define the labels, if the split may lack some of them; None: its own.
        cache_dir: DATA.CACHE_DIR.
        extensions: those of image files.
    """

    has_files = True
    # Whether the index of the images may be stored in root; otherwise it is stored in the cache folder.
    index_in_root = True

    def __init__(
        self,
        root: str | os.PathLike,
        split: str,
        classes: tuple[str, ...] | None = None,
        cache_dir: str = "",
        extensions: tuple[str, ...] = EXTENSIONS,
    ):
        from distribuuuu.data.datasets.folder_index import open_index

        self.folder = Path(root) / split
        self.use_index(open_index(root, split, cache_folder(cache_dir), self.index_in_root, extensions), classes)

    def use_index(self, index: "FolderIndex", classes: tuple[str, ...] | None) -> None:
        """Read the images of an index; `classes` define the labels, None: its own."""
        self._index = index
        self.classes = classes or self._index.classes
        numbers = {name: number for number, name in enumerate(self._index.classes)}
        # Empty for classes that the split lacks.
        bounds = [self._index.class_bounds(numbers[name]) if name in numbers else (0, 0) for name in self.classes]
        # By label: the index of its first image, and the number of images up to and including this label.
        self._firsts = [first for first, _ in bounds]
        self._ends = list(accumulate(end - first for first, end in bounds))

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> ImageDataset:
        """Return the set; classes without evaluation images are allowed."""
        if train:
            return cls(cfg.TRAIN.DATASET, cfg.TRAIN.SPLIT, None, cfg.DATA.CACHE_DIR, image_extensions(cfg))
        root, split, labels = cfg.TEST.DATASET, cfg.TEST.SPLIT, cfg.TEST.LABELS
        if not labels:
            return cls(root, split, cls.training_classes(cfg), cfg.DATA.CACHE_DIR, image_extensions(cfg))
        if labels == "imagenet_real":
            return RealLabels(cls(root, split, cache_dir=cfg.DATA.CACHE_DIR))
        found = cls.read_classes(cls.split_path(cfg.TEST))
        images = cls(root, split, folder_names(labels, found), cfg.DATA.CACHE_DIR)
        images.classes = tuple(read_classes(labels))
        return images

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for problems with the files and the classes; with TEST.LABELS, those of the preset."""
        labels, folder = cfg.TEST.LABELS, cls.split_path(cfg.TEST)
        if train and labels:
            yield "TEST.LABELS", f"got {labels} in training; fix: leave it empty, and set it for `distribuuuu test`"
        elif labels:
            problems = list(cls.find_split_problems("TEST", cfg.TEST))
            yield from problems or find_folder_problems(labels, folder, cls.read_classes(folder))
        else:
            problems = list(super().find_problems(cfg, train))
            yield from problems
            folder = cls.split_path(cfg.TRAIN if train else cfg.TEST)
            if not problems and ".npy" not in image_extensions(cfg) and (hint := describe_arrays(folder)):
                yield "DATA.CHANNELS", f"got {cfg.DATA.CHANNELS}, but {folder} has no image files{hint}"

    @classmethod
    def read_classes(cls, path: Path) -> tuple[str, ...]:
        """Return the sorted names of the class folders; empty if the folder cannot be listed."""
        return list_classes(path)

    @classmethod
    def find_split_problems(cls, name: str, section) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for missing folders, folders that cannot be listed and empty classes."""
        root, split = Path(section.DATASET), section.SPLIT
        folder, layout = root / split, f"{split}/CLASS/IMAGE"
        if reason := access_problem(root):
            yield f"{name}.DATASET", f"{root} cannot be listed: {reason}"
        elif not root.is_dir():
            yield missing_root(name, root, layout)
        elif reason := access_problem(folder):
            yield f"{name}.SPLIT", f"{folder} cannot be listed: {reason}"
        elif not folder.is_dir():
            yield missing_split(name, root, split, layout)
        elif not list_classes(folder):
            hint = describe_imagenet(root) or describe_archives(folder) or describe_table(root)
            yield f"{name}.SPLIT", f"{folder} has no class folders; it should hold CLASS/IMAGE{hint}"
        else:
            yield from ((f"{name}.SPLIT", problem) for problem in _empty_classes(folder))

    @classmethod
    def count_images(cls, cfg, most: int) -> int:
        """Return the number of training images, counted up to `most`."""
        folder = cls.split_path(cfg.TRAIN)
        found = (walk_images(folder / name, extensions=image_extensions(cfg)) for name in list_classes(folder))
        return sum(1 for _ in islice(chain.from_iterable(found), most))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def check_record(self) -> tuple[Path | None, str]:
        """Return the file of the index, and the ID of the scan that made it."""
        return self._index.file, self._index.meta.get("scan", "")

    def notes(self) -> list[str]:
        """Return warnings about ignored files, and about class names that differ only by case."""
        return list(notes_on(self.folder, self._index.meta, self._index.classes))

    def label(self, index: int) -> int:
        """Return the class index of image `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"no image {index} among {len(self)}")
        return bisect_right(self._ends, index)

    def describe(self, index: int) -> str:
        """Return the file of image `index`."""
        label = self.label(index)
        before = self._ends[label - 1] if label else 0
        return self._index.path(self._firsts[label] + index - before)


def _empty_classes(folder: Path) -> Iterator[str]:
    """Yield a message for class folders that cannot be listed, and one for those without an image."""
    empty = [name for name in list_classes(folder) if not holds_images(folder / name, extensions=ALL_EXTENSIONS)]
    closed = {name: reason for name in empty if (reason := access_problem(folder / name))}
    if closed:
        named = first_few([f"{name} ({reason})" for name, reason in closed.items()])
        yield f"{folder} has class folders that cannot be listed: {named}"
    if empty := [name for name in empty if name not in closed]:
        yield f"{folder} has class folders without an image: {first_few(empty)}; remove them"


def access_problem(folder: Path) -> str:
    """Return why an existing folder cannot be listed; empty if it can or does not exist."""
    try:
        os.scandir(folder).close()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def notes_on(folder: str | os.PathLike, meta: Mapping, classes: tuple[str, ...]) -> Iterator[str]:
    """Yield warnings about ignored files, and about class names that differ only by case."""
    ignored = sorted(meta.get("ignored", {}).items(), key=lambda item: (-item[1], item[0]))
    if ignored:
        counts = first_few([f"{suffix or 'no suffix'} ({count})" for suffix, count in ignored])
        num = sum(count for _, count in ignored)
        files = "1 file is not an image" if num == 1 else f"{num} files are not images"
        yield f"{folder}: {files} of a known type and {'is' if num == 1 else 'are'} ignored: {counts}"
    if num_outside := meta.get("num_beside"):
        yield f"{folder}: {num_outside} images are outside the class folders and are ignored: move them into one"
    by_case: dict[str, list[str]] = {}
    for name in classes:
        by_case.setdefault(name.casefold(), []).append(name)
    if groups := [" and ".join(names) for names in by_case.values() if len(names) > 1]:
        yield f"{folder}: class folders differ only by case: {first_few(groups)}; each counts as a separate class"
