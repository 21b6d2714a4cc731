"""The index of the images in archives: built in one pass, stored as that of a folder, and memory-mapped by later runs.

An image is read at its place in the archive; nothing is unpacked.
"""

import contextlib
import itertools
import os
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from distribuuuu.config.errors import DataError, counted, first_few
from distribuuuu.data.datasets.archive_members import (
    ArchiveError,
    Member,
    member_error,
    walk_archive,
    walk_tar,
)
from distribuuuu.data.datasets.array_file import pack_names, packed_name
from distribuuuu.data.datasets.folder_index import (
    JUNK_FILES,
    YOUNG_NS,
    Content,
    StoredIndex,
    hash_text,
    index_files,
    open_stored,
)
from distribuuuu.files.image_files import (
    EXTENSIONS,
    JUNK_FOLDERS,
    TRAIN_NAMES,
    file_stamp,
    is_class,
    is_image,
    sort_splits,
)
from distribuuuu.files.untrusted import open_regular, parse_json, printable

# Bytes of the largest image, of the largest file with a label, and the most classes that labels may be numbers of.
MAX_IMAGE, MAX_LABEL, MAX_CLASSES = 1 << 30, 1 << 20, 1 << 20
# Names in the JSON of a shard that may hold the label, in this order.
LABEL_KEYS = ("cls", "label", "class")
# Seconds until the progress bar of a scan appears.
BAR_DELAY_S = 1.0
# Archives that a process keeps open; with more, all are closed.
_MAX_OPEN = 128
_DTYPES = {
    "names_bytes": np.uint8, "names_offsets": np.int64, "archive": np.int32, "offset": np.int64, "size": np.uint32,
    "packed": np.uint32, "label": np.int32, "classes_bytes": np.uint8, "classes_offsets": np.int64,
}  # fmt: skip


class ArchiveSource(NamedTuple):
    """Archives, and what of them is a data set.

    Attributes:
        paths: the archives.
        folder: the folder in the archives with the class folders, if it is the only one at the top; empty: none.
        is_inside: whether `folder` is one of several: the archive holds all splits.
        layout: classes (class folders or shards), tars (an archive of one tar per class), or flat (no classes).
        extensions: those of image files.
    """

    paths: tuple[str, ...]
    folder: str = ""
    is_inside: bool = False
    layout: str = "classes"
    extensions: tuple[str, ...] = EXTENSIONS

    def __str__(self) -> str:
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{self.paths[0]}{more}" + (f", folder {self.folder}" if self.is_inside else "")

    def stamps(self) -> list[list[int]]:
        """Return the size and the modification time of each archive; nothing for one that is missing."""
        return [[*file_stamp(path)] for path in self.paths]


