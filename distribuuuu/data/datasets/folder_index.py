"""Indexes of images: scanned once, stored in a file, and memory-mapped by later runs; and the index of a folder.

The file of a folder's index is ROOT/.distribuuuu/index-SPLIT.bin, or is in the cache folder if ROOT is not writable. It
stores the modification time of each folder, which changes when a file is added, removed or renamed: an index is current
as long as these times match. A later run reads nothing else from the disk.
"""

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np

from distribuuuu.config.errors import counted
from distribuuuu.data.datasets.array_file import (
    OtherVersionError,
    checksum_of,
    pack_names,
    packed_name,
    read_arrays,
    write_arrays,
)
from distribuuuu.files.image_files import EXTENSIONS, JUNK_FOLDERS, file_stamp, is_class, is_folder, is_image
from distribuuuu.files.locks import take_turn

# More than the cores: on a network disk the threads wait for replies.
NUM_THREADS = min(16, 4 * (os.cpu_count() or 1))
# A folder modified this shortly before the scan may change again without a new time: file systems have coarse clocks.
YOUNG_NS = 2_000_000_000
# The modification time of such a folder, and of one that was not listed completely.
NOT_KNOWN = -1
# Files that operating systems create, in lower case; like hidden files they are not counted as ignored.
JUNK_FILES = ("thumbs.db", "desktop.ini")
# Types of the arrays of an index.
_DTYPES = {
    "names_bytes": np.uint8, "names_offsets": np.int64, "sample_folder": np.int32, "paths_bytes": np.uint8,
    "paths_offsets": np.int64, "folder_class": np.int32, "folder_mtime_ns": np.int64,
}  # fmt: skip
_logger = logging.getLogger(__name__)

# What a scan returns: the meta and the arrays of an index.
Content = tuple[dict[str, Any], dict[str, np.ndarray]]
Index = TypeVar("Index", bound="StoredIndex")


