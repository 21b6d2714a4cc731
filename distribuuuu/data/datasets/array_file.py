"""Arrays in one file, mapped into memory: what an index of a million images is kept in.

All processes of a machine share the pages of such a file, so an index costs its memory once, not once a loader worker.

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
from typing import Any

import numpy as np

from distribuuuu.config.atomic_file import replacing
from distribuuuu.config.errors import counted

MAGIC = b"DUARRAYS"
ALIGNMENT = 64
_FIXED = len(MAGIC) + 8 + 4


class ArrayFileError(ValueError):
    """A file of arrays that cannot be used; the message says why, without its path."""


class OtherVersionError(ArrayFileError):
    """A file that is whole, and was made by another version or for something else."""


def write_arrays(
    path: str | os.PathLike, kind: str, version: int, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write a file that is whole under its name or not there.

    Args:
        path: the file to write; its folder must be there.
        kind, version: what `read_arrays` must ask for.
        meta: what JSON can hold.
        arrays: by name, of any shape and of a fixed-size type.

    Raises:
        OSError: the disk refuses it.
    """
    path = Path(path)
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = _lay_out(kind, version, dict(meta), arrays)
    with replacing(path) as file:
        file.write(MAGIC + len(header).to_bytes(8, "little") + zlib.crc32(header).to_bytes(4, "little") + header)
        for array in arrays.values():
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            file.write(array.data)


def _lay_out(kind: str, version: int, meta: dict, arrays: dict[str, np.ndarray]) -> bytes:
    """Return the header; its own length decides where the arrays begin, so it is padded to a fixed one."""
    header = {"kind": kind, "version": version, "size": 0, "meta": meta, "arrays": {}}
    longest = {name: [array.dtype.str, array.shape, 1 << 60] for name, array in arrays.items()}
    room = len(json.dumps({**header, "size": 1 << 60, "arrays": longest}))
    end = _FIXED + room
    for name, array in arrays.items():
        offset = end + -end % ALIGNMENT
        header["arrays"][name] = [array.dtype.str, array.shape, offset]
        end = offset + array.nbytes
    header["size"] = end
    return json.dumps(header).encode().ljust(room)


def read_arrays(path: str | os.PathLike, kind: str, version: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the meta and the arrays of a file, read-only and mapped: nothing but the header is read yet.

    Raises:
        ArrayFileError: it is no such file, of another kind or version, or not whole.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        try:
            header = _read_header(file, kind, version)
            size = os.fstat(file.fileno()).st_size
            if size != header["size"]:
                found = f"has {counted(size, 'byte')} in place of {header['size']:,}"
                raise ArrayFileError(f"{found}: it was cut or damaged")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return dict(header["meta"]), {name: _map(mapped, *place) for name, place in header["arrays"].items()}
        except (LookupError, TypeError, AttributeError, RecursionError, ValueError) as error:
            raise error if isinstance(error, ArrayFileError) else ArrayFileError("has a wrong header") from error


def _map(mapped: mmap.mmap, dtype: str, shape: list[int], offset: int) -> np.ndarray:
    """Return an array of numbers in a map, which raises ValueError for one beyond its end."""
    if np.dtype(dtype).kind not in "iuf" or min(shape, default=0) < 0:
        raise ValueError(f"an array of {dtype} in the shape {shape}")
    count = math.prod(shape)
    return np.frombuffer(mapped, dtype, count, offset).reshape(shape) if count else np.empty(shape, dtype)


def _read_header(file, kind: str, version: int) -> dict[str, Any]:
    fixed = file.read(_FIXED)
    if len(fixed) < _FIXED or not fixed.startswith(MAGIC):
        raise ArrayFileError("is not a file of arrays, or was cut")
    length, checksum = int.from_bytes(fixed[8:16], "little"), int.from_bytes(fixed[16:20], "little")
    if length > os.fstat(file.fileno()).st_size:
        raise ArrayFileError("was cut or damaged")
    text = file.read(length)
    if zlib.crc32(text) != checksum:
        raise ArrayFileError("has a damaged header")
    header = json.loads(text)
    if (header["kind"], header["version"]) != (kind, version):
        raise OtherVersionError(f"is {header['kind']} of version {header['version']}, not {kind} of version {version}")
    return header


def pack_names(names: Sequence[bytes]) -> dict[str, np.ndarray]:
    """Return names as two arrays: uint8 (bytes of all,) and int64 (len(names) + 1,), where each begins."""
    lengths = np.fromiter(map(len, names), np.int64, len(names))
    return {"bytes": np.frombuffer(b"".join(names), np.uint8), "offsets": np.concatenate([[0], lengths.cumsum()])}


def checksum_of(arrays: Mapping[str, np.ndarray]) -> int:
    """Return the CRC-32 of all arrays, in the order of their names."""
    checksum = 0
    for name in sorted(arrays):
        checksum = zlib.crc32(np.ascontiguousarray(arrays[name]).view(np.uint8).data, checksum)
    return checksum


def name_at(data: np.ndarray, offsets: np.ndarray, index: int) -> bytes:
    """Return name `index` of `pack_names`."""
    return data[offsets[index] : offsets[index + 1]].tobytes()