class ArchiveIndex(StoredIndex):
    """The images of archives.

    Args:
        source: the archives.
        meta: the ID of the scan, the time and the stamps of the archives, and what was ignored.
        arrays: by image the name, the number of the archive, the first byte, the size, the packed size (0:
            stored as it is) and the label; and the names of the classes.
        file: see `StoredIndex`.
    """

    kind, version, dtypes, texts = "archive index", 1, _DTYPES, ("names", "classes")

    def __init__(self, source: ArchiveSource, meta: dict, arrays: dict[str, np.ndarray], file: Path | None = None):
        super().__init__(source, meta, arrays, file)
        numbers = range(len(arrays["classes_offsets"]) - 1)
        self.classes = tuple(packed_name(arrays, "classes", number) for number in numbers)
        self._files: dict[int, IO[bytes]] = {}

    def __len__(self) -> int:
        return len(self.arrays["label"])

    def name(self, index: int) -> str:
        """Return the name of image `index` in its archive."""
        return packed_name(self.arrays, "names", index)

    def path(self, index: int) -> str:
        """Return the archive of image `index`."""
        return self.source.paths[self.arrays["archive"][index]]

    def read(self, index: int) -> bytearray:
        """Return the bytes of image `index`.

        Raises:
            DataError: the archive is missing, or has changed since the scan.
            ValueError: the data is corrupt.
        """
        arrays = self.arrays
        size, packed = int(arrays["size"][index]), int(arrays["packed"][index])
        file = self._open(int(arrays["archive"][index]))
        data = os.pread(file.fileno(), packed or size, int(arrays["offset"][index]))
        if len(data) < (packed or size):
            raise DataError(f"{self.path(index)}: is shorter than at the start of the run; fix: start it again")
        return bytearray(_inflate(data, size) if packed else data)

    def _open(self, number: int) -> IO[bytes]:
        """Return an archive, which is opened once in a process; a forked one shares its position-free descriptor."""
        if (file := self._files.get(number)) is None:
            path = self.source.paths[number]
            try:
                file = open_regular(path)
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror}") from error
            status = os.fstat(file.fileno())
            if [status.st_size, status.st_mtime_ns] != self.meta["archives"][number]:
                raise DataError(f"{path}: has changed since the start of the run; fix: start it again")
            if len(self._files) >= _MAX_OPEN:
                self._files = {}  # a thread that reads one still holds it open
            self._files[number] = file
        return file

    def is_current(self) -> bool:
        """Return whether no archive has changed since the scan, nor may have changed right after it."""
        stamps = self.source.stamps()
        return stamps == self.meta["archives"] and max(mtime for _, mtime in stamps) <= self.meta["scanned"] - YOUNG_NS

    def describe(self) -> str:
        """Return the counts, e.g. '4 images in 2 archives'."""
        return f"{counted(len(self), 'image')} in {counted(len(self.source.paths), 'archive')}"

    @classmethod
    def check(cls, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Raise ValueError unless all numbers refer to existing names, classes, archives and bytes."""
        super().check(meta, arrays)
        stamps: Any = meta.get("archives")
        is_list = isinstance(stamps, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in stamps)
        numbers = [meta.get("scanned"), *(number for pair in stamps for number in pair)] if is_list else [None]
        if not all(type(number) is int and number < 1 << 62 for number in numbers):
            raise ValueError("has an invalid header")
        num, sizes = len(arrays["label"]), np.array([size for size, _ in stamps], np.int64)
        limits = {"archive": len(sizes), "label": len(arrays["classes_offsets"]) - 1}
        is_full = all(len(arrays[name]) == num for name in ("archive", "offset", "size", "packed"))
        in_range = all(((arrays[name] >= 0) & (arrays[name] < most)).all() for name, most in limits.items())
        if not is_full or not in_range or len(arrays["names_offsets"]) != num + 1:
            raise ValueError("holds inconsistent numbers")
        if (arrays["offset"] < 0).any() or (_ends_of(arrays) > sizes[arrays["archive"]]).any():
            raise ValueError("holds a place outside of an archive")


def _ends_of(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return the byte after each image in its archive, int64 (N,)."""
    return arrays["offset"] + np.where(arrays["packed"], arrays["packed"], arrays["size"]).astype(np.int64)


@lru_cache(maxsize=4)
def _open_once(source: ArchiveSource, stamps: str, cache: Path, in_root: bool) -> ArchiveIndex:
    root = Path(source.paths[0]).parent
    names = [os.path.relpath(path, root) for path in source.paths]
    words = "\0".join([*names, source.folder, str(source.is_inside), source.layout])
    own = f"archive-{hash_text(words)}.bin"
    files = index_files(root, own, f"{os.path.realpath(root)}\0{words}", cache, in_root)
    return open_stored(ArchiveIndex, source, files, partial(scan_archives, source), source.extensions)


def open_archives(source: ArchiveSource, cache: Path, in_root: bool = True) -> ArchiveIndex:
    """Return the index of archives from its file if that is current, otherwise from a new scan that is stored.

    Of several processes one scans, and the others wait for its result. A process opens unchanged archives once.

    Args:
        source: the archives.
        cache: the folder for an index that cannot be stored beside the first archive.
        in_root: whether it may be stored there.

    Raises:
        ArchiveError: an archive is missing or cannot be used, or a name or a label is invalid.
    """
    return _open_once(source, str(source.stamps()), cache, in_root)


# ---------------------------------------------------------------------------------------- scanning


def scan_archives(source: ArchiveSource, now_ns: int) -> Content:
    """Return the meta and the arrays of an `ArchiveIndex`; each archive is read once, in the order of its bytes.

    Images in class folders are ordered by class, then path of the folder, then name, as in a `FolderIndex`; those of
    shards by archive and place. Hidden files and files of operating systems are ignored.

    Args:
        source: the archives.
        now_ns: the time by the clock of their file system.

    Raises:
        ArchiveError: see `open_archives`.
    """
    from tqdm import tqdm

    found, stamps, done = _Found(source), source.stamps(), 0
    total = sum(stamp[0] for stamp in stamps if stamp)
    is_hidden = sys.stderr is None or not sys.stderr.isatty()
    with tqdm(total=total, desc=f"index of {source}", unit="B", unit_scale=True, leave=False, disable=is_hidden,
              delay=BAR_DELAY_S) as bar:  # fmt: skip
        for number, path in enumerate(source.paths):
            try:
                with open_regular(path) as file:
                    status = os.fstat(file.fileno())
                    stamps[number] = [status.st_size, status.st_mtime_ns]
                    for member in _list_members(path, file, status.st_size, source.layout):
                        found.add(number, member, file)
                        bar.update(done + member.offset - bar.n)
                    done += status.st_size
            except OSError as error:
                raise ArchiveError(f"{path}: cannot be read: {error.strerror}") from error
    arrays = found.to_arrays()
    ignored = {"ignored": dict(found.ignored), "num_beside": found.num_beside}
    return {**ignored, "archives": stamps, "scanned": now_ns}, arrays


def _inflate(data: bytes, size: int) -> bytes:
    """Return deflated data of `size` bytes; never more is decompressed, whatever the data is."""
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        content = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"the archive is corrupt: {error}") from error
    if len(content) != size:
        raise ValueError(f"the archive declares {size:,} bytes, but holds {'more' if len(content) > size else 'fewer'}")
    return content


