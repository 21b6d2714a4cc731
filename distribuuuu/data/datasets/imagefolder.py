"""Folders of images, one sub-folder per class: ROOT/SPLIT/CLASS/IMAGE, at any depth below CLASS."""

import functools
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np

from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset, class_count_mismatch, image_extensions
from distribuuuu.data.datasets.index import NOT_KNOWN, NUM_THREADS, Content, Index, open_index, pack_names, stamp_of
from distribuuuu.data.datasets.indexed import IndexedImages, unknown_names
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.image_files import (
    EXTENSIONS,
    JUNK_FILES,
    JUNK_FOLDERS,
    holds_images,
    is_class,
    is_folder,
    is_image,
    list_classes,
    walk_images,
)

_logger = logging.getLogger(__name__)


@DATASETS.register("imagefolder")
class ImageFolder(IndexedImages):
    """The images below root/split; labels follow the sorted class names.

    Args:
        root: the folder of the data.
        split: its sub-folder with the class folders.
        classes: the class names that define the labels, if the split may lack some of them; None: its own.
        cache_dir: DATA.CACHE_DIR.
        extensions: those of image files.
    """

    has_files = True

    def __init__(
        self,
        root: str | os.PathLike,
        split: str,
        classes: Sequence[str] | None = None,
        cache_dir: str = "",
        extensions: tuple[str, ...] = EXTENSIONS,
    ):
        self.folder = Path(root) / split
        self.use_index(open_folder(root, split, cache_folder(cache_dir), extensions), classes)

    def use_index(self, index: Index, classes: Sequence[str] | None = None) -> None:
        """Read the images of an index, in the order of the labels."""
        IndexedImages.__init__(self, index, classes)
        if len(self.labels) and (np.diff(self.labels) < 0).any():
            self._order = np.argsort(self.labels, kind="stable")
            self.labels = np.asarray(self.labels)[self._order]

    @classmethod
    def open_split(cls, cfg, name: str, trained: ImageDataset | None = None) -> ImageDataset:
        """Return the images of cfg.TRAIN or cfg.TEST; the training folder is not scanned to label the other."""
        section, labels = cfg[name], cfg.TEST.LABELS if name == "TEST" else ""
        if labels:
            from distribuuuu.data.datasets.imagenet_labels import open_preset

            return open_preset(cls, cfg)
        classes = (list_classes(cls.split_path(cfg.TRAIN)) or None) if name == "TEST" else None
        return cls(section.DATASET, section.SPLIT, classes, cfg.DATA.CACHE_DIR, image_extensions(cfg))

    @classmethod
    def open_training(cls, cfg) -> None:
        """Return None: see `open_split`."""
        return

    @classmethod
    def split_path(cls, section) -> Path:
        """Return the folder of the classes of cfg.TRAIN or cfg.TEST."""
        return Path(section.DATASET) / section.SPLIT

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for problems with the folders and the classes; no folder is read as a whole."""
        name, labels = "TRAIN" if train else "TEST", cfg.TEST.LABELS
        folder, extensions = cls.split_path(cfg[name]), image_extensions(cfg)
        classes, trained = list_classes(folder), list_classes(cls.split_path(cfg.TRAIN))
        if train and labels:
            yield "TEST.LABELS", f"got {labels} in training; fix: leave it empty, and set it for `distribuuuu test`"
        elif not classes or not all(holds_images(folder / each, extensions=extensions) for each in classes):
            from distribuuuu.hints.sources import explain_folder

            yield from explain_folder(name, Path(cfg[name].DATASET), cfg[name].SPLIT, extensions)
        elif labels:
            from distribuuuu.data.datasets.imagenet_labels import find_folder_problems

            yield from find_folder_problems(labels, folder, classes)
        elif trained and {*classes} - {*trained}:
            from distribuuuu.data.datasets.made_elsewhere import normal_form

            forms = {*map(normal_form, trained)}
            if unknown := [each for each in classes if normal_form(each) not in forms]:
                yield f"{name}.SPLIT", unknown_names(str(folder), "label", unknown, trained)
        elif len(trained or classes) != cfg.MODEL.NUM_CLASSES:
            source = str(cls.split_path(cfg.TRAIN) if trained else folder)
            found = len(trained or classes)
            yield "MODEL.NUM_CLASSES", class_count_mismatch(cfg.MODEL.NUM_CLASSES, found, source)

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return the number of training classes; without training data, of evaluation classes."""
        counts = (len(list_classes(cls.split_path(section))) for section in (cfg.TRAIN, cfg.TEST))
        return cls.num_classes or next(filter(None, counts), 0)

    @classmethod
    def count_images(cls, cfg, most: int) -> int:
        """Return the number of training images, counted up to `most`."""
        folder = cls.split_path(cfg.TRAIN)
        found = (walk_images(folder / name, extensions=image_extensions(cfg)) for name in list_classes(folder))
        return sum(1 for _ in islice(chain.from_iterable(found), most))