class StoredIndex:
    """An index of images in arrays, without a Python object for each; a family defines the methods without a body.

    Args:
        source: what is indexed; its text is the name in messages.
        meta: the ID of the scan, and what it ignored.
        arrays: by name.
        file: the file that the arrays are mapped from; None: they are in memory.
    """

    kind, version = "folder index", 2
    # The types of the arrays, and the names in `pack_names` of those that hold texts.
    dtypes: Mapping[str, Any] = {}
    texts: tuple[str, ...] = ()

    def __init__(self, source: Any, meta: dict, arrays: dict[str, np.ndarray], file: Path | None = None):
        self.source, self.meta, self.arrays, self.file = source, meta, arrays, file

    @classmethod
    def check(cls, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Raise ValueError unless the numbers of a stored index are consistent: it may come with the data of others."""
        ignored, found = meta.get("ignored"), {name: array.dtype for name, array in arrays.items() if array.ndim == 1}
        counts = [*ignored.values(), meta.get("num_beside")] if isinstance(ignored, dict) else [None]
        if found != cls.dtypes or len(arrays) > len(found) or not all(type(count) is int for count in counts):
            raise ValueError("has an invalid header")
        for name in cls.texts:
            offsets, end = arrays[f"{name}_offsets"], len(arrays[f"{name}_bytes"])
            if not len(offsets) or offsets[0] != 0 or offsets[-1] != end or (offsets[1:] < offsets[:-1]).any():
                raise ValueError("holds inconsistent numbers of names")

    def is_current(self) -> bool:
        """Return whether nothing has changed since the scan."""
        return True

    def describe(self) -> str:
        """Return the counts, e.g. '4 images in 2 folders'."""
        return ""

    def __getstate__(self) -> dict:
        """Omit the arrays if the file still holds them: another process can map it too."""
        state: dict[str, Any] = {"source": self.source, "meta": self.meta, "file": self.file, "arrays": None}
        with contextlib.suppress(OSError, ValueError):
            if self.file and read_arrays(self.file, self.kind, self.version)[0] == self.meta:
                return state
        return {**state, "file": None, "arrays": self.arrays}

    def __setstate__(self, state: dict) -> None:
        if state["arrays"] is None:
            meta, state["arrays"] = read_arrays(state["file"], self.kind, self.version)
            if meta != state["meta"]:
                raise RuntimeError(f"{state['file']} was replaced while a process that needs it was started")
        type(self).__init__(self, **state)


class FolderIndex(StoredIndex):
    """The images of a folder.

    Args:
        source: the folder with the class folders.
        meta: see `StoredIndex`.
        arrays: `names_*` of the images as in `pack_names`; `sample_folder`, int32, the folder of each image; and for
            each folder, first the one of the classes: `paths_*` relative to `folder`, `folder_class`, int32, and
            `folder_mtime_ns`, int64, or NOT_KNOWN. Images and folders are in the order of the classes.
        file: see `StoredIndex`.
    """

    dtypes, texts = _DTYPES, ("names", "paths")

    def __init__(self, source: str, meta: dict, arrays: dict[str, np.ndarray], file: Path | None = None):
        super().__init__(source, meta, arrays, file)
        self.folder = source
        folder_class, sample_folder = arrays["folder_class"], arrays["sample_folder"]
        # The folder of the classes has no class, and comes first.
        first_folders = np.searchsorted(folder_class, np.arange(folder_class[-1] + 1))
        self.classes = tuple(packed_name(arrays, "paths", number) for number in first_folders)
        self._bounds = [*np.searchsorted(sample_folder, first_folders).tolist(), len(sample_folder)]

    def __len__(self) -> int:
        return len(self.arrays["sample_folder"])

    def path(self, index: int) -> str:
        """Return the file of image `index`."""
        folder = packed_name(self.arrays, "paths", self.arrays["sample_folder"][index])
        return os.path.join(self.folder, folder, packed_name(self.arrays, "names", index))

    def class_bounds(self, number: int) -> tuple[int, int]:
        """Return the index of the first image of a class and of the one after its last."""
        return self._bounds[number], self._bounds[number + 1]

    def is_current(self) -> bool:
        """Return whether no folder has changed since the scan."""
        mtimes = self.arrays["folder_mtime_ns"]
        if (mtimes == NOT_KNOWN).any():
            return False
        numbers, step = range(len(mtimes)), 64

        def find_mtimes(first: int) -> list[int]:
            paths = [packed_name(self.arrays, "paths", number) for number in numbers[first : first + step]]
            stamps = [file_stamp(os.path.join(self.folder, path)) for path in paths]
            return [stamp[1] if stamp else NOT_KNOWN for stamp in stamps]

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            return [mtime for part in pool.map(find_mtimes, numbers[::step]) for mtime in part] == mtimes.tolist()

    @classmethod
    def check(cls, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Raise ValueError unless all numbers refer to existing names, folders and classes.

        An index may come with the data of others: no name may lead out of the folder.
        """
        super().check(meta, arrays)
        sample_folder, folder_class = arrays["sample_folder"], arrays["folder_class"]
        lengths = {"names_offsets": len(sample_folder) + 1, "paths_offsets": len(folder_class) + 1,
                   "folder_mtime_ns": len(folder_class)}  # fmt: skip
        is_full = all(len(arrays[name]) == num for name, num in lengths.items())
        is_sorted = all((array[1:] >= array[:-1]).all() for array in (sample_folder, folder_class))
        in_range = not len(sample_folder) or 0 < sample_folder[0] <= sample_folder[-1] < len(folder_class)
        # The folder of the classes has -1, followed by all classes without a gap.
        has_all_classes = len(folder_class) and folder_class[0] == -1 and (np.diff(folder_class) <= 1).all()
        if not (is_full and is_sorted and in_range and has_all_classes):
            raise ValueError("holds inconsistent numbers")
        text, offsets = arrays["paths_bytes"].tobytes(), arrays["paths_offsets"].tolist()
        paths = [text[start:end].split(os.fsencode(os.sep)) for start, end in itertools.pairwise(offsets)]
        is_inside = paths[0] == [b""] and not any(part in (b"", b".", b"..") for path in paths[1:] for part in path)
        is_name = not any(byte in arrays["names_bytes"] for byte in (0, ord(os.sep)))
        if not is_inside or not is_name or 0 in arrays["paths_bytes"]:
            raise ValueError("holds a path outside of the folder")

    def describe(self) -> str:
        """Return the counts, e.g. '4 images in 2 folders'."""
        return f"{counted(len(self), 'image')} in {counted(len(self.arrays['folder_class']), 'folder')}"


def open_index(
    root: str | os.PathLike, split: str, cache: Path, in_root: bool = True, extensions: tuple[str, ...] = EXTENSIONS
) -> FolderIndex:
    """Return the index of ROOT/SPLIT from its file if that is current, otherwise from a new scan that is stored.

    Of several processes one scans, and the others wait for its result.

    Args:
        root: the folder of the data.
        split: its sub-folder with the classes; if it does not exist, the index is empty.
        cache: the folder for what cannot be stored in root.
        in_root: whether root may be written to.
        extensions: those of image files.
    """
    folder = str(Path(root) / split)
    if not os.path.isdir(folder):
        return FolderIndex(folder, *scan_folder(folder, time.time_ns(), extensions))
    name = f"index-{quote(os.fsencode(split), safe='')}.bin"
    files = index_files(root, name, os.path.realpath(folder), cache, in_root)
    scan = functools.partial(scan_folder, folder, extensions=extensions)
    return open_stored(FolderIndex, folder, files, scan, extensions)


def index_files(root: str | os.PathLike, name: str, identity: str, cache: Path, in_root: bool) -> list[Path]:
    """Return where an index may be stored: beside the data if `in_root`, and in the cache by its identity."""
    files = [Path(root) / ".distribuuuu" / name, cache / "index" / f"{hash_text(identity)}.bin"]
    return files[0 if in_root else 1 :]


def hash_text(text: str) -> str:
    """Return 128 bits of the SHA-256 of a text, in hexadecimal digits."""
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:32]


