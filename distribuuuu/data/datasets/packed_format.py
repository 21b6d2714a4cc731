"""Packed images: a few large files and an index, written so that a kill at any moment leaves nothing half-believed.

    shard-00000.bin   64 bytes: magic, version, format, number of the shard, checksum of what it was made from and how;
                      then the records of its images, back to back
    shard-00000.part  the rows of a finished shard, for as long as there is no index
    index.bin         the rows of all shards; it is written last, and makes a pack of what would be a heap of shards

A record is the bytes of an image file (format jpeg) or uint8 pixels (H, W, 3) (format raw).
"""

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.data.datasets.array_file import ArrayFileError, checksum_of, name_at, read_arrays

KIND, VERSION = "packed images", 1
FORMATS = ("jpeg", "raw")
INDEX = "index.bin"
# Columns of the index beside the names: the place of a record, and what it is.
COLUMNS = {
    "shard": np.int32, "offset": np.int64, "length": np.int64, "label": np.int32,
    "height": np.int32, "width": np.int32, "crc32": np.uint32,
}  # fmt: skip
HEADER_SIZE = 64
FOREIGN_SHARD = "is not of this pack, or its header is damaged; pack the data again"
_HEADER = struct.Struct("<8sI8sII")
_MAGIC = b"DUSHARD\0"
# What a pack is made from and how: two dicts that JSON can hold, under "options" and "source".
Identity = Mapping[str, Mapping[str, Any]]


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05d}.bin"


def shard_header(number: int, identity: Identity) -> bytes:
    """Return the first bytes of a shard; the checksum keeps the shards of two packs apart."""
    parts = {key: dict(identity[key]) for key in ("options", "source")}
    checksum = zlib.crc32(json.dumps(parts, sort_keys=True).encode())
    kind = identity["options"]["format"].encode()
    return _HEADER.pack(_MAGIC, VERSION, kind, number, checksum).ljust(HEADER_SIZE, b"\0")


def read_index(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the meta and the columns of a pack, whose shards are there in their right size.

    Raises:
        ConfigError: with all that is wrong with the pack.
    """
    meta, columns = _read_index_alone(folder)
    problems = list(_shard_problems(folder, meta))
    if problems:
        raise ConfigError(problems)
    return meta, columns


def _read_index_alone(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    path = folder / INDEX
    try:
        meta, columns = read_arrays(path, KIND, VERSION)
        if problem := find_wrong_meta(meta) or _find_wrong_columns(columns):
            raise ArrayFileError(f"has a wrong header: {problem}")
        return meta, columns
    except FileNotFoundError:
        if any(folder.glob("shard-*")):
            message = f"{folder}: packing was not finished: run the same tools/pack_dataset.py command again"
        else:
            message = f"{folder} has no {INDEX}: no packed data set; tools/pack_dataset.py makes one of any other"
        raise ConfigError(message) from None
    except ArrayFileError as error:
        raise ConfigError(f"{path} {error}; pack the data again") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def find_wrong_meta(meta: Mapping[str, Any]) -> str | None:
    """Return which part of the meta of an index is missing or of another type."""
    options, shards, classes = meta.get("options"), meta.get("shards"), meta.get("classes")
    if (
        not isinstance(options, dict)
        or options.get("format") not in FORMATS
        or not isinstance(meta.get("source"), dict)
    ):
        return "options or source"
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes) or not classes:
        return "classes"
    if len(set(classes)) < len(classes):
        return "classes, of which two have one name"
    for part in ("mean", "std"):
        numbers = meta.get(part)
        if not isinstance(numbers, list) or len(numbers) != 3 or not all(type(n) in (int, float) for n in numbers):
            return part
    if not isinstance(meta.get("crop"), str) or type(meta.get("crc32")) is not int:
        return "crop or crc32"
    if not isinstance(shards, list) or not all(_is_shard(shard, number) for number, shard in enumerate(shards)):
        return "shards"
    return None


def _is_shard(shard: Any, number: int) -> bool:
    is_named = isinstance(shard, dict) and shard.get("name") == shard_name(number)
    return is_named and all(type(shard.get(key)) is int for key in ("size", "images"))


def _find_wrong_columns(columns: Mapping[str, np.ndarray]) -> str | None:
    """Return which column of an index is missing, of another type or of another length."""
    num = len(columns.get("label", ()))
    expected = {name: (np.dtype(kind), (num,)) for name, kind in COLUMNS.items()}
    expected["name_offsets"] = np.dtype(np.int64), (num + 1,)
    for name, (kind, shape) in expected.items():
        if name not in columns or columns[name].dtype != kind or columns[name].shape != shape:
            return f"column {name}"
    names = columns.get("name_bytes")
    return None if names is not None and names.dtype == np.uint8 and names.ndim == 1 else "column name_bytes"


def find_wrong_rows(meta: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> str | None:
    """Return what the index says of an image that cannot be: looks at all rows."""
    sizes = np.array([shard["size"] for shard in meta["shards"]], np.int64)
    shard, start, length, label = (columns[name] for name in ("shard", "offset", "length", "label"))
    if not len(label):
        return None
    if label.min() < 0 or label.max() >= len(meta["classes"]):
        return f"a label outside the {len(meta['classes'])} classes"
    if shard.min() < 0 or shard.max() >= len(sizes):
        return f"an image outside the {len(sizes)} shards"
    if start.min() < HEADER_SIZE or length.min() < 0 or (start > sizes[shard] - length).any():
        return "an image outside its shard"
    pixels = columns["height"].astype(np.int64) * columns["width"] * 3
    is_raw = meta["options"]["format"] == "raw"
    return "pixels of another size than the image" if is_raw and (pixels != length).any() else None


def _shard_problems(folder: Path, meta: Mapping[str, Any]) -> Iterator[str]:
    for shard in meta["shards"]:
        path = folder / shard["name"]
        try:
            size = path.stat().st_size
        except OSError as error:
            yield f"{path}: {error.strerror}; it holds {counted(shard['images'], 'image')}: restore it, or pack again"
            continue
        if size != shard["size"]:
            sizes = f"{counted(size, 'byte')} in place of {shard['size']:,}"
            yield f"{path} has {sizes}: it was cut or replaced; pack the data again"


def read_whole_or_cut(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
    """Return what `read_index` does and what is wrong with the shards, for whoever looks at each image.

    Raises:
        ConfigError: there is no index, or it cannot be used.
    """
    meta, columns = _read_index_alone(folder)
    if problem := find_wrong_rows(meta, columns):
        raise ConfigError(f"{folder / INDEX} is damaged: {problem}; pack the data again")
    problems = list(_shard_problems(folder, meta))
    for number, shard in enumerate(meta["shards"]):
        with contextlib.suppress(FileNotFoundError), open(folder / shard["name"], "rb") as file:
            if file.read(HEADER_SIZE) != shard_header(number, meta):
                problems.append(f"{folder / shard['name']} {FOREIGN_SHARD}")
    if meta["crc32"] != checksum_of(columns):
        problems.append(f"{folder / INDEX} is damaged: its checksum does not match; pack the data again")
    return meta, columns, problems


def image_name(columns: Mapping[str, np.ndarray], index: int) -> str:
    """Return what image `index` was called where it came from."""
    return os.fsdecode(name_at(columns["name_bytes"], columns["name_offsets"], index))
