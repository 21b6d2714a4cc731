"""Folders of images, one sub-folder a class: ROOT/SPLIT/CLASS/IMAGE, at any depth below CLASS."""

import contextlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate, islice
from pathlib import Path

from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.model_names import cache_folder
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import (
    JUNK_FOLDERS,
    ImageDataset,
    class_count_mismatch,
    is_class,
    is_image,
    read_file,
)


@DATASETS.register("imagefolder")
class ImageFolder(ImageDataset):
    """The images below root/split; labels follow the sorted class names.

    Args:
        root: the folder of the data.
        split: its sub-folder with the classes.
        classes: the class names to label by, when the split may hold only some of them; None: its own.
        cache_dir: what DATA.CACHE_DIR says.
    """

    has_files = True
    # Whether the index of the images may be kept in root; else it is in the cache folder.
    index_in_root = True

    def __init__(
        self, root: str | os.PathLike, split: str, classes: tuple[str, ...] | None = None, cache_dir: str = ""
    ):
        from distribuuuu.data.datasets.folder_index import open_index

        self.folder = Path(root) / split
        self._index = open_index(root, split, cache_folder(cache_dir), self.index_in_root)
        self.classes = classes or self._index.classes
        numbers = {name: number for number, name in enumerate(self._index.classes)}
        # Without images for the names that the split does not have.
        bounds = [self._index.class_bounds(numbers[name]) if name in numbers else (0, 0) for name in self.classes]
        # By label: the number of its first image in the index, and how many images it and those before it have.
        self._firsts = [first for first, _ in bounds]
        self._ends = list(accumulate(end - first for first, end in bounds))

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "ImageFolder":
        """Return the set; evaluation labels by the training classes, so a class without evaluation images is right."""
        if train:
            return cls(cfg.TRAIN.DATASET, cfg.TRAIN.SPLIT, cache_dir=cfg.DATA.CACHE_DIR)
        classes = list_classes(Path(cfg.TRAIN.DATASET) / cfg.TRAIN.SPLIT) or None
        return cls(cfg.TEST.DATASET, cfg.TEST.SPLIT, classes, cfg.DATA.CACHE_DIR)

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for missing folders, empty classes and wrong numbers of classes."""
        section = "TRAIN" if train else "TEST"
        root, split = cfg[section].DATASET, cfg[section].SPLIT
        found = list(_folder_problems(section, Path(root), split))
        yield from found
        classes = list_classes(Path(root) / split)
        if found or not classes:
            return
        trained = () if train else list_classes(Path(cfg.TRAIN.DATASET) / cfg.TRAIN.SPLIT)
        extra = sorted(set(classes) - set(trained))
        if trained and extra:
            yield f"{section}.SPLIT", f"{Path(root) / split} has classes that the training data lacks: {_some(extra)}"
        elif not trained and len(classes) != cfg.MODEL.NUM_CLASSES:
            yield (
                "MODEL.NUM_CLASSES",
                class_count_mismatch(cfg.MODEL.NUM_CLASSES, len(classes), str(Path(root) / split)),
            )

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return the number of class folders; without training data, of the evaluation's."""
        folders = (Path(section.DATASET) / section.SPLIT for section in (cfg.TRAIN, cfg.TEST))
        return cls.num_classes or next((len(names) for names in map(list_classes, folders) if names), 0)

    @classmethod
    def count_images(cls, cfg, most: int) -> int:
        """Return the number of training images, counted up to `most`."""
        folder, count = Path(cfg.TRAIN.DATASET) / cfg.TRAIN.SPLIT, 0
        for name in list_classes(folder):
            count += _count_images(folder / name, most - count)
            if count >= most:
                break
        return count

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def check_place(self) -> tuple[Path | None, str]:
        """Return the file of the index, and the scan that made it."""
        return self._index.file, self._index.meta.get("scan", "")

    def notes(self) -> list[str]:
        """Return what was ignored below the folder, and names of classes that are easily mixed up."""
        return list(_notes_on(self.folder, self._index.meta, self._index.classes))

    def read(self, index: int) -> bytearray:
        """Return the bytes of image `index`, in memory of their own that may be written to."""
        return read_file(self.describe(index))

    def label(self, index: int) -> int:
        """Return the class of image `index`, from 0."""
        if not 0 <= index < len(self):
            raise IndexError(f"no image {index} among {len(self)}")
        return bisect_right(self._ends, index)

    def describe(self, index: int) -> str:
        """Return the file of image `index`."""
        label = self.label(index)
        before = self._ends[label - 1] if label else 0
        return self._index.path(self._firsts[label] + index - before)


