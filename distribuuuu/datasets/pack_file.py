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
from distribuuuu.datasets.array_file import ArrayFileError, checksum_of, name_at, read_arrays
from distribuuuu.plural import counted

KIND, VERSION = "packed images", 1
FORMATS = ("jpeg", "raw")
INDEX = "index.bin"
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
        return read_arrays(path, KIND, VERSION)
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