def open_folder(root: str | os.PathLike, split: str, cache: Path, extensions: tuple[str, ...] = EXTENSIONS) -> Index:
    """Return the index of ROOT/SPLIT; if the folder does not exist, it is empty. See `open_index`."""
    folder = str(Path(root) / split)
    scan = functools.partial(scan_folder, folder, extensions)
    if not os.path.isdir(folder):
        return Index(folder, folder, *scan())
    name = f"index-{quote(os.fsencode(split), safe='')}"
    return open_index(folder, root, name, cache, scan, extensions, below=split)


# ---------------------------------------------------------------------------------------- scanning


class _Listing(NamedTuple):
    """The contents of a folder; each image name ends with a NUL, so that a folder needs few objects."""

    stamp: tuple[int, int, int] = NOT_KNOWN
    names: bytes = b""
    folders: tuple["os.DirEntry[str]", ...] = ()
    identity: tuple[int, int] | None = None
    ignored: Counter[str] = Counter()


class _Folder(NamedTuple):
    """A relative path, and the identities of the folders above it."""

    path: str
    above: tuple[tuple[int, int] | None, ...] = ()
    is_link: bool = False


def scan_folder(folder: str, extensions: tuple[str, ...] = EXTENSIONS) -> Content:
    """Return the content of an index: images by class, then path of the folder, then name.

    Each folder is listed once, and no file is read. Links are followed, except to a folder above them. A folder that
    cannot be listed has no images.

    Args:
        folder: the folder of the classes; it need not exist.
        extensions: those of image files.
    """
    found: dict[str, _Listing] = {}
    waiting, list_folder = [_Folder("")], functools.partial(_list_folder, extensions=extensions)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        while waiting:
            paths = [os.path.join(folder, place.path) for place in waiting]
            deeper: list[_Folder] = []
            for place, listing in zip(waiting, pool.map(list_folder, paths), strict=True):
                if place.is_link and listing.identity in place.above:
                    continue
                found[place.path] = listing
                above = (*place.above, listing.identity)
                for entry in listing.folders:
                    if entry.name.lower() not in JUNK_FOLDERS if place.path else is_class(entry.name):
                        deeper.append(_Folder(os.path.join(place.path, entry.name), above, entry.is_symlink()))
            waiting = deeper
    num_beside = found[""].names.count(b"\0")  # images outside the class folders have no class
    ignored = sum((listing.ignored for path, listing in found.items() if path), Counter())
    paths = sorted(found, key=lambda path: (path.split(os.sep, 1)[0], path))
    listings = [found[path] if path else found[path]._replace(names=b"") for path in paths]
    classes = sorted(path for path in paths if path and os.sep not in path)
    numbers = {name: number for number, name in enumerate(classes)}
    text = np.frombuffer(b"".join([listing.names for listing in listings]), np.uint8)
    ends = np.flatnonzero(text == 0)
    file = np.repeat(np.arange(len(paths), dtype=np.int32), [listing.names.count(b"\0") for listing in listings])
    classes_of = np.array([numbers.get(path.split(os.sep, 1)[0], -1) for path in paths], np.int32)
    arrays = {
        "names_bytes": text[text != 0],
        "names_offsets": np.concatenate([[0], ends - np.arange(len(ends))]),
        **pack_names("files", [os.fsencode(path) for path in paths]),
        "stamps": np.array([listing.stamp for listing in listings], np.int64),
        "file": file,
        "label": classes_of[file],
    }
    meta = {"classes": classes, "notes": [], "ignored": dict(ignored), "num_beside": num_beside}
    return meta, arrays


def _list_folder(path: str, extensions: tuple[str, ...] = EXTENSIONS) -> _Listing:
    names: list[str] = []
    folders: list[os.DirEntry[str]] = []
    try:
        status = os.stat(path)  # before the listing: a later change gives another time
        with os.scandir(path) as entries:
            for entry in entries:
                if is_folder(entry):
                    folders.append(entry)
                else:
                    names.append(entry.name)
    except OSError as error:
        _logger.warning("%s is ignored: %s", path, error.strerror or error)
        return _Listing()
    images, ignored = _join_images(names, extensions)
    return _Listing(stamp_of(status), os.fsencode(images), tuple(folders), (status.st_dev, status.st_ino), ignored)


def _join_images(names: list[str], extensions: tuple[str, ...] = EXTENSIONS) -> tuple[str, Counter[str]]:
    """Return the sorted image names, each followed by a NUL, and the counts of the endings of the other files."""
    names.sort()
    text = "\0".join([*names, ""])
    # Usually all have one ending: counting it in the text is many times faster than testing each name.
    end = os.path.splitext(names[0])[1] if names else ""
    if end.lower() in extensions and text.count(f"{end}\0") == len(names) and "\0." not in text and text[0] != ".":
        return text, Counter()
    images = [name for name in names if is_image(name, extensions)]
    others = set(names).difference(images)
    ignored = [name for name in names if name in others and name[0] != "." and name.lower() not in JUNK_FILES]
    return "\0".join([*images, ""]), Counter(os.path.splitext(name)[1].lower() for name in ignored)
