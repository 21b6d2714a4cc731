"""The index of a folder of images: scanned once, kept in a file, and mapped into memory by every later start.

The file is ROOT/.distribuuuu/index-SPLIT.bin, or lies in the user's cache where ROOT cannot be written to. It holds the
time of the last change of each folder, which a file that is added, removed or renamed moves: an index is current while
these are still the times of the folders. Nothing else is asked of the disk at a later start.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import numpy as np

from distribuuuu.config.errors import counted
from distribuuuu.data.datasets.array_file import OtherVersionError, checksum_of, name_at, read_arrays, write_arrays
from distribuuuu.data.datasets.base import EXTENSIONS
from distribuuuu.data.datasets.folder_scan import NOT_KNOWN, NUM_THREADS, Scan, scan_folder

KIND, VERSION = "folder index", 2
# How long to wait for another process that scans, before scanning too: that one may be stopped, or its disk gone.
LONGEST_WAIT_S = 600
_logger = logging.getLogger(__name__)


class FolderIndex:
    """The images of a folder in arrays, without a Python object for each.

    Args:
        folder: the folder with the classes.
        meta: says which scan made the arrays, and what it ignored.
        arrays: `names_*` of the images as in `pack_names`; `sample_folder`, int32, the folder of each image; by folder,
            the one of the classes first: `paths_*` below `folder`, `folder_class`, int32, and `folder_mtime_ns`, int64,
            NOT_KNOWN if it cannot be relied on. Images and folders lie in the order of the classes.
        file: where the arrays are mapped from; None: they are in memory.
    """

    def __init__(self, folder: str, meta: dict, arrays: dict[str, np.ndarray], file: Path | None = None):
        self.folder, self.meta, self.arrays, self.file = folder, meta, arrays, file
        folder_class, sample_folder = arrays["folder_class"], arrays["sample_folder"]
        # The folder of the classes has no class, and comes first.
        self._first_folders = np.searchsorted(folder_class, np.arange(folder_class[-1] + 1))
        self.classes = tuple(self._folder_path(number) for number in self._first_folders)
        self._bounds = [*np.searchsorted(sample_folder, self._first_folders).tolist(), len(sample_folder)]

    def __len__(self) -> int:
        return len(self.arrays["sample_folder"])

    def path(self, index: int) -> str:
        """Return the file of image `index`."""
        name = name_at(self.arrays["names_bytes"], self.arrays["names_offsets"], index)
        return os.path.join(self.folder, self._folder_path(self.arrays["sample_folder"][index]), os.fsdecode(name))

    def class_of(self, index: int) -> int:
        """Return the class of image `index`: its number in `classes`."""
        return int(self.arrays["folder_class"][self.arrays["sample_folder"][index]])

    def class_bounds(self, number: int) -> tuple[int, int]:
        """Return the numbers of the first image of a class and of the one after its last."""
        return self._bounds[number], self._bounds[number + 1]

    def folder_paths(self) -> list[str]:
        """Return the path of each folder."""
        return [os.path.join(self.folder, self._folder_path(number)) for number in range(self.num_folders)]

    def is_consistent(self) -> bool:
        """Tell whether all numbers in the arrays are of names, folders and classes that are there."""
        arrays = self.arrays
        offsets = {part: arrays[f"{part}_offsets"] for part in ("names", "paths")}
        for part, num in (("names", len(self)), ("paths", self.num_folders)):
            ends = offsets[part]
            if len(ends) != num + 1 or ends[0] != 0 or ends[-1] != len(arrays[f"{part}_bytes"]):
                return False
        ascending = (*offsets.values(), arrays["sample_folder"], arrays["folder_class"])
        is_sorted = all((array[1:] >= array[:-1]).all() for array in ascending)
        in_range = not len(self) or 0 < arrays["sample_folder"][0] <= arrays["sample_folder"][-1] < self.num_folders
        # The folder of the classes, -1, then each class without a gap.
        steps = np.diff(arrays["folder_class"])
        is_gapless = arrays["folder_class"][0] == -1 and (steps <= 1).all()
        return bool(is_sorted and in_range and is_gapless and len(arrays["folder_mtime_ns"]) == self.num_folders)

    @property
    def num_folders(self) -> int:
        """The number of folders, with that of the classes."""
        return len(self.arrays["folder_class"])

    def describe(self) -> str:
        """Return what there is, e.g. '4 images in 2 folders'."""
        return f"{counted(len(self), 'image')} in {counted(self.num_folders, 'folder')}"

    def _folder_path(self, number: int) -> str:
        return os.fsdecode(name_at(self.arrays["paths_bytes"], self.arrays["paths_offsets"], number))

    def __getstate__(self) -> dict:
        """Leave out the arrays while the file is the one they are mapped from: another process can map it too."""
        state = {"folder": self.folder, "meta": self.meta, "file": self.file, "arrays": None}
        with contextlib.suppress(OSError, ValueError):
            if self.file and read_arrays(self.file, KIND, VERSION)[0] == self.meta:
                return state
        return {**state, "file": None, "arrays": self.arrays}

    def __setstate__(self, state: dict) -> None:
        if state["arrays"] is None:
            meta, state["arrays"] = read_arrays(state["file"], KIND, VERSION)
            if meta != state["meta"]:
                raise RuntimeError(f"{state['file']} was replaced while a process was started that needs it")
        self.__init__(**state)


def open_index(root: str | os.PathLike, split: str, cache: Path, in_root: bool = True) -> FolderIndex:
    """Return the index of ROOT/SPLIT, from its file if that is current, else from a scan that is then kept.

    Of several processes one scans, and the others wait and take what it found.

    Args:
        root: the folder of the data.
        split: its sub-folder with the classes; if it is not there, the index is empty.
        cache: the folder for what cannot be kept in root.
        in_root: whether root may be written to.
    """
    folder = str(Path(root) / split)
    if not os.path.isdir(folder):
        return FolderIndex(folder, {}, scan_folder(folder, time.time_ns()).arrays)
    hashed = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:32]
    files = [Path(root) / ".distribuuuu" / f"index-{quote(os.fsencode(split), safe='')}.bin"] if in_root else []
    files.append(cache / "index" / f"{hashed}.bin")
    seen = {file: identity_of(file) for file in files}
    for file in files:
        index = _load(file, folder)
        if index is not None and _is_current(index):
            _logger.info("%s: %s, from %s", folder, index.describe(), file)
            return index
    return _scan_in_turn(folder, seen)


def _scan_in_turn(folder: str, seen: dict[Path, tuple | None]) -> FolderIndex:
    """Return a new index, kept in the first of the files that can be written."""
    scan, start, reasons = None, time.monotonic(), []
    for file, identity in seen.items():
        try:
            with take_turn(file) as now_ns:
                # Another process has scanned meanwhile. Its index is taken as it is: all processes of a run must see
                # the same images, also where folders are young.
                if identity_of(file) != identity and (index := _load(file, folder)) is not None:
                    _logger.info("%s: %s, from %s of another process", folder, index.describe(), file)
                    return index
                scan = scan or scan_folder(folder, now_ns)
                write_arrays(file, KIND, VERSION, _describe(scan), scan.arrays)
        except OSError as error:
            reasons.append(f"{file}: {error.strerror or error}")
            continue
        # Mapped from its file, it shares its memory with the other processes.
        if (index := _load(file, folder)) is not None:
            _log_scan(index, start, f"kept in {file}")
            return index
        reasons.append(f"{file}: what was written cannot be read")
    scan = scan or scan_folder(folder, time.time_ns())
    index = FolderIndex(folder, _describe(scan), scan.arrays)
    _log_scan(index, start, "not kept")
    _logger.warning("%s is scanned at every start, since no index can be kept: %s", folder, "; ".join(reasons))
    return index


def _log_scan(index: FolderIndex, start: float, kept: str) -> None:
    seconds = time.monotonic() - start
    _logger.info("%s: %s, scanned in %.1f s, %s", index.folder, index.describe(), seconds, kept)


def identity_of(file: Path) -> tuple | None:
    """Return what tells a file from the one that replaces it; None: there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _describe(scan: Scan) -> dict:
    found = {"ignored": dict(scan.ignored), "num_beside": scan.num_beside}
    return {"scan": os.urandom(8).hex(), "extensions": list(EXTENSIONS), "crc32": checksum_of(scan.arrays), **found}


