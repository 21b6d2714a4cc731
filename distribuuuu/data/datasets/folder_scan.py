"""The scan of class folders: CLASS/IMAGE, at any depth below CLASS, into the content of an index."""

import functools
import logging
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from distribuuuu.data.datasets.array_file import NOT_KNOWN, NUM_THREADS, Content, pack_names, stamp_of
from distribuuuu.data.datasets.targets import note_alike
from distribuuuu.files.image_files import EXTENSIONS, JUNK_FILES, JUNK_FOLDERS, is_class, is_folder, is_image

_logger = logging.getLogger(__name__)


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
    cannot be listed, or does not exist, has no images.
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
    notes = note_alike(folder, classes)
    return {"classes": classes, "notes": notes, "ignored": dict(ignored), "num_beside": num_beside}, arrays


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
