"""Arrays in one memory-mapped file: the format of the indexes.

All processes of a machine share the pages of such a file, so loader workers need no copies of an index.

    8 bytes   magic
    8 bytes   length of the header, little-endian
    4 bytes   CRC-32 of the header
    JSON      {"kind", "version", "size", "meta", "arrays": {name: [dtype, shape, offset]}}
    ...       each array, at a multiple of 64 bytes
"""

import json
import math
import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from distribuuuu.config.atomic_file import replacing
from distribuuuu.config.errors import counted

MAGIC = b"DUARRAYS"
ALIGNMENT = 64
FIXED = len(MAGIC) + 8 + 4

Arrays = Mapping[str, np.ndarray]


class ArrayFileError(ValueError):
    """A file of arrays that cannot be used; the message gives the reason without the path."""


class OtherVersionError(ArrayFileError):
    """An intact file of another version or kind."""


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


def read_arrays(path: str | os.PathLike, kind: str, version: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the meta and the arrays of a file, read-only and memory-mapped: only the header is read here.

    Raises:
        ArrayFileError: the file has another format, kind or version, or is truncated or corrupt.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        try:
            size = os.fstat(file.fileno()).st_size
            header = read_header(file, size, kind, version)
            if size != header["size"]:
                expected = f"has {counted(size, 'byte')}, expected {header['size']:,}"
                raise ArrayFileError(f"{expected}: it is truncated or corrupt")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return dict(header["meta"]), {name: _map(mapped, *place) for name, place in header["arrays"].items()}
        except ArrayFileError:
            raise
        except (LookupError, TypeError, AttributeError, RecursionError, ValueError) as error:
            raise ArrayFileError("has an invalid header") from error


def read_header(file: BinaryIO, size: int, kind: str, version: int) -> dict[str, Any]:
    """Return the header of a file of `size` bytes; raise ArrayFileError if it cannot be used."""
    fixed = file.read(FIXED)
    if len(fixed) < FIXED or not fixed.startswith(MAGIC):
        raise ArrayFileError("is not a file of arrays, or is truncated")
    length, checksum = int.from_bytes(fixed[8:16], "little"), int.from_bytes(fixed[16:20], "little")
    if length > size:
        raise ArrayFileError("is truncated or corrupt")
    text = file.read(length)
    if zlib.crc32(text) != checksum:
        raise ArrayFileError("has a corrupt header")
    header = json.loads(text)
    if (header["kind"], header["version"]) != (kind, version):
        found = f"{header['kind']} of version {header['version']}"
        raise OtherVersionError(f"is {found}, not {kind} of version {version}")
    return header


def _map(mapped: mmap.mmap, dtype: str, shape: list[int], offset: int) -> np.ndarray:
    """Return a numeric array in a mapped file; raises ValueError if it exceeds the file."""
    if np.dtype(dtype).kind not in "iuf" or min(shape, default=0) < 0:
        raise ValueError(f"an array of {dtype} in the shape {shape}")
    count = math.prod(shape)
    return np.frombuffer(mapped, dtype, count, offset).reshape(shape) if count else np.empty(shape, dtype)


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


def name_at(arrays: Arrays, prefix: str, index: int) -> str:
    """Return name `index` of `pack_names` as text."""
    start, end = arrays[f"{prefix}_offsets"][index : index + 2]
    return os.fsdecode(arrays[f"{prefix}_bytes"][start:end].tobytes())
