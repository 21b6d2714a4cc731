"""List the images below a folder of classes into arrays, with one look at each folder and none at a file."""

import logging
import os
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from distribuuuu.data.datasets.array_file import pack_names
from distribuuuu.data.datasets.base import EXTENSIONS, JUNK_FOLDERS, is_class, is_image

# More than there are cores: on a network disk the threads wait for answers.
NUM_THREADS = min(16, 4 * (os.cpu_count() or 1))
# A folder that changed this shortly before the scan may change again without another time: clocks of disks are coarse.
YOUNG_NS = 2_000_000_000
# In place of the time of a folder that changed so lately, or could not be listed as a whole.
NOT_KNOWN = -1
# Files that systems leave in folders, in lower case; hidden ones are not spoken of either.
_JUNK_FILES = ("thumbs.db", "desktop.ini")
_logger = logging.getLogger(__name__)


class _Listing(NamedTuple):
    """What a folder holds; names are text, each with a NUL behind it, so that a folder costs a few objects."""

    mtime_ns: int = NOT_KNOWN
    names: bytes = b""
    folders: tuple[os.DirEntry, ...] = ()
    identity: tuple[int, int] | None = None
    ignored: Counter[str] = Counter()


class Scan(NamedTuple):
    """What a scan has found.

    Attributes:
        arrays: those of `FolderIndex`.
        ignored: how many files are no images, by the ending of their names in lower case.
        num_beside: images beside the class folders.
    """

    arrays: dict[str, np.ndarray]
    ignored: Counter[str]
    num_beside: int


class _Folder(NamedTuple):
    """A folder below that of the classes, and the identities of those above it."""

    path: str
    above: tuple[tuple[int, int] | None, ...] = ()
    is_link: bool = False


def scan_folder(folder: str, now_ns: int) -> Scan:
    """Return the images below a folder of classes: by class, then path of the folder, then name.

    Links are followed, but none that leads back to a folder above it. A folder that cannot be listed has no images.

    Args:
        folder: the folder of the classes; if it is not there, nothing is found.
        now_ns: the time by the clock that dates the folders.
    """
    found: dict[str, _Listing] = {}
    waiting = [_Folder("")]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        while waiting:
            paths = [os.path.join(folder, place.path) for place in waiting]
            deeper: list[_Folder] = []
            for place, listing in zip(waiting, pool.map(_list_folder, paths), strict=True):
                if place.is_link and listing.identity in place.above:
                    continue
                found[place.path] = listing
                deeper += _folders_in(place, listing)
            waiting = deeper
    num_beside = found[""].names.count(b"\0")
    ignored = sum((listing.ignored for path, listing in found.items() if path), Counter())
    return Scan(_pack(found, now_ns), ignored, num_beside)


def _folders_in(place: _Folder, listing: _Listing) -> Iterable[_Folder]:
    above = (*place.above, listing.identity)
    for entry in listing.folders:
        if entry.name.lower() not in JUNK_FOLDERS if place.path else is_class(entry.name):
            yield _Folder(os.path.join(place.path, entry.name), above, entry.is_symlink())


def _list_folder(path: str) -> _Listing:
    names, folders = [], []
    try:
        status = os.stat(path)  # before the listing: a later change gives another time
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    is_folder = entry.is_dir()
                except OSError:  # links in a circle
                    is_folder = False
                if is_folder:
                    folders.append(entry)
                else:
                    names.append(entry.name)
        images, ignored = _join_images(names)
        whole = images.count("\0") == len(names) or not _has_dangling_link(path)
    except OSError as error:
        _logger.warning("%s is left out: %s", path, error.strerror or error)
        return _Listing()
    mtime_ns = status.st_mtime_ns if whole else NOT_KNOWN
    return _Listing(mtime_ns, os.fsencode(images), tuple(folders), (status.st_dev, status.st_ino), ignored)


def _join_images(names: list[str]) -> tuple[str, Counter[str]]:
    """Return the names of images in sorted order, each with a NUL behind it, and the endings of the other files."""
    names.sort()
    text = "\0".join([*names, ""])
    # Mostly all have one extension: a count in the text is many times faster than a look at each.
    end = os.path.splitext(names[0])[1] if names else ""
    if end.lower() in EXTENSIONS and text.count(f"{end}\0") == len(names) and "\0." not in text and text[0] != ".":
        return text, Counter()
    ignored = [name for name in names if name[0] != "." and not is_image(name) and name.lower() not in _JUNK_FILES]
    endings = Counter(os.path.splitext(name)[1].lower() for name in ignored)
    return "\0".join([*filter(is_image, names), ""]), endings


def _has_dangling_link(path: str) -> bool:
    """Tell whether a link leads nowhere that may lead to a folder later, which no time of a folder would show."""
    with os.scandir(path) as entries:
        return any(entry.is_symlink() and not is_image(entry.name) and not os.path.exists(entry) for entry in entries)


def _pack(found: dict[str, _Listing], now_ns: int) -> dict[str, np.ndarray]:
    paths = sorted(found, key=lambda path: (path.split(os.sep, 1)[0], path))
    listings = [found[path] for path in paths]
    classes = sorted(path for path in paths if path and os.sep not in path)
    numbers = {name: number for number, name in enumerate(classes)}
    listings[0] = listings[0]._replace(names=b"")  # images beside the classes have no class
    text = np.frombuffer(b"".join([listing.names for listing in listings]), np.uint8)
    ends = np.flatnonzero(text == 0)
    mtimes = np.array([listing.mtime_ns for listing in listings], np.int64)
    packed = pack_names([os.fsencode(path) for path in paths])
    return {
        "names_bytes": text[text != 0],
        "names_offsets": np.concatenate([[0], ends - np.arange(len(ends))]),
        "sample_folder": np.repeat(
            np.arange(len(paths), dtype=np.int32), [listing.names.count(b"\0") for listing in listings]
        ),
        "paths_bytes": packed["bytes"],
        "paths_offsets": packed["offsets"],
        "folder_class": np.array([numbers.get(path.split(os.sep, 1)[0], -1) for path in paths], np.int32),
        "folder_mtime_ns": np.where(mtimes > now_ns - YOUNG_NS, NOT_KNOWN, mtimes),
    }