def open_stored(
    family: type[Index],
    source: Any,
    files: Sequence[Path],
    scan: Callable[[int], Content],
    extensions: tuple[str, ...] = EXTENSIONS,
) -> Index:
    """Return the index of the first file with a current one, else a new one, stored in the first that can be written.

    Args:
        family: the kind of index.
        source: what is indexed.
        files: where the index may be stored.
        scan: returns the content of a new index for the time in ns by the clock of the file system.
        extensions: those of image files; an index of others is not used.
    """
    stamps = {file: file_stamp(file) for file in files}
    for file in files:
        index = _load(family, file, source, extensions)
        if index is not None and index.is_current():
            _logger.info("%s: %s, from %s", source, index.describe(), file)
            return index
    content, start, reasons = None, time.monotonic(), []
    for file, stamp in stamps.items():
        try:
            with take_turn(file) as now_ns:
                # Another process has scanned meanwhile. Its index is used even if a folder has changed since: all
                # processes of a run must see the same images.
                if file_stamp(file) != stamp and (index := _load(family, file, source, extensions)) is not None:
                    _logger.info("%s: %s, from %s of another process", source, index.describe(), file)
                    return index
                content = content or _stamped(scan(now_ns), extensions)
                write_arrays(file, family.kind, family.version, *content)
        except OSError as error:
            reasons.append(f"{file}: {error.strerror or error}")
            continue
        # Mapped from its file, the index shares its memory with other processes.
        if (index := _load(family, file, source, extensions)) is not None:
            _log_scan(index, start, f"stored in {file}")
            return index
        reasons.append(f"{file}: the file written cannot be read")
    index = family(source, *(content or _stamped(scan(time.time_ns()), extensions)))
    _log_scan(index, start, "not stored")
    _logger.warning("%s is scanned at every start, since no index can be stored: %s", source, "; ".join(reasons))
    return index


def _stamped(content: Content, extensions: tuple[str, ...]) -> Content:
    """Return the content of a scan with its ID, the extensions and the checksum."""
    meta, arrays = content
    return {**meta, "scan": os.urandom(8).hex(), "extensions": list(extensions), "crc32": checksum_of(arrays)}, arrays


def _log_scan(index: StoredIndex, start: float, stored: str) -> None:
    seconds = time.monotonic() - start
    _logger.info("%s: %s, scanned in %.1f s, %s", index.source, index.describe(), seconds, stored)