def _load(file: Path, folder: str) -> FolderIndex | None:
    """Return the index in a file, current or not; None: there is none that can be used."""
    try:
        meta, arrays = read_arrays(file, KIND, VERSION)
        if meta["extensions"] != list(EXTENSIONS):
            raise OtherVersionError("was made with other extensions of image files")
        if meta["crc32"] != checksum_of(arrays):
            raise ValueError("is damaged")
        index = FolderIndex(folder, meta, arrays, file)
        if not index.is_consistent():
            raise ValueError("holds numbers that contradict each other")
        return index
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        level = logging.INFO if isinstance(error, OtherVersionError) else logging.WARNING
        _logger.log(level, "%s is not used: %s; the folder is scanned", file, error)
        return None


def _is_current(index: FolderIndex) -> bool:
    """Tell whether no folder has changed since the scan."""
    mtimes = index.arrays["folder_mtime_ns"]
    if (mtimes == NOT_KNOWN).any():
        return False
    paths, step = index.folder_paths(), 64
    if len(paths) <= step:
        return _mtimes(paths) == mtimes.tolist()
    parts = [paths[start : start + step] for start in range(0, len(paths), step)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return [mtime for part in pool.map(_mtimes, parts) for mtime in part] == mtimes.tolist()


def _mtimes(paths: list[str]) -> list[int]:
    found = []
    for path in paths:
        try:
            found.append(os.stat(path).st_mtime_ns)
        except OSError:
            found.append(NOT_KNOWN)
    return found


@contextlib.contextmanager
def take_turn(file: Path) -> Iterator[int]:
    """Wait until no other process scans for this file; then yield the time, in ns, by the clock of its disk.

    Raises:
        OSError: nothing can be written there.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "ab") as lock:
        _wait_for(lock)
        # The disk may be another machine's: its clock, not ours, dates the folders.
        os.utime(lock.name)
        yield os.fstat(lock.fileno()).st_mtime_ns


def _wait_for(lock) -> None:
    """Take a lock that goes with its process; do without where there are none."""
    try:
        import fcntl
    except ImportError:
        return
    end = time.monotonic() + LONGEST_WAIT_S
    while time.monotonic() < end:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            return
