"""Writer of packed images: shards with a side file of rows each, then the index.

After a kill, packing resumes after the last shard that has a side file; see `packed_format` for the files.
"""

import contextlib
import os
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.data.datasets.array_file import ArrayFileError, checksum_of, pack_names, read_arrays, write_arrays
from distribuuuu.data.packed.format import (
    COLUMNS,
    HEADER_SIZE,
    INDEX,
    KIND,
    VERSION,
    VERSIONS,
    Identity,
    read_index_file,
    shard_header,
    shard_name,
)
from distribuuuu.files.atomic_file import open_for_writing, sync_folder

PART_KIND = "rows of a shard"
DEFAULT_QUALITY = 90
_OWN_FILES = re.compile(r"index\.bin|shard-\d+\.(bin|part)|\.(index\.bin|shard-\d+\.part)\.[0-9a-f]+\.tmp")


class Record(NamedTuple):
    """An image as it is stored; height and width are those of the pixels of format raw, else 0.

    `hot` are several labels, a bit for each class; the label is then 0.
    """

    data: bytes
    crc32: int
    label: int
    height: int
    width: int
    name: bytes
    hot: np.ndarray | None = None


def find_foreign_files(folder: Path) -> list[str]:
    """Return a problem if a folder holds files that are not of a pack; it need not exist."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    foreign = [name for name in names if not _OWN_FILES.fullmatch(name) and not name.startswith(".")]
    return [f"{folder} holds other files, e.g. {foreign[0]}; use another folder"] if foreign else []


def find_conflicts(folder: Path, identity: Identity) -> list[str]:
    """Return a problem if a folder holds a pack of another source or with other options.

    Args:
        folder: it need not exist.
        identity: the known part of it.
    """
    try:
        has_index = (folder / INDEX).exists()
        parts = [] if has_index else _finished_parts(folder)
        existing: Identity | None = read_index_file(folder)[0] if has_index else parts[0][0] if parts else None
    except ConfigError as error:
        return [f"{error}; or use another folder, or add --overwrite to replace it"]
    if existing is None:
        return []
    before, now = ({**one["options"], **one["source"]} for one in (existing, identity))
    keys = dict.fromkeys([*now, *existing["options"]])  # an option may be present only if it is not the default
    changed = [key for key in keys if before.get(key) != now.get(key)]
    differences = [f"{key.replace('_', ' ')} {before.get(key)}, now {now.get(key)}" for key in changed]
    fix = "use another folder, or add --overwrite to start again"
    return [f"{folder} holds another pack: {'; '.join(differences)}; {fix}"] if differences else []


def _finished_parts(folder: Path) -> list[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Return the meta and the rows of each finished shard, up to the first that is incomplete."""
    parts: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = []
    with contextlib.suppress(OSError, ArrayFileError):
        while True:
            path = folder / shard_name(len(parts))
            meta, rows = read_arrays(path.with_suffix(".part"), PART_KIND, VERSION)
            if path.stat().st_size != meta["shard"]["size"]:
                break
            parts.append((meta, rows))
    return parts


def remove_files(folder: Path, keep: Container[str] = ()) -> None:
    """Delete the files of a pack, except those of the shards with the stems `keep`.

    The index goes first, so that no incomplete pack has one.
    """
    for path in sorted(folder.iterdir(), key=lambda path: path.name != INDEX):
        if _OWN_FILES.fullmatch(path.name) and path.stem not in keep:
            path.unlink()


def remove_parts(folder: Path) -> None:
    """Delete the side files of a pack that has its index."""
    for path in folder.glob("shard-*.part"):
        path.unlink()


class PackWriter:
    """Appends records to the shards of a folder, whose unfinished shard the next writer deletes.

    Args:
        folder: an existing folder without an index; finished shards are kept.
        identity: the source and options of the pack.
        max_bytes: the maximum size of a shard with more than one record.

    Attributes:
        next_image: index of the first source image after the finished shards.
    """

    def __init__(self, folder: Path, identity: Identity, max_bytes: int):
        self.folder, self.identity, self.max_bytes = folder, identity, max_bytes
        self._parts = _finished_parts(folder)
        self.next_image = self._parts[-1][0]["next_image"] if self._parts else 0
        remove_files(folder, keep={Path(shard["name"]).stem for shard in self.shards})
        self._file: IO | None = None
        self._start_shard()

    @property
    def shards(self) -> list[dict[str, Any]]:
        """For each finished shard its name, size and number of images."""
        return [meta["shard"] for meta, _ in self._parts]

    @property
    def num_skipped(self) -> int:
        """The number of broken images that are left out."""
        return sum(meta["num_skipped"] for meta, _ in self._parts) + self._num_skipped

    def _start_shard(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._hot: list[np.ndarray] = []
        self._names: list[bytes] = []
        self._end, self._num_skipped = HEADER_SIZE, 0

    def append(self, image: int, record: Record) -> None:
        """Write the record of source image `image`."""
        if self._rows and self._end + len(record.data) > self.max_bytes:
            self._finish_shard(image)
        number, size = len(self._parts), len(record.data)
        if self._file is None:
            self._file = open_for_writing(self.folder / shard_name(number), "wb", buffering=1 << 20)
            self._file.write(shard_header(number, self.identity))
        self._file.write(record.data)
        self._rows.append((number, self._end, size, record.label, record.height, record.width, record.crc32))
        self._names.append(record.name)
        if record.hot is not None:
            self._hot.append(record.hot)
        self._end += size

    def skip(self) -> None:
        """Count an image that is left out."""
        self._num_skipped += 1

    def _finish_shard(self, next_image: int) -> None:
        assert self._file is not None
        path = self.folder / shard_name(len(self._parts))
        rows = dict(zip(COLUMNS, zip(*self._rows, strict=True), strict=True))
        columns = {name: np.array(rows[name], kind) for name, kind in COLUMNS.items()}
        columns |= pack_names("name", self._names)
        if self._hot:
            columns["target_0"] = np.stack(self._hot)
        shard = {"name": path.name, "size": self._end, "images": len(self._rows)}
        meta = {**self.identity, "shard": shard, "next_image": next_image, "num_skipped": self._num_skipped}
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        write_arrays(path.with_suffix(".part"), PART_KIND, VERSION, meta, columns)
        self._file = None
        self._parts.append((meta, columns))
        self._start_shard()

    def finish(self, num_source: int, meta: Mapping[str, Any]) -> None:
        """Write the index and delete the side files.

        Args:
            num_source: number of source images, including those left out.
            meta: what the reader needs besides the rows.

        Raises:
            ConfigError: no image has been appended.
        """
        if self._rows:
            self._finish_shard(num_source)
        if not self._parts:
            raise ConfigError(f"{self.folder}: no image can be read ({counted(num_source, 'image')})")
        names = [name for name in self._parts[0][1] if name != "name_offsets"]
        columns = {name: np.concatenate([rows[name] for _, rows in self._parts]) for name in names}
        lengths = np.concatenate([np.diff(rows["name_offsets"]) for _, rows in self._parts])
        columns["name_offsets"] = np.concatenate([[0], lengths.cumsum()])
        counts = {"shards": self.shards, "num_skipped": self.num_skipped, "crc32": checksum_of(columns)}
        version = VERSIONS["target_0" in columns]
        write_arrays(self.folder / INDEX, KIND, version, {**meta, **self.identity, **counts}, columns)
        sync_folder(self.folder)  # the index is durable before the side files are deleted
        remove_parts(self.folder)