def _list_members(path: str, file: IO[bytes], size: int, layout: str) -> Iterator[Member]:
    """Yield the files of an archive; for `tars`, those of the tars in it, each in a folder with the name of its tar."""
    for member in [*walk_archive(path, file, size)] if layout == "tars" else ():
        if member.name.endswith(".tar") and not (member.fault or member.packed):
            folder = os.path.basename(member.name)[: -len(".tar")]
            for inner in walk_tar(f"{path}:{printable(member.name)}", file, member.offset, member.offset + member.size):
                yield inner._replace(name=f"{folder}/{inner.name}")
    if layout != "tars":
        yield from walk_archive(path, file, size)


class _Found:
    """The images and the labels that a scan has found."""

    def __init__(self, source: ArchiveSource):
        self.source, self.num_beside = source, 0
        self.ignored: Counter[str] = Counter()
        self._cleaned: dict[str, str | None] = {}
        self._names: list[str] = []
        self._columns = {"archive": array("i"), "offset": array("q"), "size": array("I"), "packed": array("I")}
        # The folder of each image; and the label of each (archive, name without its extensions), None: it has none.
        self._folders: list[str] = []
        self._labels: dict[tuple[int, str], int | str | None] = {}
        self._has_cls = False

    def add(self, number: int, member: Member, file: IO[bytes]) -> None:
        """Add a member of archive `number`, unless it is hidden; raise ArchiveError if it cannot be used."""
        path = self.source.paths[number]
        raw, _, name = member.name.rpartition("/")
        if raw not in self._cleaned or "\0" in member.name or member.name[:1] == "/":
            self._cleaned[raw] = _clean_folder(raw, member, path)
        folder = self._cleaned[raw]
        if folder is None or name[:1] == ".":
            return
        if is_image(name, self.source.extensions):
            if member.fault or max(member.size, member.packed) > MAX_IMAGE:
                too_large = f"has {member.size:,} bytes; expected at most {MAX_IMAGE:,}"
                raise member_error(path, member.name, member.fault or too_large)
            self._folders.append(folder)
            self._names.append(name)
            for column, value in zip(self._columns.values(), (number, *member[1:4]), strict=True):
                column.append(value)
        elif name.lower() not in JUNK_FILES:
            self.ignored[os.path.splitext(name)[1].lower()] += 1
            if name.endswith((".cls", ".json")):
                self._add_label((number, f"{folder}/{name.partition('.')[0]}"), member, file)

    def _add_label(self, key: tuple[int, str], member: Member, file: IO[bytes]) -> None:
        label = None
        with contextlib.suppress(ValueError):  # an image without a label is an error, another file is not
            if not member.fault and max(member.size, member.packed) <= MAX_LABEL:
                data = os.pread(file.fileno(), member.packed or member.size, member.offset)
                label = _read_label(_inflate(data, member.size) if member.packed else data, member.name)
        if member.name.endswith(".cls"):
            self._has_cls, self._labels[key] = True, label
        else:
            self._labels.setdefault(key, label)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of an `ArchiveIndex`; raise ArchiveError if there is no image, or one without a label."""
        # A .json beside an image may be an annotation: it is a label if no folder can be one.
        has_json = len(set(self._folders)) == 1 and any(label is not None for label in self._labels.values())
        is_shards = self.source.layout == "classes" and (self._has_cls or has_json)
        order, labels, classes = self._order_shards() if is_shards else self._order_folders()
        if not len(order):
            beside = f"; {counted(self.num_beside, 'image')} at the top have no class" if self.num_beside else ""
            expected = "expected CLASS/IMAGE, or IMAGE with its label in .cls or .json"
            raise ArchiveError(f"{self.source}: has no images in class folders{beside}; {expected}")
        columns = {name: np.frombuffer(column, _DTYPES[name])[[*order]] for name, column in self._columns.items()}
        names = [os.fsencode(self._name_of(image)) for image in order]
        arrays = {**pack_names("names", names), **columns, "label": np.array(labels, np.int32),
                  **pack_names("classes", [os.fsencode(name) for name in classes])}  # fmt: skip
        self._check_overlaps(arrays)
        return arrays

    def _name_of(self, image: int) -> str:
        return f"{self._folders[image]}/{self._names[image]}".lstrip("/")

    def _error(self, image: int, problem: str) -> ArchiveError:
        return member_error(self.source.paths[self._columns["archive"][image]], self._name_of(image), problem)

    def _order_folders(self) -> tuple[list[int], list[int], list[str]]:
        """Return the images in the order of a folder index, with their labels and the classes."""
        start, is_flat = self._find_start(), self.source.layout == "flat"
        inner = {folder: folder[len(start) :] for folder in set(self._folders) if f"{folder}/".startswith(start)}
        top_of = {folder: path.partition("/")[0] for folder, path in inner.items()}
        kept = {folder: top for folder, top in top_of.items() if is_flat or (top and is_class(top))}
        self.num_beside = 0 if is_flat else sum(top_of.get(folder) == "" for folder in self._folders)
        keys = [(kept.get(folder, ""), folder, name) for folder, name in zip(self._folders, self._names, strict=True)]
        order = sorted((image for image, key in enumerate(keys) if key[1] in kept), key=keys.__getitem__)
        for one, other in itertools.pairwise(order):
            if keys[one] == keys[other]:
                raise self._error(other, "has two members of this name; fix: pack the files again, each once")
        classes = sorted(set(kept.values()))
        if not self.source.is_inside and len(classes) == len(sort_splits(classes)) > 1:
            path = self.source.paths[0]
            raise ArchiveError(f"{path}: has the splits {', '.join(classes)}, no classes; fix: set DATASET {path}")
        numbers = {name: number for number, name in enumerate(classes)}
        return order, [numbers[keys[image][0]] for image in order], classes

    def _find_start(self) -> str:
        """Return the folder that holds the class folders, with a slash, or nothing."""
        folders = set(self._folders)
        chosen, tops = self.source.folder, {folder.partition("/")[0] for folder in folders}
        if not self.source.is_inside and tops != {chosen}:
            return ""
        start = f"{chosen}/"
        if any(f"{folder}/".startswith(start) for folder in folders):
            return start
        deeper = {f"{name}/".partition(f"/{start}")[0] for name in folders if f"/{start}" in f"{name}/"}
        fitting = [name for name in sort_splits(tops) if (name.lower() in TRAIN_NAMES) == (chosen in TRAIN_NAMES)]
        named = [f"{name}/{chosen}" for name in sorted(deeper)] or fitting
        fix = f"; fix: set SPLIT {named[0]}" if named else ""
        if not named and not sort_splits(tops):
            fix = "; fix: an archive with a folder for each split, or unpack it, and see distribuuuu split --help"
        raise ArchiveError(f"{self.source.paths[0]}: has no folder {chosen}; it has {first_few(sorted(tops))}{fix}")

    def _order_shards(self) -> tuple[range, list[int], list[str]]:
        """Return the images in the order of the shards, with their labels and the classes."""
        seen: set[tuple[int, str]] = set()
        found: list[int | str] = []
        for image, (folder, name) in enumerate(zip(self._folders, self._names, strict=True)):
            key = self._columns["archive"][image], f"{folder}/{name.partition('.')[0]}"
            if key in seen:
                raise self._error(image, "is a second image of its sample")
            if (label := self._labels.get(key)) is None:
                expected = f"expected a .cls with a class, or a .json with {' or '.join(LABEL_KEYS)}"
                raise self._error(image, f"has no label; {expected}")
            seen.add(key)
            found.append(label)
        for ending in (".cls", ".json"):
            del self.ignored[ending]
        order, values = range(len(found)), [label for label in found if isinstance(label, int)]
        if len(values) == len(found) and (highest := max(values, default=0)) < MAX_CLASSES:
            return order, values, [*map(str, range(highest + 1))]
        classes = sorted({*map(str, found)})
        numbers = {name: number for number, name in enumerate(classes)}
        return order, [numbers[str(label)] for label in found], classes

    def _check_overlaps(self, arrays: dict[str, np.ndarray]) -> None:
        """Raise ArchiveError if two images share bytes: a small ZIP that pretends to hold more than it does."""
        order = np.lexsort((arrays["offset"], arrays["archive"]))
        archive, start, end = arrays["archive"][order], arrays["offset"][order], _ends_of(arrays)[order]
        if len(wrong := np.flatnonzero((archive[1:] == archive[:-1]) & (start[1:] < end[:-1]))):
            index = order[wrong[0] + 1]
            path, name = self.source.paths[arrays["archive"][index]], packed_name(arrays, "names", index)
            raise member_error(path, name, "shares bytes with another member; fix: pack the archive again")


def _clean_folder(raw: str, member: Member, path: str) -> str | None:
    """Return a folder of an archive without empty parts; None: it is one of an operating system.

    Raises:
        ArchiveError: it leads out of the archive.
    """
    parts = [part for part in raw.split("/") if part not in ("", ".")]
    if member.name[:1] == "/" or ".." in parts or "\0" in member.name:
        raise member_error(path, member.name, "leads out of the archive; fix: pack it again with relative names")
    return None if any(part.lower() in JUNK_FOLDERS for part in parts) else "/".join(parts)


def _read_label(data: bytes, name: str) -> int | str | None:
    """Return the class in a .cls or a .json of a shard, a number or a name; None: it has none."""
    if name.endswith(".cls"):
        value: Any = data.decode("utf-8").strip()
        value = int(value) if value.isdecimal() and len(value) < 10 else value
    else:
        value = parse_json(data)
        value = next((value[key] for key in LABEL_KEYS if key in value), None) if isinstance(value, dict) else None
    is_name = isinstance(value, str) and 0 < len(value) < 300 and value.isprintable()
    return value if is_name or (type(value) is int and value >= 0) else None
