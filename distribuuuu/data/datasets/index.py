"""The index of the images of a split: where each image is, and its targets; and the data sets that have one.

A source of images scans its files once. The index is stored in one file of the user's cache folder. Later runs map that
file into memory, without an object for each image, as long as no scanned file or folder has changed.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distribuuuu.config.errors import counted, first_few
from distribuuuu.data.datasets.array_file import (
    NUM_THREADS,
    Content,
    checksum_of,
    find_stamp,
    read_arrays,
    write_arrays,
)
from distribuuuu.data.datasets.base import SplitDataset, packed_name
from distribuuuu.files.image_files import EXTENSIONS
from distribuuuu.files.locks import take_turn
from distribuuuu.files.untrusted import untrusted

if TYPE_CHECKING:
    import numpy as np

# A file modified this shortly before the scan may change again without a new time: file systems have coarse clocks.
YOUNG_NS = 2_000_000_000
KIND, VERSION = "image index", 1
# What the digest leaves out: it does not change when equal files are copied or packed again.
_NOT_IN_DIGEST = ("stamps", "offset", "packed", "crc32")
_logger = logging.getLogger(__name__)


class Index:
    """The images of a split.

    Args:
        root: the folder that the names of files are relative to.
        meta: `classes`, their names; `notes` and `ignored`, what the scan left out, in words and by the endings of
            files; `num_beside`, images outside of class folders; `scanned`, its time in ns.
        arrays: `files_*`, see `pack_names`: folders of image files, or archives; `stamps`, int64 (F, 3), of each. By
            image: `file`, the number of its folder or archive; `names_*`; in archives `offset`, `size`, `packed` (0:
            stored as it is) and `crc32` (0: unknown). `label`, one by image; with `label_offsets`, any number.
        path: the file that the arrays are mapped from; None: they are in memory.
    """

    def __init__(self, source: str, root: str, meta: dict, arrays: "dict[str, np.ndarray]", path: Path | None = None):
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
        num = len(self.arrays[f"{prefix}_offsets"]) - 1
        return tuple(packed_name(self.arrays, prefix, number) for number in range(num))

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
        newest = self.arrays["stamps"][:, 1].max(initial=0)
        return self.has_current_stamps() and newest <= self.meta["scanned"] - YOUNG_NS

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

    def __reduce__(self):
        # A copy opens its own archives.
        return Index, (self.source, self.root, self.meta, self.arrays, self.path)


def digest_of(meta: dict, arrays: "dict[str, np.ndarray]") -> str:
    """Return 128 bits of a SHA-256 of the classes, and of names, labels and stored sizes, in hexadecimal digits."""
    import numpy as np

    found = hashlib.sha256(json.dumps(meta["classes"]).encode())
    for name in sorted({*arrays}.difference(_NOT_IN_DIGEST)):
        found.update(name.encode())
        found.update(np.ascontiguousarray(arrays[name]).view(np.uint8).data)
    return found.hexdigest()[:32]


# ----------------------------------------------------------------------------------- stored indexes

# The indexes that this process has opened, by their files: each is opened several times in a start.
_opened: dict[tuple, Index] = {}


def open_index(source: str, root: str, name: str, cache: Path, scan: Callable[[], Content]) -> Index:
    """Return the index of a source from its file if that is current, otherwise from a new scan that is stored.

    Of several processes one scans, and the others wait for its result.

    Args:
        source: the name in messages.
        name: of the index among those of the folder, with all that the content depends on besides the files.
    """
    words = f"{os.path.realpath(root)}\0{name}".encode("utf-8", "surrogateescape")
    path = cache / "index" / f"{hashlib.sha256(words).hexdigest()[:32]}.bin"
    if (index := _opened.get((path, root))) is not None and index.has_current_stamps():
        return index
    if len(_opened) > 8:
        _opened.clear()
    _opened[path, root] = index = _open(source, root, path, scan)
    return index


def _open(source: str, root: str, path: Path, scan: Callable[[], Content]) -> Index:
    stamp = find_stamp(path)
    index = _load(source, root, path)
    if index is not None and index.is_current():
        _logger.info("%s: %s, from %s", source, index.count(), path)
        return index
    content, start, reason = None, time.monotonic(), "the file written cannot be read"
    try:
        with take_turn(path) as now_ns:
            # Another process has scanned meanwhile. Its index is used even if a folder has changed since: all
            # processes of a run must see the same images.
            if find_stamp(path) != stamp and (index := _load(source, root, path)):
                _logger.info("%s: %s, from %s of another process", source, index.count(), path)
                return index
            content = _sealed(scan(), now_ns)
            write_arrays(path, KIND, VERSION, *content)
    except OSError as error:
        reason = error.strerror or str(error)
    seconds = f"scanned in {time.monotonic() - start:.1f} s"
    # Mapped from its file, the index shares its memory with other processes.
    if content is not None and (index := _load(source, root, path)) is not None:
        _logger.info("%s: %s, %s, stored in %s", source, index.count(), seconds, path)
        return index
    _logger.warning("%s is scanned at every start, since its index cannot be stored: %s: %s", source, path, reason)
    return Index(source, root, *(content or _sealed(scan(), time.time_ns())))


def _sealed(content: Content, now_ns: int) -> Content:
    """Return the content of a scan with its time, the digest and the checksum."""
    meta, arrays = content
    return {**meta, "scanned": now_ns, "digest": digest_of(meta, arrays), "crc32": checksum_of(arrays)}, arrays


def _load(source: str, root: str, path: Path) -> Index | None:
    """Return the index in a file, even if it is stale; None if the file is missing or cannot be used."""
    try:
        with untrusted(path, "index"):
            meta, arrays = read_arrays(path, KIND, VERSION)
            if meta["crc32"] != checksum_of(arrays):
                raise ValueError("its checksum does not match")
            return Index(source, root, meta, arrays, path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _logger.warning("%s is not used: %s; %s is scanned", path, error, source)
        return None


# -------------------------------------------------------------------------- data sets of an index


class IndexedImages(SplitDataset):
    """The images of an index; a source defines `open_split`.

    Args:
        classes: those of the training images, of which the index may lack some; None: those of the index.
        order: the images of the index that the set has, int (N,); None: all.
        labels: the class of each of them, int (N,); None: those of the index.
    """

    labels: Any
    # Whether a message on unknown classes names an image that has one.
    names_places = False

    def __init__(
        self,
        index: Index,
        classes: Sequence[str] | None = None,
        order: "np.ndarray | None" = None,
        labels: "np.ndarray | None" = None,
    ):
        self.index, self._order, self._notes = index, order, list[str]()
        self.has_files, self.holds_files = not index.is_archive, index.is_archive
        self.classes = index.classes if classes is None else tuple(classes)
        self.labels = index.arrays["label"] if labels is None else labels
        if labels is None and self.classes != index.classes:
            from distribuuuu.data.datasets.targets import match_labels

            self.labels, self._notes = match_labels(self)

    def __len__(self) -> int:
        return len(self.index) if self._order is None else len(self._order)

    def place(self, index: int) -> int:
        """Return the number of image `index` in the index."""
        if not 0 <= index < len(self):
            raise IndexError(f"no image {index} among {len(self)}")
        return index if self._order is None else int(self._order[index])

    def describe(self, index: int) -> str:
        """Return the file of image `index`, or its archive and its name in it."""
        return self.index.describe(self.place(index))

    def notes(self) -> list[str]:
        """Return warnings about files that were left out, and about class names of another Unicode form."""
        return [*self.index.notes(), *self._notes]

    @property
    def digest(self) -> str:
        """The digest of classes, names, sizes and labels; see `ImageDataset.digest`."""
        import numpy as np

        own = self.index.meta.get("digest") or digest_of(self.index.meta, self.index.arrays)
        order = {} if self._order is None else {"order": np.asarray(self._order), "labels": np.asarray(self.labels)}
        return digest_of({"classes": [own, *self.classes]}, order)


def open_folder(root: str | os.PathLike, split: str, cache: Path, extensions: tuple[str, ...] = EXTENSIONS) -> Index:
    """Return the index of ROOT/SPLIT; if the folder does not exist, it is empty. See `open_index`."""
    folder = str(Path(root) / split)

    def scan() -> Content:
        from distribuuuu.data.datasets.folder_scan import scan_folder

        return scan_folder(folder, extensions)

    if not os.path.isdir(folder):
        return Index(folder, folder, *scan())
    return open_index(folder, folder, f"folder {extensions}", cache, scan)