def _load(family: type[Index], file: Path, source: Any, extensions: tuple[str, ...]) -> Index | None:
    """Return the index in a file, even if it is stale; None if the file is missing or cannot be used."""
    try:
        meta, arrays = read_arrays(file, family.kind, family.version)
        if meta.get("extensions") != list(extensions):
            raise OtherVersionError("was made with other image file extensions")
        if meta.get("crc32") != checksum_of(arrays):
            raise ValueError("is corrupt")
        family.check(meta, arrays)
        return family(source, meta, arrays, file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        level = logging.INFO if isinstance(error, OtherVersionError) else logging.WARNING
        _logger.log(level, "%s is not used: %s; %s is scanned", file, error, source)
        return None


# ---------------------------------------------------------------------------------------- scanning


class _Listing(NamedTuple):
    """The contents of a folder; each image name ends with a NUL, so that a folder needs few objects."""

    mtime_ns: int = NOT_KNOWN
    names: bytes = b""
    folders: tuple["os.DirEntry[str]", ...] = ()
    identity: tuple[int, int] | None = None
    ignored: Counter[str] = Counter()


class _Folder(NamedTuple):
    """A relative path, and the identities of the folders above it."""

    path: str
    above: tuple[tuple[int, int] | None, ...] = ()
    is_link: bool = False


def scan_folder(folder: str, now_ns: int, extensions: tuple[str, ...] = EXTENSIONS) -> Content:
    """Return the meta and the arrays of a `FolderIndex`: images by class, then path of the folder, then name.

    Each folder is listed once, and no file is read. Links are followed, except to a folder above them. A folder that
    cannot be listed has no images.

    Args:
        folder: the folder of the classes; it need not exist.
        now_ns: the time by the clock of its file system.
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
                deeper += _folders_in(place, listing)
            waiting = deeper
    top = found[""]
    ignored = sum((listing.ignored for path, listing in found.items() if path), Counter())
    found[""] = top._replace(names=b"")  # images outside the class folders have no class
    return {"ignored": dict(ignored), "num_beside": top.names.count(b"\0")}, _to_arrays(found, now_ns)


def _folders_in(place: _Folder, listing: _Listing) -> Iterator[_Folder]:
    above = (*place.above, listing.identity)
    for entry in listing.folders:
        if entry.name.lower() not in JUNK_FOLDERS if place.path else is_class(entry.name):
            yield _Folder(os.path.join(place.path, entry.name), above, entry.is_symlink())


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
        images, ignored = _join_images(names, extensions)
        is_complete = images.count("\0") == len(names) or not _has_dangling_link(path, extensions)
    except OSError as error:
        _logger.warning("%s is ignored: %s", path, error.strerror or error)
        return _Listing()
    mtime_ns = status.st_mtime_ns if is_complete else NOT_KNOWN
    return _Listing(mtime_ns, os.fsencode(images), tuple(folders), (status.st_dev, status.st_ino), ignored)


def _join_images(names: list[str], extensions: tuple[str, ...] = EXTENSIONS) -> tuple[str, Counter[str]]:
    """Return the sorted image names, each followed by a NUL, and the counts of the extensions of the other files."""
    names.sort()
    text = "\0".join([*names, ""])
    # Usually all have one extension: counting it in the text is many times faster than testing each name.
    end = os.path.splitext(names[0])[1] if names else ""
    if end.lower() in extensions and text.count(f"{end}\0") == len(names) and "\0." not in text and text[0] != ".":
        return text, Counter()
    images = [name for name in names if is_image(name, extensions)]
    others = set(names).difference(images)
    ignored = [name for name in names if name in others and name[0] != "." and name.lower() not in JUNK_FILES]
    return "\0".join([*images, ""]), Counter(os.path.splitext(name)[1].lower() for name in ignored)


def _has_dangling_link(path: str, extensions: tuple[str, ...]) -> bool:
    """Return whether a dangling link may become a folder later, which changes no modification time."""
    with os.scandir(path) as entries:
        others = (entry for entry in entries if entry.is_symlink() and not is_image(entry.name, extensions))
        return any(not os.path.exists(entry) for entry in others)


def _to_arrays(found: dict[str, _Listing], now_ns: int) -> dict[str, np.ndarray]:
    paths = sorted(found, key=lambda path: (path.split(os.sep, 1)[0], path))
    listings = [found[path] for path in paths]
    classes = sorted(path for path in paths if path and os.sep not in path)
    numbers = {name: number for number, name in enumerate(classes)}
    text = np.frombuffer(b"".join([listing.names for listing in listings]), np.uint8)
    ends = np.flatnonzero(text == 0)
    mtimes = np.array([listing.mtime_ns for listing in listings], np.int64)
    counts = [listing.names.count(b"\0") for listing in listings]
    return {
        "names_bytes": text[text != 0],
        "names_offsets": np.concatenate([[0], ends - np.arange(len(ends))]),
        "sample_folder": np.repeat(np.arange(len(paths), dtype=np.int32), counts),
        **pack_names("paths", [os.fsencode(path) for path in paths]),
        "folder_class": np.array([numbers.get(path.split(os.sep, 1)[0], -1) for path in paths], np.int32),
        "folder_mtime_ns": np.where(mtimes > now_ns - YOUNG_NS, NOT_KNOWN, mtimes),
    }
