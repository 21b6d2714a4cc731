"""Members of tar and ZIP archives: the place of their bytes, found without reading them.

`tarfile` and `zipfile` parse the headers. What they pass over, such as the end of a truncated tar, is refused here.
"""

import contextlib
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import DataError
from distribuuuu.data.datasets.array_file import stamp_of
from distribuuuu.data.datasets.base import packed_name
from distribuuuu.data.datasets.index import Index
from distribuuuu.files.image_files import EXTENSIONS
from distribuuuu.files.untrusted import open_regular, printable

# Bytes that the headers of one member may have, and those of the padding after the end of a tar.
MAX_HEADERS, MAX_PADDING = 1 << 20, 1 << 20
# Archives that a process keeps open; with more, all are closed.
_MAX_OPEN = 128
# First bytes of compressed files: gzip, bzip2, xz, zstd.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
# What the two modules raise for damaged headers; an unknown version of ZIP is a RuntimeError.
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, ValueError, LookupError, OverflowError, struct.error,
            RuntimeError, OSError)  # fmt: skip
# The lengths of the name and of the extra field in the local header of a ZIP, after its signature.
_LOCAL = struct.Struct("<4s22x2H")
_ENCRYPTED, _UTF8 = 0x1, 0x800


class ArchiveError(ConfigError):
    """An archive that cannot be used; the message names it and the member."""


class ArchiveSource(NamedTuple):
    """Archives, and what of them is a data set.

    Attributes:
        folder: the folder in the archives with the class folders, if it is the only one at the top; empty: none.
        is_inside: whether `folder` is one of several: the archive holds all splits.
        layout: classes (class folders or shards), or flat (no classes); another name is that of another `Walk`.
    """

    paths: tuple[str, ...]
    folder: str = ""
    is_inside: bool = False
    layout: str = "classes"
    extensions: tuple[str, ...] = EXTENSIONS

    def __str__(self) -> str:
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{self.paths[0]}{more}" + (f", folder {self.folder}" if self.is_inside else "")


class Member(NamedTuple):
    """A file in an archive.

    Attributes:
        offset: its first byte.
        size: in bytes, without compression.
        packed: bytes of the deflated member; 0: it is stored as it is.
        crc32: its checksum; 0: unknown.
        fault: why it cannot be read; empty: it can.
    """

    name: str
    offset: int
    size: int
    packed: int = 0
    crc32: int = 0
    fault: str = ""


def member_error(path: str, name: str, problem: str) -> ArchiveError:
    """Return the error for a problem with a member of an archive, or with the archive if the name is empty."""
    return ArchiveError(f"{path}{':' if name else ''}{printable(name)[:300]}: {problem}")


def walk_archive(path: str, file: IO[bytes], size: int) -> Iterator[Member]:
    """Yield the files of a tar or a ZIP archive of so many bytes, in the order of a tar, or of the directory of a ZIP.

    An archive that is neither, or is truncated or corrupt, is an ArchiveError.
    """
    if file.read(4) in (b"PK\3\4", b"PK\5\6") or path.lower().endswith(".zip"):
        return _walk_zip(path, file)
    return walk_tar(path, file, 0, size)


# --------------------------------------------------------------------------------------------- tar


class _Limited:
    """A file of which the headers of one member may be read: they declare their own size."""

    def __init__(self, file: IO[bytes]):
        self._file, self.left, self.seek, self.tell = file, MAX_HEADERS, file.seek, file.tell

    def read(self, size: int) -> bytes:
        """Return bytes of a header; raise ReadError if they are too many."""
        self.left -= size
        if size < 0 or self.left < 0:
            raise tarfile.ReadError(f"headers of more than {MAX_HEADERS:,} bytes")
        return self._file.read(size)


def walk_tar(path: str, file: IO[bytes], start: int, end: int) -> Iterator[Member]:
    """Yield the files of the tar in a range of bytes; errors as `walk_archive`."""
    file.seek(start)
    limited: Any = _Limited(file)
    tar: Any = None
    last, position = "", start
    while True:
        after = f"after {printable(last)[:300]}" if last else "at its start"
        try:
            tar = tar or tarfile.TarFile(fileobj=limited, encoding="utf-8", errors="surrogateescape")
            limited.left = MAX_HEADERS
            info = tar.next()
        except _DAMAGED as error:
            _check_end(path, file, position, end, last, f": {error}")
        tar.members.clear()  # one object per member otherwise
        if info is None:
            break
        if info.size < 0 or info.offset_data <= position:
            raise member_error(path, info.name, "has an invalid size")
        if info.isreg() and info.offset_data + info.size > end:
            place = f"{info.offset_data + info.size:,} of {end:,}"
            raise member_error(path, info.name, f"ends at byte {place}: the archive is truncated or corrupt")
        if not info.isdir():
            yield Member(info.name, info.offset_data, info.size, fault=_fault_of(info))
        last, position = info.name, tar.offset
    _check_end(path, file, tar.offset, end, last)
    if end - tar.offset > MAX_PADDING or file.read(end - file.tell()).strip(b"\0"):
        fix = "fix: join archives with tar --concatenate, or copy it again"
        raise member_error(path, "", f"has data after its end, at byte {tar.offset:,}, {after}; {fix}")


