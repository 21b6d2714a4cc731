"""Files of arrays, mapped into memory: the stored form of indexes, packs and records; and the stamps of files."""

import json
import math
import mmap
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from distribuuuu.config.errors import counted
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.untrusted import open_regular, parse_json

# Imported where arrays are used, so that a mistake in a config is answered without it.
if TYPE_CHECKING:
    import numpy as np

# More than the cores: on a network disk the threads wait for replies.
NUM_THREADS = min(16, 4 * (os.cpu_count() or 1))
# The stamp of a folder that was not listed completely.
NOT_KNOWN = (-1, -1, -1)
# What a scan returns: the meta and the arrays of an index.
Content: TypeAlias = "tuple[dict[str, Any], dict[str, np.ndarray]]"

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

Arrays: TypeAlias = "Mapping[str, np.ndarray]"


class ArrayFileError(ValueError):
    """A file of arrays that cannot be used; the message gives the reason without the path."""


def write_arrays(path: str | os.PathLike, kind: str, version: int, meta: Mapping[str, Any], arrays: Arrays) -> None:
    """Write a file of arrays of numbers atomically, with a meta that JSON can represent; its folder must exist."""
    import numpy as np

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


def read_arrays(path: str | os.PathLike, kind: str, version: int) -> Content:
    """Return the meta and the arrays of a file, read-only and memory-mapped: only the header is read here.

    The content of the meta is unchecked.

    Raises:
        ArrayFileError: the file has another format, kind or version, or is truncated or corrupt.
        OSError: the file cannot be read.
    """
    import numpy as np

    with open_regular(path) as file:
        size, fixed = os.fstat(file.fileno()).st_size, file.read(FIXED)
        if len(fixed) < FIXED or not fixed.startswith(MAGIC):
            raise ArrayFileError("is not a file of arrays, or is truncated")
        length = int.from_bytes(fixed[8:16], "little")
        text = file.read(length) if length <= min(size - FIXED, MAX_HEADER) else b""
        if len(text) != length or zlib.crc32(text) != int.from_bytes(fixed[16:FIXED], "little"):
            raise ArrayFileError("is truncated or corrupt")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:  # frombuffer refuses objects and places outside of the file
        header = parse_json(text)
        found, expected, meta = (header["kind"], header["version"]), header["size"], dict(header["meta"])
        if found != (kind, version):
            of = f"{str(found[0])[:40]} of version {str(found[1])[:9]}"
            raise ArrayFileError(f"is {of}, not {kind} of version {version}")
        if size != expected:
            raise ArrayFileError(f"has {counted(size, 'byte')}, expected {expected!s:.20}: it is truncated or corrupt")
        return meta, {
            name: np.frombuffer(mapped, np.dtype(dtype), math.prod(shape), offset).reshape(shape)
            for name, (dtype, shape, offset) in header["arrays"].items()
        }
    except ArrayFileError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ArrayFileError(f"has an invalid header: {error}") from error


def checksum_of(arrays: Arrays) -> int:
    """Return the CRC-32 of all arrays, in the order of their names."""
    import numpy as np

    checksum = 0
    for name in sorted(arrays):
        checksum = zlib.crc32(np.ascontiguousarray(arrays[name]).view(np.uint8).data, checksum)
    return checksum


def pack_names(prefix: str, names: Sequence[bytes]) -> "dict[str, np.ndarray]":
    """Return names as PREFIX_bytes, uint8 (total,), and PREFIX_offsets, int64 (len(names) + 1,), of their starts."""
    import numpy as np

    lengths = np.fromiter(map(len, names), np.int64, len(names))
    offsets = np.concatenate([[0], lengths.cumsum()])
    return {f"{prefix}_bytes": np.frombuffer(b"".join(names), np.uint8), f"{prefix}_offsets": offsets}


def stamp_of(status: os.stat_result) -> tuple[int, int, int]:
    """Return numbers that change with a file, or with the entries of a folder.

    Mounts and restored backups may keep the modification time of a folder to which files are added, but not the time
    of the change itself.
    """
    if stat.S_ISDIR(status.st_mode):
        return 0, status.st_mtime_ns, status.st_ctime_ns
    return status.st_size, status.st_mtime_ns, 0


def find_stamp(path: str | os.PathLike) -> tuple[int, int, int]:
    """Return the stamp of a file or a folder; if it is missing, numbers below 0 that no scan stores."""
    try:
        return stamp_of(os.stat(path))
    except (OSError, ValueError):  # ValueError: a path with a NUL
        return -2, -2, -2
