"""Writing packed images: shard after shard, each with a side file of its rows, and the index last.

A packing that was killed goes on after the last shard that has a side file; `pack_file` describes the files.
"""

import contextlib
import os
import re
import zlib
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from distribuuuu.config import ConfigError
from distribuuuu.config.atomic_file import sync_folder
from distribuuuu.config.errors import counted
from distribuuuu.data.datasets.array_file import ArrayFileError, checksum_of, pack_names, read_arrays, write_arrays
from distribuuuu.data.datasets.packed_format import (
    COLUMNS,
    HEADER_SIZE,
    INDEX,
    KIND,
    VERSION,
    Identity,
    find_wrong_meta,
    shard_header,
    shard_name,
)

PART_KIND = "rows of a shard"
_OWN_FILES = re.compile(r"index\.bin|shard-\d+\.(bin|part)|\.(index\.bin|shard-\d+\.part)\.[0-9a-f]+\.tmp")


class Record(NamedTuple):
    """One image as it is stored; height and width of the pixels of format raw, else 0."""

    data: bytes
    crc32: int
    label: int
    height: int
    width: int
    name: bytes


def find_foreign_files(folder: Path) -> list[str]:
    """Return why a folder is not to be packed into, which need not exist: it holds files of something else."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    others = [name for name in names if not _OWN_FILES.fullmatch(name) and not name.startswith(".")]
    return [f"{folder} holds other things already, e.g. {others[0]}; name another folder"] if others else []


def find_conflicts(folder: Path, identity: Identity) -> list[str]:
    """Return why packing cannot go on in a folder: it holds another pack, or one made in another way.

    Args:
        folder: it need not exist.
        identity: as far as it is known.
    """
    try:
        begun = _read_identity(folder)
    except (ArrayFileError, OSError) as error:
        return [f"{folder / INDEX} {error}; name another folder, or add --overwrite to replace it"]
    if begun is None:
        return []
    # An option that is not the default may be missing now.
    options = {**dict.fromkeys(begun["options"]), **identity["options"]}
    differences = [
        f"{key.replace('_', ' ')} {_shown(begun[part].get(key))}, now {_shown(value)}"
        for part, values in {**identity, "options": options}.items()
        for key, value in values.items()
        if begun[part].get(key) != value
    ]
    how = "name another folder, or add --overwrite to start anew"
    return [f"{folder} holds another pack: {'; '.join(differences)}; {how}"] if differences else []


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _read_identity(folder: Path) -> Identity | None:
    """Return what the pack in a folder was made from, None when nothing there tells; an unreadable part tells nothing.

    Raises:
        ArrayFileError: the index cannot be used.
    """
    if (folder / INDEX).exists():
        meta = read_arrays(folder / INDEX, KIND, VERSION)[0]
        if problem := find_wrong_meta(meta):
            raise ArrayFileError(f"has a wrong header: {problem}")
        return meta
    parts = _finished_parts(folder)
    return parts[0][0] if parts else None


def _finished_parts(folder: Path) -> list[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Return the meta and the rows of each finished shard, up to the first that is not whole."""
    parts = []
    with contextlib.suppress(OSError, ArrayFileError, LookupError, TypeError):
        while True:
            path = folder / shard_name(len(parts))
            meta, rows = read_arrays(path.with_suffix(".part"), PART_KIND, VERSION)
            if path.stat().st_size != meta["shard"]["size"]:
                break
            parts.append((meta, rows))
    return parts


def remove_pack(folder: Path) -> None:
    """Delete a pack, whole or not; the index goes first, so that no half pack is ever taken for a whole one."""
    with contextlib.suppress(FileNotFoundError):
        (folder / INDEX).unlink()
    _remove(folder)


def remove_parts(folder: Path) -> None:
    """Delete the side files of a pack that has its index."""
    for path in folder.glob("shard-*.part"):
        path.unlink()


def _remove(folder: Path, but: Container[str] = ()) -> None:
    """Delete the files of a pack, except those of some shards, by their names without the ending."""
    for path in folder.iterdir():
        if _OWN_FILES.fullmatch(path.name) and path.stem not in but:
            path.unlink()


def find_changed_shard(folder: Path, stamp: Callable[[int], tuple[int, ...]]) -> str | None:
    """Return the first finished shard of which a source image was changed in place after it was packed; None: none.

    Args:
        folder: of a pack, whole or not, of the same source images.
        stamp: see `ImageDataset.stamp`.
    """
    if (folder / INDEX).exists():
        shards = read_arrays(folder / INDEX, KIND, VERSION)[0]["shards"]
    else:
        shards = [meta["shard"] for meta, _ in _finished_parts(folder)]
    first = 0
    for shard in shards:
        if "stamps_crc32" not in shard:  # packed by an older version
            return None
        checksum = 0
        for image in range(first, shard["source_end"]):
            checksum = _add_stamp(checksum, stamp(image))
        if checksum != shard["stamps_crc32"]:
            return shard["name"]
        first = shard["source_end"]
    return None


def _add_stamp(checksum: int, stamp: tuple[int, ...]) -> int:
    return zlib.crc32(repr(stamp).encode(), checksum)