def _fault_of(info: tarfile.TarInfo) -> str:
    if info.islnk() or info.issym():
        return "is a link; fix: pack the archive again with tar --dereference --hard-dereference"
    is_sparse = info.issparse() or any(key.startswith("GNU.sparse") for key in info.pax_headers)
    is_file = info.isreg() and not is_sparse
    return "" if is_file else "is no regular file, or a sparse one; fix: pack the archive again without it"


def _check_end(path: str, file: IO[bytes], position: int, end: int, last: str, reason: str = "") -> None:
    """Leave the file after the block of zeros that ends a tar; raise ArchiveError if there is none, or for a reason."""
    after = f"after {printable(last)[:300]}" if last else "at its start"
    file.seek(position)
    block = file.read(tarfile.BLOCKSIZE)
    if block.startswith(_COMPRESSED) and not last:
        problem = "is compressed, so no member can be read alone; fix: decompress it, e.g. gzip -d X.tar.gz"
        raise member_error(path, "", problem)
    if position + tarfile.BLOCKSIZE > end:
        raise member_error(path, "", f"is truncated {after}, at byte {end:,}; fix: copy or download it again")
    if reason or block.strip(b"\0"):
        problem = f"is no tar, or is damaged: it has no valid header {after}, at byte {position:,}{reason}"
        raise member_error(path, "", problem)


# --------------------------------------------------------------------------------------------- ZIP


def _walk_zip(path: str, file: IO[bytes]) -> Iterator[Member]:
    try:
        archive = zipfile.ZipFile(file)
    except _DAMAGED as error:
        problem = f"is no ZIP, or is truncated or damaged: {error}; fix: copy or download it again"
        raise member_error(path, "", problem) from error
    for info in archive.infolist():
        name, is_utf8 = info.orig_filename, info.flag_bits & _UTF8
        raw = name.encode("utf-8" if is_utf8 else "cp437")
        if not is_utf8:
            with contextlib.suppress(UnicodeDecodeError):  # most programs write UTF-8 without saying so
                name = raw.decode("utf-8")
        if "/" not in name:  # some programs of Windows
            name = name.replace("\\", "/")
        if name.endswith("/"):
            continue
        offset, packed, size = info.header_offset, info.compress_size, info.file_size
        file.seek(max(offset, 0))
        header = file.read(_LOCAL.size + len(raw)).ljust(_LOCAL.size)
        signature, *lengths = _LOCAL.unpack_from(header)
        if offset < 0 or signature != b"PK\3\4" or header[_LOCAL.size :] != raw:
            raise member_error(path, name, f"has no header at byte {offset:,}: the archive is truncated or corrupt")
        start = offset + _LOCAL.size + sum(lengths)
        if start + packed > archive.start_dir:
            raise member_error(path, name, f"ends at byte {start + packed:,}, in the directory: the archive is corrupt")
        is_stored = info.compress_type == zipfile.ZIP_STORED
        yield Member(name, start, size, 0 if is_stored else packed, info.CRC, _fault_of_entry(info))


def _fault_of_entry(info: zipfile.ZipInfo) -> str:
    method, packed, size = info.compress_type, info.compress_size, info.file_size
    if info.flag_bits & _ENCRYPTED:
        return "is encrypted; fix: unpack it, and pack it again without a password"
    if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or (method and not packed):
        return f"is compressed by method {method}; expected stored or deflated; fix: pack it again with zip -0"
    if not method and size != packed:
        return f"is stored with {packed:,} of {size:,} bytes: the archive is corrupt"
    is_link = stat.S_ISLNK(info.external_attr >> 16)
    return "is a link; fix: pack the archive again with zip, which follows links" if is_link else ""


# ------------------------------------------------------------------------------------------ reading


def read_member(index: Index, number: int) -> bytearray:
    """Return the bytes of image `number` of an index of archives; raises DataError if its archive has changed since."""
    arrays, archive = index.arrays, int(index.arrays["file"][number])
    size, packed = int(arrays["size"][number]), int(arrays["packed"][number])
    file = _open(index, archive)
    try:
        data = os.pread(file.fileno(), packed or size, int(arrays["offset"][number]))
    except OSError as error:
        raise DataError.of_read(index.file_of(number), error) from error
    is_same = stamp_of(os.fstat(file.fileno())) == tuple(arrays["stamps"][archive].tolist())
    if not is_same or len(data) < (packed or size):
        raise DataError(f"{index.file_of(number)}: has changed since the start of the run; fix: start it again")
    data = inflate(data, size) if packed else data
    if (expected := int(arrays["crc32"][number])) and zlib.crc32(data) != expected:
        raise ValueError("the archive is corrupt: the checksum of this file does not match")
    return bytearray(data)


def _open(index: Index, archive: int) -> Any:
    """Return an archive, which is opened once in a process; a forked one shares its position-free descriptor."""
    if (file := index.opened.get(archive)) is None:
        path = os.path.join(index.root, packed_name(index.arrays, "files", archive))
        try:
            file = open_regular(path)
        except OSError as error:
            raise DataError.of_read(path, error) from error
        if len(index.opened) >= _MAX_OPEN:
            index.opened = {}  # a thread that reads one still holds it open
        index.opened[archive] = file
    return file


def inflate(data: bytes, size: int) -> bytes:
    """Return deflated data of `size` bytes; never more is decompressed, whatever the data is."""
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        content = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"the archive is corrupt: {error}") from error
    if len(content) != size:
        raise ValueError(f"the archive declares {size:,} bytes, but holds {'more' if len(content) > size else 'fewer'}")
    return content
