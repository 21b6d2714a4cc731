"""Format of packed images: a few large files and an index, written so that a kill at any time leaves no invalid pack.

    shard-00000.bin   64 bytes: magic, version, format, number of the shard, checksum of its source and options; then
                      the records of its images without gaps
    index.bin         the rows of all shards; written last, so a pack without it is incomplete

A record is the bytes of an image file (format jpeg) or uint8 pixels (H, W, 3) (format raw).
"""

import json
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.data.datasets.array_file import Arrays, read_arrays
from distribuuuu.files.untrusted import InvalidFileError, untrusted

KIND, VERSION = "packed images", 1
FORMATS = ("jpeg", "raw")
INDEX = "index.bin"
# Columns of the index besides the names: the position of a record, and its contents.
COLUMNS = {
    "shard": np.int32, "offset": np.int64, "length": np.int64, "label": np.int32,
    "height": np.int32, "width": np.int32, "crc32": np.uint32,
}  # fmt: skip
HEADER_SIZE = 64
# Bytes of the largest image, which is read as a whole, and of the largest shard.
MAX_RECORD, _MAX_SHARD = 1 << 30, 1 << 50
FOREIGN_SHARD = "does not belong to this pack, or its header is corrupt; pack the data again"
_HEADER = struct.Struct("<8sI8sII")
_MAGIC = b"DUSHARD\0"
# The source and the options of a pack: two dicts that JSON can represent, under "options" and "source".
Identity = Mapping[str, Mapping[str, Any]]
Meta = dict[str, Any]


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05d}.bin"


def shard_header(number: int, identity: Identity) -> bytes:
    """Return the first bytes of a shard; the checksum distinguishes the shards of two packs."""
    parts = {key: dict(identity[key]) for key in ("options", "source")}
    checksum = zlib.crc32(json.dumps(parts, sort_keys=True).encode())
    kind = identity["options"]["format"].encode()
    return _HEADER.pack(_MAGIC, VERSION, kind, number, checksum).ljust(HEADER_SIZE, b"\0")


def read_index(folder: Path) -> tuple[Meta, dict[str, np.ndarray]]:
    """Return the meta and the columns of a pack, whose shards exist; raise ConfigError with all of its problems."""
    meta, columns = read_index_file(folder)
    if problems := list(find_shard_problems(folder, meta)):
        raise ConfigError(problems)
    return meta, columns


def read_index_file(folder: Path, name: str = INDEX) -> tuple[Meta, dict[str, np.ndarray]]:
    """Return the meta and the columns of a pack, whose shards may be missing; raise ConfigError with its problems."""
    path = folder / name
    try:
        with untrusted(path, "pack"):
            meta, columns = read_arrays(path, KIND, VERSION)
            _check_index(meta, columns)
            return meta, columns
    except FileNotFoundError:
        if any(folder.glob("shard-*")):
            message = f"{folder}: packing is not finished: run the same distribuuuu pack command again"
        else:
            message = f"{folder} has no {INDEX}: it is not a packed data set; create one with distribuuuu pack"
        raise ConfigError(message) from None
    except InvalidFileError as error:
        fix = "pack the data again"
        if f"is {KIND} of version 2" in str(error):  # those of earlier previews with other targets than a label
            fix = "it has several labels or targets per image; fix: train from its table and files"
        raise ConfigError(f"{error}; {fix}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _check_index(meta: Meta, columns: Arrays) -> None:
    """Raise an exception if the index of a pack is invalid: it may be untrusted."""
    classes, shards, colors = meta["classes"], meta["shards"], np.array([meta["mean"], meta["std"]], float)
    numbers = [meta["crc32"], meta.get("max_pixels", 0)]
    numbers += [shard[key] for shard in shards for key in ("size", "images")]
    is_valid = (
        0 < len({*classes}) == len(classes)
        and {*map(type, classes)} == {type(meta["crop"])} == {str}
        and colors.ndim == 2
        and colors.shape[1] in (1, 3, meta.get("channels"))
        and (np.abs(colors) < 1e6).all()
        and colors[1].min() >= 1e-6
        and meta["options"]["format"] in FORMATS
        and not meta["source"].get("targets")
        and [shard["name"] for shard in shards] == [shard_name(number) for number in range(len(shards))]
        and all(type(one) is int and 0 <= one < _MAX_SHARD for one in numbers)
    )
    if not is_valid:
        raise ValueError("an invalid class, mean, shard or option")
    num = columns["label"].shape[0]
    shapes: dict[str, tuple[type, tuple[int, ...]]] = {name: (kind, (num,)) for name, kind in COLUMNS.items()}
    shapes |= {"name_offsets": (np.int64, (num + 1,)), "name_bytes": (np.uint8, columns["name_bytes"].shape[:1])}
    for name, (kind, shape) in shapes.items():
        if columns[name].dtype != kind or columns[name].shape != shape:
            raise ValueError(f"invalid column {name}")
    if num:
        _check_rows(meta, columns)


def _check_rows(meta: Meta, columns: Arrays) -> None:
    """Raise ValueError for impossible values among the rows."""
    sizes = np.array([shard["size"] for shard in meta["shards"]], np.int64)
    shard, start, length, label = (columns[name] for name in ("shard", "offset", "length", "label"))
    height, width, ends = columns["height"].astype(np.int64), columns["width"].astype(np.int64), columns["name_offsets"]
    # Records follow each other, as they were packed.
    is_same = shard[1:] == shard[:-1]
    is_valid = (
        (ends[0] == 0 and ends[-1] == len(columns["name_bytes"]) and (np.diff(ends) >= 0).all())
        and (label.min() >= 0 and label.max() < len(meta["classes"]))
        and (shard.min() >= 0 and shard.max() < len(sizes) and (np.diff(shard) >= 0).all())
        and ((start >= HEADER_SIZE) & (0 <= length) & (length <= MAX_RECORD) & (start <= sizes[shard] - length)).all()
        and not (is_same & (start[1:] < start[:-1] + length[:-1])).any()
    )
    if is_valid and meta["options"]["format"] == "raw":
        is_valid = ((height > 0) & (width > 0) & (height * width * 3 == length)).all()
    if not is_valid:
        raise ValueError("a row with an impossible name, label or place")


def find_shard_problems(folder: Path, meta: Meta) -> Iterator[str]:
    """Yield each shard that is missing or has another size."""
    for shard in meta["shards"]:
        path = folder / shard["name"]
        try:
            status = path.stat()
        except OSError as error:
            yield f"{path}: {error.strerror}; it holds {counted(shard['images'], 'image')}: restore it, or pack again"
            continue
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        if size != shard["size"]:
            sizes = f"{counted(size, 'byte')}, expected {shard['size']:,}"
            yield f"{path} has {sizes}: it was truncated or replaced; pack the data again"