class PackWriter:
    """Appends records to shards; goes on after the last finished shard of the same pack, and deletes what follows it.

    As a context, it deletes a shard that is not finished at the end.

    Args:
        folder: it must be there, and hold no other pack (`find_conflicts`) and no index.
        identity: what the pack is made from and how.
        max_bytes: the most that a shard may have; one record it may have in any case.

    Attributes:
        next_image: number of the first image of the source that no finished shard has dealt with.
        num_images, num_bytes, num_skipped: images in the pack, their bytes, and images left out of it.
        shards: of each finished one the name, the size, the number of images, the number of the source's image after
            its last, and a checksum of the stamps of those it was made from.
    """

    def __init__(self, folder: Path, identity: Identity, max_bytes: int):
        self.folder, self.identity, self.max_bytes = folder, identity, max_bytes
        self.next_image = self.num_images = self.num_bytes = self.num_skipped = 0
        self.shards: list[dict[str, Any]] = []
        self._parts = _finished_parts(folder)
        for meta, rows in self._parts:
            self.shards.append(meta["shard"])
            self.next_image = meta["next_image"]
            self.num_images += meta["shard"]["images"]
            self.num_skipped += meta["num_skipped"]
            self.num_bytes += int(rows["length"].sum())
        _remove(folder, but={Path(shard["name"]).stem for shard in self.shards})
        self._file: BinaryIO | None = None
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._names: list[bytes] = []
        self._end, self._num_skipped, self._stamps_crc32 = HEADER_SIZE, 0, 0

    def append(self, image: int, record: Record, stamp: tuple[int, ...]) -> None:
        """Write the record of image `image` of the source, which had that `ImageDataset.stamp`.

        Raises:
            ConfigError: the disk refuses it.
        """
        if self._rows and self._end + len(record.data) > self.max_bytes:
            self._finish_shard(image)
        number, size = len(self.shards), len(record.data)
        with self._disk_errors_told():
            if self._file is None:
                self._file = open(self.folder / shard_name(number), "wb", buffering=1 << 20)
                self._file.write(shard_header(number, self.identity))
            self._file.write(record.data)
        self._rows.append((number, self._end, size, record.label, record.height, record.width, record.crc32))
        self._names.append(record.name)
        self._end += size
        self._stamps_crc32 = _add_stamp(self._stamps_crc32, stamp)
        self.num_images += 1
        self.num_bytes += size

    def skip(self, stamp: tuple[int, ...]) -> None:
        """Count an image that is left out."""
        self._stamps_crc32 = _add_stamp(self._stamps_crc32, stamp)
        self._num_skipped += 1
        self.num_skipped += 1

    def _finish_shard(self, next_image: int) -> None:
        path = self.folder / shard_name(len(self.shards))
        rows = dict(zip(COLUMNS, zip(*self._rows, strict=True), strict=True))
        columns = {name: np.array(rows[name], kind) for name, kind in COLUMNS.items()}
        columns |= {f"name_{part}": array for part, array in pack_names(self._names).items()}
        shard = {"name": path.name, "size": self._end, "images": len(self._rows)}
        shard |= {"source_end": next_image, "stamps_crc32": self._stamps_crc32}
        meta = {**self.identity, "shard": shard, "next_image": next_image, "num_skipped": self._num_skipped}
        with self._disk_errors_told():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            write_arrays(path.with_suffix(".part"), PART_KIND, VERSION, meta, columns)
        self._file = None
        self._parts.append((meta, columns))
        self.shards.append(shard)
        self._begin_shard()

    def finish(self, num_source: int, meta: Mapping[str, Any]) -> None:
        """Write the index and delete the side files.

        Args:
            num_source: images of the source, with those that were left out.
            meta: what the reader has to know beside the rows.

        Raises:
            ConfigError: the disk refuses it.
        """
        if self._rows:
            self._finish_shard(num_source)
        columns = {name: np.concatenate([rows[name] for _, rows in self._parts]) for name in [*COLUMNS, "name_bytes"]}
        lengths = np.concatenate([np.diff(rows["name_offsets"]) for _, rows in self._parts])
        columns["name_offsets"] = np.concatenate([[0], lengths.cumsum()])
        whole = {"shards": self.shards, "num_skipped": self.num_skipped, "crc32": checksum_of(columns)}
        with self._disk_errors_told():
            write_arrays(self.folder / INDEX, KIND, VERSION, {**meta, **self.identity, **whole}, columns)
            sync_folder(self.folder)  # the index is there for good before what could replace it goes
            remove_parts(self.folder)

    def __enter__(self) -> "PackWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        self._abandon()

    def _abandon(self) -> None:
        """Delete the shard that is not finished."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what is still to be written is not wanted any more
                self._file.close()
            with contextlib.suppress(OSError):
                (self.folder / shard_name(len(self.shards))).unlink()
            self._file = None

    @contextlib.contextmanager
    def _disk_errors_told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._abandon()
            rest = f"{counted(len(self.shards), 'finished shard')} kept: make room and run the same command again"
            raise ConfigError(f"{self.folder}: {error.strerror or error}; {rest}") from error