def list_classes(folder: str | os.PathLike) -> tuple[str, ...]:
    """Return the sorted names of the class folders in a folder; empty when it cannot be listed."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return tuple(sorted(entry.name for entry in entries if _is_folder(entry) and is_class(entry.name)))
    return ()


def _count_images(folder: Path, most: int) -> int:
    """Return the number of images in a folder at any depth; stops at `most`, so a large folder costs little."""
    waiting, seen, count = [os.fspath(folder)], set(), 0
    while waiting:
        parent = waiting.pop()
        if os.path.realpath(parent) in seen:  # a link may lead back
            continue
        seen.add(os.path.realpath(parent))
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                if _is_folder(entry):
                    waiting += [entry.path] * (entry.name.lower() not in JUNK_FOLDERS)
                elif is_image(entry.name):
                    count += 1
                    if count >= most:
                        return count
    return count


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle
        return False


def _folder_problems(section: str, root: Path, split: str) -> Iterator[tuple[str, str]]:
    folder = root / split
    layout = f"{split}/CLASS/IMAGE"
    if reason := _access_problem(root):
        yield f"{section}.DATASET", f"{root} cannot be listed: {reason}"
    elif not root.is_dir():
        beside = list_classes(root.parent)
        yield f"{section}.DATASET", f"no such folder: {root}; it should hold {layout}{did_you_mean(root.name, beside)}"
    elif reason := _access_problem(folder):
        yield f"{section}.SPLIT", f"{folder} cannot be listed: {reason}"
    elif not folder.is_dir():
        beside = list_classes(root)
        classes = [name for name in beside if _holds_images(root / name)]
        has = f"it has {_some(beside)}" if beside else f"it should hold {layout}"
        if classes and root.name == split:
            has = f"{root} has class folders itself; set {section}.DATASET {root.parent}"
        elif classes:
            has = f"these look like class folders: {_some(classes)}; split them into train/ and val/: {layout}"
        yield f"{section}.SPLIT", f"no folder {split!r} in {root}; {has}{did_you_mean(split, beside)}"
    elif not list_classes(folder):
        yield f"{section}.SPLIT", f"{folder} has no class folders; it should hold CLASS/IMAGE"
    else:
        empty = [name for name in list_classes(folder) if not _count_images(folder / name, most=1)]
        closed = {name: reason for name in empty if (reason := _access_problem(folder / name))}
        if closed:
            named = _some([f"{name} ({reason})" for name, reason in closed.items()])
            yield f"{section}.SPLIT", f"{folder} has class folders that cannot be listed: {named}"
        if empty := [name for name in empty if name not in closed]:
            yield f"{section}.SPLIT", f"{folder} has class folders without an image: {_some(empty)}; remove them"


def _access_problem(folder: str | os.PathLike) -> str:
    """Return why a folder that is there cannot be listed; empty if it can, or is not there."""
    try:
        os.scandir(folder).close()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _holds_images(folder: Path) -> bool:
    """Tell whether there is an image among the first files of a folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return any(is_image(entry.name) for entry in islice(entries, 1000))
    return False


def _notes_on(folder: Path, meta: Mapping, classes: tuple[str, ...]) -> Iterator[str]:
    ignored = sorted(meta.get("ignored", {}).items(), key=lambda item: (-item[1], item[0]))
    if ignored:
        counts = _some([f"{suffix or 'no suffix'} ({count})" for suffix, count in ignored])
        what = "is not an image of a known type and is" if (num := sum(dict(ignored).values())) == 1 else None
        files = f"1 file {what}" if what else f"{num} files are not images of a known type and are"
        yield f"{folder}: {files} ignored: {counts}"
    if beside := meta.get("num_beside"):
        yield f"{folder}: {beside} images lie beside the class folders and are ignored: move them into one"
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault(name.casefold(), []).append(name)
    if groups := [" and ".join(names) for names in alike.values() if len(names) > 1]:
        yield f"{folder}: class folders differ only by case: {_some(groups)}; each counts as a class of its own"


def _some(names: list[str] | tuple[str, ...], num: int = 5) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - num} more" if len(names) > num else ""
    return ", ".join(names[:num]) + more
