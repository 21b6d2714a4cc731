"""The index of the images of a split: where each image is, and its targets.

A source of images scans its files once. The index is stored in one file of the user's cache folder. Later runs map that
file into memory, without an object for each image, as long as no scanned file or folder has changed.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import math
import mmap
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from distribuuuu.config.errors import counted, first_few
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.image_files import EXTENSIONS, name_at
from distribuuuu.files.locks import take_turn
from distribuuuu.files.untrusted import open_regular, parse_json, untrusted

# More than the cores: on a network disk the threads wait for replies.
NUM_THREADS = min(16, 4 * (os.cpu_count() or 1))
# A file modified this shortly before the scan may change again without a new time: file systems have coarse clocks.
YOUNG_NS = 2_000_000_000
# The stamp of a folder that was not listed completely.
NOT_KNOWN = (-1, -1, -1)
KIND, VERSION = "image index", 1
# What the digest leaves out: it does not change when equal files are copied or packed again.
_NOT_IN_DIGEST = ("stamps", "offset", "packed", "crc32")
_logger = logging.getLogger(__name__)

# What a scan returns: the meta and the arrays of an index.
Content = tuple[dict[str, Any], dict[str, np.ndarray]]


class Index:
    """The images of a split.

    Args:
        source: the name in messages.
        root: the folder that the names of files are relative to.
        meta: `classes`, their names; `columns`, those of structured targets; `notes` and `ignored`, what the scan left
            out, in words and by the endings of files; `num_beside`, images outside of class folders; `scanned`, its
            time in ns.
        arrays: `files_*`, see `pack_names`: folders of image files, or archives; `stamps`, int64 (F, 3), of each. By
            image: `file`, the number of its folder or archive; `names_*`; in archives `offset`, `size`, `packed` (0:
            stored as it is) and `crc32` (0: unknown). `label`, one by image; with `label_offsets`, any number; or
            `target0` ..., indices into `values0_*` ..., for each of the columns.
        path: the file that the arrays are mapped from; None: they are in memory.
    """

    def __init__(self, source: str, root: str, meta: dict, arrays: dict[str, np.ndarray], path: Path | None = None):
        self.source, self.root, self.meta, self.arrays, self.path = source, root, meta, arrays, path
        self.classes: tuple[str, ...] = tuple(meta["classes"])
        self.is_archive = "offset" in arrays
        self.opened: dict[int, Any] = {}  # archives by their numbers

    def __len__(self) -> int:
        return len(self.arrays["file"])

    def file_of(self, index: int) -> str:
        """Return the folder or the archive of image `index`."""
        return os.path.join(self.root, packed_name(self.arrays, "files", self.arrays["file"][index]))

    def name(self, index: int) -> str:
        """Return the name of image `index` in its folder or archive."""
        return packed_name(self.arrays, "names", index)

    def relative(self, index: int) -> str:
        """Return the path of image `index` from the root."""
        return os.path.join(packed_name(self.arrays, "files", self.arrays["file"][index]), self.name(index))

    def describe(self, index: int) -> str:
        """Return the path of image `index`, or its archive and its name in it, e.g. 'train.tar:cat/1.jpg'."""
        file, name = self.file_of(index), self.name(index)
        return f"{os.path.basename(file)}:{name}" if self.is_archive else os.path.join(file, name)

    def names_of(self, prefix: str) -> tuple[str, ...]:
        """Return all names of `pack_names`."""
        return tuple(
            packed_name(self.arrays, prefix, number) for number in range(len(self.arrays[f"{prefix}_offsets"]) - 1)
        )

    def has_current_stamps(self) -> bool:
        """Return whether no file or folder has changed since the scan."""
        stamps, step = self.arrays["stamps"], 64
        paths = [os.path.join(self.root, name) for name in self.names_of("files")]

        def find(first: int) -> list[tuple[int, int, int]]:
            return [find_stamp(path) for path in paths[first : first + step]]

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            found = [stamp for part in pool.map(find, range(0, len(paths), step)) for stamp in part]
        return found == [*map(tuple, stamps.tolist())]

    def is_current(self) -> bool:
        """Return whether nothing has changed since the scan, nor may have changed right after it."""
        return (
            self.has_current_stamps() and self.arrays["stamps"][:, 1].max(initial=0) <= self.meta["scanned"] - YOUNG_NS
        )

    def count(self) -> str:
        """Return the counts, e.g. '4 images in 2 folders'."""
        noun = "archive" if self.is_archive else "folder"
        return f"{counted(len(self), 'image')} in {counted(len(self.arrays['stamps']), noun)}"

    def notes(self) -> Iterator[str]:
        """Yield warnings on what was left out."""
        yield from self.meta["notes"]
        where, ignored = self.source, sorted(self.meta["ignored"].items(), key=lambda item: (-item[1], item[0]))
        if ignored:
            counts = first_few([f"{ending or 'no ending'} ({count})" for ending, count in ignored])
            files = counted(sum(self.meta["ignored"].values()), "file")
            yield f"{where}: {files} left out, whose ending is not that of a known type of images: {counts}"
        if num := self.meta["num_beside"]:
            yield f"{where}: {counted(num, 'image')} outside the class folders left out; fix: move them into one"

    def __getstate__(self) -> dict:
        """Omit the arrays if the file still holds them: another process can map it too."""
        state = {"source": self.source, "root": self.root, "meta": self.meta, "arrays": None, "path": self.path}
        with contextlib.suppress(OSError, ValueError):
            if self.path and read_arrays(self.path, KIND, VERSION)[0] == self.meta:
                return state
        return {**state, "path": None, "arrays": self.arrays}

    def __setstate__(self, state: dict) -> None:
        if state["arrays"] is None:
            meta, state["arrays"] = read_arrays(state["path"], KIND, VERSION)
            if meta != state["meta"]:
                raise RuntimeError(f"{state['path']} was replaced while a process that needs it was started")
        self.__init__(**state)  # type: ignore[misc]


def stamp_of(status: os.stat_result) -> tuple[int, int, int]:
    """Return numbers that change with a file, or with the entries of a folder.

    Mounts and restored backups may keep the modification time of a folder to which files are added, but not the time
    of the change itself.
    """
    if stat.S_ISDIR(status.st_mode):
        return 0, status.st_mtime_ns, status.st_ctime_ns
    return status.st_size, status.st_mtime_ns, 0


def find_stamp(path: str) -> tuple[int, int, int]:
    """Return the stamp of a file or a folder; NOT_KNOWN if it is missing, which equals no other."""
    try:
        return stamp_of(os.stat(path))
    except (OSError, ValueError):  # ValueError: a path with a NUL
        return -2, -2, -2


def digest_of(meta: dict, arrays: dict[str, np.ndarray]) -> str:
    """Return 128 bits of a SHA-256 of the classes, and of names, labels and stored sizes, in hexadecimal digits."""
    found = hashlib.sha256(json.dumps(meta["classes"]).encode())
    for name in sorted({*arrays}.difference(_NOT_IN_DIGEST)):
        found.update(name.encode())
        found.update(np.ascontiguousarray(arrays[name]).view(np.uint8).data)
    return found.hexdigest()[:32]


def encode_targets(key: str, found: Mapping[str, tuple[Sequence, Sequence[str]]]) -> Content:
    """Return the meta and the arrays of the targets of images.

    Args:
        key: label, labels (several of one column by image) or targets (several columns).
        found: by column, the values, and their names in the order of the classes, to which unknown ones are added.
    """
    meta: dict[str, Any] = {"columns": list(found)} if key == "targets" else {}
    arrays: dict[str, np.ndarray] = {}
    meta["classes"] = []
    for number, (values, names) in enumerate(found.values()):
        flat = [*itertools.chain.from_iterable(values)] if key == "labels" else values
        numbers = {name: place for place, name in enumerate(dict.fromkeys([*names, *flat]))}
        indices = np.fromiter((numbers[value] for value in flat), np.int32, len(flat))
        if key == "targets":
            arrays |= {**pack_names(f"values{number}", [*map(os.fsencode, numbers)]), f"target{number}": indices}
            continue
        meta["classes"], arrays["label"] = list(numbers), indices
        if key == "labels":
            arrays["label_offsets"] = np.cumsum([0, *map(len, values)], dtype=np.int64)
    return meta, arrays


# ----------------------------------------------------------------------------------- stored indexes

# The indexes that this process has opened, by their files: each is opened several times in a start.
_opened: dict[tuple, Index] = {}


def open_index(
    source: str,
    root: str | os.PathLike,
    name: str,
    cache: Path,
    scan: Callable[[], Content],
    extensions: tuple[str, ...] = EXTENSIONS,
    below: str = "",
) -> Index:
    """Return the index of a source from its file if that is current, otherwise from a new scan that is stored.

    Of several processes one scans, and the others wait for its result.

    Args:
        source: the name in messages.
        root: the folder of the data.
        name: of the index among those of this folder.
        cache: the cache folder.
        scan: returns the content of a new index.
        extensions: those of image files; an index of others is not used.
        below: the folder below root that the names of files are relative to.
    """
    own = hashlib.sha256(os.fsencode(f"{os.path.realpath(root)}\0{name}")).hexdigest()[:32]
    path, base = cache / "index" / f"{own}.bin", str(Path(root, below))
    key = path, base, extensions
    if (index := _opened.get(key)) is not None and index.has_current_stamps():
        return index
    if len(_opened) > 8:
        _opened.clear()
    _opened[key] = index = _open(source, base, path, scan, extensions)
    return index


def _open(source: str, root: str, path: Path, scan: Callable[[], Content], extensions: tuple[str, ...]) -> Index:
    stamp = find_stamp(os.fspath(path))
    index = _load(source, root, path, extensions)
    if index is not None and index.is_current():
        _logger.info("%s: %s, from %s", source, index.count(), path)
        return index
    content, start, reason = None, time.monotonic(), "the file written cannot be read"
    try:
        with take_turn(path) as now_ns:
            # Another process has scanned meanwhile. Its index is used even if a folder has changed since: all
            # processes of a run must see the same images.
            if find_stamp(os.fspath(path)) != stamp and (index := _load(source, root, path, extensions)):
                _logger.info("%s: %s, from %s of another process", source, index.count(), path)
                return index
            content = _sealed(scan(), extensions, now_ns)
            write_arrays(path, KIND, VERSION, *content)
    except OSError as error:
        reason = error.strerror or str(error)
    seconds = f"scanned in {time.monotonic() - start:.1f} s"
    # Mapped from its file, the index shares its memory with other processes.
    if content is not None and (index := _load(source, root, path, extensions)) is not None:
        _logger.info("%s: %s, %s, stored in %s", source, index.count(), seconds, path)
        return index
    _logger.warning("%s is scanned at every start, since its index cannot be stored: %s: %s", source, path, reason)
    return Index(source, root, *(content or _sealed(scan(), extensions, time.time_ns())))


def _sealed(content: Content, extensions: tuple[str, ...], now_ns: int) -> Content:
    """Return the content of a scan with its ID, its time, the extensions, the digest and the checksum."""
    meta, arrays = content
    sealed = {"scan": os.urandom(8).hex(), "scanned": now_ns, "extensions": list(extensions)}
    return {**meta, **sealed, "digest": digest_of(meta, arrays), "crc32": checksum_of(arrays)}, arrays


def _load(source: str, root: str, path: Path, extensions: tuple[str, ...]) -> Index | None:
    """Return the index in a file, even if it is stale; None if the file is missing or cannot be used."""
    try:
        with untrusted(path, "index"):
            meta, arrays = read_arrays(path, KIND, VERSION)
            if meta["extensions"] != list(extensions) or meta["crc32"] != checksum_of(arrays):
                raise ValueError("it was made with other extensions of image files, or its checksum does not match")
            return Index(source, root, meta, arrays, path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _logger.warning("%s is not used: %s; %s is scanned", path, error, source)
        return None


# ------------------------------------------------------------------------------------ files of arrays

# All processes of a machine share the pages of such a file, so loader workers need no copies of an index.
#
#     8 bytes   magic
#     8 bytes   length of the header, little-endian
#     4 bytes   CRC-32 of the header
#     JSON      {"kind", "version", "size", "meta", "arrays": {name: [dtype, shape, offset]}}
#     ...       each array, at a multiple of 64 bytes
MAGIC = b"DUARRAYS"
ALIGNMENT = 64
FIXED = len(MAGIC) + 8 + 4
# Bytes of the longest header that is read: more than 100,000 shards need.
MAX_HEADER = 64 << 20

Arrays = Mapping[str, np.ndarray]


class Place(NamedTuple):
    """The type, the shape and the first byte of an array in a file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


class ArrayFileError(ValueError):
    """A file of arrays that cannot be used; the message gives the reason without the path."""


def write_arrays(path: str | os.PathLike, kind: str, version: int, meta: Mapping[str, Any], arrays: Arrays) -> None:
    """Write a file atomically.

    Args:
        path: the file to write; its folder must exist.
        kind, version: what `read_arrays` must ask for.
        meta: anything that JSON can represent.
        arrays: by name, of any shape and of a numeric type.

    Raises:
        OSError: the file cannot be written.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = _make_header(kind, version, dict(meta), arrays)
    with replacing(Path(path)) as file:
        file.write(MAGIC + len(header).to_bytes(8, "little") + zlib.crc32(header).to_bytes(4, "little") + header)
        for array in arrays.values():
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            file.write(array.data)


def _make_header(kind: str, version: int, meta: dict, arrays: Arrays) -> bytes:
    """Return the header; the offsets depend on its length, so it is padded to the length with the largest offsets."""
    places = {name: [array.dtype.str, array.shape, 1 << 60] for name, array in arrays.items()}
    header = {"kind": kind, "version": version, "size": 1 << 60, "meta": meta, "arrays": places}
    length = len(json.dumps(header))
    end = FIXED + length
    for name, array in arrays.items():
        offset = end + -end % ALIGNMENT
        places[name][2] = offset
        end = offset + array.nbytes
    return json.dumps({**header, "size": end}).encode().ljust(length)


def read_arrays(
    path: str | os.PathLike, kind: str, version: int | tuple[int, ...]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the meta and the arrays of a file, read-only and memory-mapped: only the header is read here.

    Raises:
        ArrayFileError: the file has another format, kind or version, or is truncated or corrupt.
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        meta, places = read_header(file, os.fstat(file.fileno()).st_size, kind, version)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:  # frombuffer refuses objects and places outside of the file
        return meta, {
            name: np.frombuffer(mapped, at.dtype, math.prod(at.shape), at.offset).reshape(at.shape)
            for name, at in places.items()
        }
    except (ValueError, TypeError, OverflowError) as error:
        raise ArrayFileError(f"has an invalid header: {error}") from error


def read_header(
    file: IO[bytes], size: int, kind: str, version: int | tuple[int, ...]
) -> tuple[dict[str, Any], dict[str, Place]]:
    """Return the meta, whose content is unchecked, and the places of the arrays of a file of `size` bytes.

    `version` is the expected version, or several.

    Raises:
        ArrayFileError: the header has another kind or version, or is invalid.
    """
    length, checksum = read_fixed(file.read(FIXED), size)
    text = file.read(length)
    if len(text) != length or zlib.crc32(text) != checksum:
        raise ArrayFileError("has a corrupt header")
    versions = version if isinstance(version, tuple) else (version,)
    try:
        header = parse_json(text)
        found, expected, meta = (header["kind"], header["version"]), header["size"], dict(header["meta"])
        places = {name: Place(np.dtype(at[0]), tuple(at[1]), at[2]) for name, at in header["arrays"].items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArrayFileError(f"has an invalid header: {error}") from error
    if found[0] != kind or found[1] not in versions:
        of = f"{str(found[0])[:40]} of version {str(found[1])[:9]}"
        raise ArrayFileError(f"is {of}, not {kind} of version {versions[0]}")
    if size != expected:
        raise ArrayFileError(f"has {counted(size, 'byte')}, expected {expected!s:.20}: it is truncated or corrupt")
    return meta, places


def read_fixed(fixed: bytes, size: int) -> tuple[int, int]:
    """Return the length and the CRC-32 of the header from the first bytes of a file; raises ArrayFileError."""
    if len(fixed) < FIXED or not fixed.startswith(MAGIC):
        raise ArrayFileError("is not a file of arrays, or is truncated")
    length = int.from_bytes(fixed[8:16], "little")
    if length > min(size - FIXED, MAX_HEADER):
        raise ArrayFileError("is truncated or corrupt")
    return length, int.from_bytes(fixed[16:FIXED], "little")


def checksum_of(arrays: Arrays) -> int:
    """Return the CRC-32 of all arrays, in the order of their names."""
    checksum = 0
    for name in sorted(arrays):
        checksum = zlib.crc32(np.ascontiguousarray(arrays[name]).view(np.uint8).data, checksum)
    return checksum


def pack_names(prefix: str, names: Sequence[bytes]) -> dict[str, np.ndarray]:
    """Return names as PREFIX_bytes, uint8 (total,), and PREFIX_offsets, int64 (len(names) + 1,), of their starts."""
    lengths = np.fromiter(map(len, names), np.int64, len(names))
    offsets = np.concatenate([[0], lengths.cumsum()])
    return {f"{prefix}_bytes": np.frombuffer(b"".join(names), np.uint8), f"{prefix}_offsets": offsets}


def packed_name(arrays: Arrays, prefix: str, index: int) -> str:
    """Return name `index` of `pack_names` as text."""
    return name_at(arrays[f"{prefix}_bytes"], arrays[f"{prefix}_offsets"], index)
