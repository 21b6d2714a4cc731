"""Members of tar and ZIP archives: the place of their bytes, found without reading them.

tar: POSIX.1-2017 (ustar and pax) and GNU tar. ZIP: PKWARE's APPNOTE.TXT 6.3.10, with ZIP64.
"""

import os
import re
import shlex
import stat
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from distribuuuu.config import ConfigError
from distribuuuu.files.untrusted import printable

BLOCK = 512
# Bytes of a pax header or a long name, of the padding after the end of a tar, and of the directory of a ZIP.
MAX_EXTENDED, MAX_PADDING, MAX_DIRECTORY = 1 << 20, 1 << 20, 1 << 30
# Bytes that are read ahead where headers are near to each other, and where they are not.
_NEAR, _FAR = 1 << 18, 1 << 12
# First bytes of compressed files, and the command that decompresses each.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
# Types of tar members without data: links, devices, folders and pipes.
_OCTAL, _DECIMAL = re.compile(rb"[0-7]+"), re.compile(rb"[0-9]+")
_LINKS, _NO_DATA = b"12", b"123456"


class ArchiveError(ConfigError):
    """An archive that cannot be used; the message names it and the member."""


class Member(NamedTuple):
    """A file in an archive.

    Attributes:
        name: as in the archive.
        offset: its first byte.
        size: in bytes, without compression.
        packed: bytes of the deflated member; 0: it is stored as it is.
        fault: why it cannot be read; empty: it can.
    """

    name: str
    offset: int
    size: int
    packed: int = 0
    fault: str = ""


class Window:
    """The bytes of an archive, which are mostly read in ascending order, by way of a small buffer.

    Args:
        name: the archive for messages.
        size: its bytes.
        pread: returns so many bytes from a position on.
    """

    def __init__(self, name: str, size: int, pread: Callable[[int, int], bytes]):
        self.name, self.size, self._pread = name, size, pread
        self._data, self._start, self._asked = b"", 0, 0

    def read(self, start: int, size: int) -> bytes:
        """Return `size` bytes from a position on; fewer at the end of the archive."""
        offset = start - self._start
        if offset < 0 or offset + size > len(self._data):
            ahead = _NEAR if 0 <= start - self._asked < _NEAR >> 3 else _FAR
            self._data, self._start, offset = self._pread(max(size, ahead), start), start, 0
        self._asked = start
        return self._data[offset : offset + size]

    def inside(self, name: str) -> "Window":
        """Return a window on the same bytes, which names a member in messages."""
        return Window(f"{self.name}:{printable(name)[:300]}", self.size, self._pread)

    def error(self, problem: str, name: str = "") -> ArchiveError:
        """Return the error for a problem with the archive, or with one of its members."""
        return member_error(self.name, name, problem)


def member_error(path: str, name: str, problem: str) -> ArchiveError:
    """Return the error for a problem with a member of an archive."""
    return ArchiveError(f"{path}{':' if name else ''}{printable(name)[:300]}: {problem}")


def walk_archive(window: Window) -> Iterator[Member]:
    """Yield the files of a tar or a ZIP archive, in the order of a tar, or of the directory of a ZIP.

    Raises:
        ArchiveError: it is neither, is truncated or corrupt, or has members of a kind that cannot be read.
    """
    if window.read(0, 4) in (b"PK\3\4", b"PK\5\6") or window.name.lower().endswith(".zip"):
        return _walk_zip(window)
    return walk_tar(window, 0, window.size)


# --------------------------------------------------------------------------------------------- tar


def walk_tar(window: Window, start: int, end: int) -> Iterator[Member]:
    """Yield the files of the tar in a range of bytes; errors as `walk_archive`."""
    common: dict[str, str] = {}
    own: dict[str, str] = {}
    position, last = start, ""
    while True:
        block = window.read(position, BLOCK)
        if position + BLOCK > end or len(block) < BLOCK:
            raise window.error(f"is truncated {_after(last)}, at byte {end:,}; fix: copy or download it again")
        if block[0] == 0:
            _check_end(window, position, end, last)
            return
        kind, size, name = _read_header(window, block, position, last)
        position += BLOCK
        if kind in b"LKxXg":
            if size > MAX_EXTENDED or position + size > end:
                raise window.error(f"has an invalid header of {size:,} bytes at byte {position - BLOCK:,}", last)
            data = window.read(position, size)
            if kind == b"L":
                own["path"] = os.fsdecode(data.rstrip(b"\0"))
            elif kind != b"K":
                (common if kind == b"g" else own).update(_read_pax(window, data, last))
            position += -(-size // BLOCK) * BLOCK
            continue
        values = {**common, **own} if common else own
        name, own = values.get("path", name), {}
        size = _to_number(window, os.fsencode(values["size"]), name) if "size" in values else size
        if kind in _NO_DATA or (kind == b"\0" and name.endswith("/")):
            size = 0
        if position + size > end:
            raise window.error(
                f"ends at byte {position + size:,} of {end:,}: the archive is truncated or corrupt", name
            )
        if kind == b"S" or any(key.startswith("GNU.sparse") for key in values):
            raise window.error("is a sparse file; fix: pack the archive again, without --sparse", name)
        if kind == b"M":
            raise window.error("continues in another volume; fix: pack one archive", name)
        if kind not in b"5DNV" and not name.endswith("/"):
            yield Member(name, position, size, fault=_fault_of(kind))
        position, last = position + -(-size // BLOCK) * BLOCK, name


def _after(last: str) -> str:
    """Return a place in a tar: after its last member."""
    return f"after {printable(last)[:300]}" if last else "at its start"


def _fault_of(kind: bytes) -> str:
    if kind in _LINKS:
        return "is a link; fix: pack the archive again with tar --dereference --hard-dereference"
    return "is no regular file; fix: pack the archive again without it" if kind in _NO_DATA else ""


def _read_header(window: Window, block: bytes, position: int, last: str) -> tuple[bytes, int, str]:
    """Return the type, the size and the name of a header."""
    stored = block[148:156].strip(b" \0")
    if not _OCTAL.fullmatch(stored) or int(stored, 8) != sum(block) - sum(block[148:156]) + 8 * 32:
        tool = next((tool for magic, tool in _COMPRESSED.items() if block.startswith(magic)), "")
        if tool and not last:
            raise window.error(f"is compressed, so no member can be read alone; {repack(window.name, tool)}")
        raise window.error(f"is no tar, or is damaged: it has no header {_after(last)}, at byte {position:,}")
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].partition(b"\0")[0]):
        name = prefix + b"/" + name
    return block[156:157], _to_number(window, block[124:136], os.fsdecode(name), 8), os.fsdecode(name)


def repack(path: str, tool: str) -> str:
    """Return the advice that decompresses a tar with a tool."""
    target = re.sub(r"(\.tar)?\.\w+$", "", path) + (".tar" if not path.endswith(".tar") else ".plain.tar")
    return f"fix: {tool} -dc {shlex.quote(path)} > {shlex.quote(target)}"


def _to_number(window: Window, field: bytes, name: str, base: int = 10) -> int:
    """Return a number in digits, or in the binary form of GNU tar, whose first bit is set."""
    if field[:1] >= b"\x80":
        return int.from_bytes(field, "big") & ~(0x80 << 8 * (len(field) - 1))
    digits = field.strip(b" \0") or b"0"
    if len(digits) > 20 or not (_OCTAL if base == 8 else _DECIMAL).fullmatch(digits):
        raise window.error(f"has an invalid size, {digits[:20]!r}", name)
    return int(digits, base)


def _read_pax(window: Window, data: bytes, last: str) -> dict[str, str]:
    """Return the values of a pax header, whose records are 'LENGTH KEY=VALUE\\n'."""
    values, place, end = {}, 0, len(data.rstrip(b"\0"))
    while place < end:
        digits = data[place : place + 10].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        key, is_there, value = data[place + len(digits) + 1 : max(place + length - 1, 0)].partition(b"=")
        if not is_there or data[place + length - 1 : place + length] != b"\n":
            raise window.error(f"has an invalid pax header {_after(last)}")
        values[os.fsdecode(key)] = os.fsdecode(value)
        place += length
    return values


def _check_end(window: Window, position: int, end: int, last: str) -> None:
    """Raise ArchiveError unless only zeros follow the last member: another archive may have been appended."""
    if end - position > MAX_PADDING or window.read(position, end - position).strip(b"\0"):
        fix = "fix: join archives with tar --concatenate, or copy it again"
        raise window.error(f"has data after its end, at byte {position:,}, {_after(last)}; {fix}")


# --------------------------------------------------------------------------------------------- ZIP

_END, _END64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_ENTRY, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_DEFLATED, _ENCRYPTED, _UTF8 = 8, 0x1, 0x800


def _walk_zip(window: Window) -> Iterator[Member]:
    directory, count, first = _read_directory(window)
    position = 0
    for _ in range(count):
        entry, name = directory[position : position + _ENTRY.size], f"member {position}"
        if len(entry) < _ENTRY.size or entry[:4] != b"PK\1\2":
            raise window.error(f"has a corrupt directory: no entry at its byte {position:,}")
        (_, _, _, flags, method, _, _, _, packed, size, name_size, extra_size, comment_size, _, _, mode, offset) = (
            _ENTRY.unpack(entry)
        )
        ends = [position + _ENTRY.size + name_size, position + _ENTRY.size + name_size + extra_size]
        raw = directory[ends[0] - name_size : ends[0]]
        name = raw.decode("utf-8", "surrogateescape") if flags & _UTF8 or _is_utf8(raw) else raw.decode("cp437")
        size, packed, offset = _read_zip64(window, directory[ends[0] : ends[1]], name, [size, packed, offset])
        position = ends[1] + comment_size
        if raw.endswith(b"/"):
            continue
        start = _find_data(window, offset, raw, name)
        if start + packed > first:
            raise window.error(f"ends at byte {start + packed:,}, in the directory: the archive is corrupt", name)
        fault = ""
        if flags & _ENCRYPTED:
            fault = "is encrypted; fix: unpack it, and pack it again without a password"
        elif method not in (0, _DEFLATED) or (method == _DEFLATED and not packed):
            fault = f"is compressed by method {method}; expected stored or deflated; fix: pack it again with zip -0"
        elif not method and size != packed:
            fault = f"is stored with {packed:,} of {size:,} bytes: the archive is corrupt"
        elif stat.S_ISLNK(mode >> 16):
            fault = "is a link; fix: pack the archive again with zip, which follows links"
        yield Member(name, start, size, packed if method else 0, fault)
    if position != len(directory):
        raise window.error(f"has a corrupt directory: {len(directory) - position:,} bytes more than its entries")


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _read_directory(window: Window) -> tuple[bytes, int, int]:
    """Return the directory of a ZIP, its number of entries and its first byte."""
    start = max(0, window.size - _END.size - 0xFFFF)
    tail = window.read(start, window.size - start)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < _END.size:
        raise window.error("is no ZIP, or is truncated: it has no directory at its end; fix: download it again")
    _, disk, first_disk, _, count, size, first, _ = _END.unpack_from(tail, at)
    locator = window.read(max(start + at - _LOCATOR.size, 0), _LOCATOR.size)
    if locator[:4] == b"PK\6\7":
        record = window.read(_LOCATOR.unpack(locator)[2], _END64.size) if len(locator) == _LOCATOR.size else b""
        if len(record) < _END64.size or record[:4] != b"PK\6\6":
            raise window.error("is truncated or corrupt: its ZIP64 directory is not at its place")
        _, _, _, _, disk, first_disk, _, count, size, first = _END64.unpack(record)
    if disk or first_disk:
        raise window.error("is one part of several; fix: join them with zip -s 0")
    if size > MAX_DIRECTORY or first + size > start + at or count > size // _ENTRY.size:
        raise window.error(f"is truncated or corrupt: a directory of {size:,} bytes for {count:,} members")
    return window.read(first, size), count, first


def _read_zip64(window: Window, extra: bytes, name: str, numbers: list[int]) -> list[int]:
    """Return the size, the packed size and the offset of an entry; those of all ones are in its extra field."""
    place = 0
    while place + 4 <= len(extra) and 0xFFFFFFFF in numbers:
        kind, length = struct.unpack_from("<2H", extra, place)
        if kind == 1:
            field = extra[place + 4 : place + 4 + length]
            wide = [number for (number,) in struct.iter_unpack("<Q", field[: len(field) // 8 * 8])]
            numbers = [wide.pop(0) if number == 0xFFFFFFFF and wide else number for number in numbers]
            break
        place += 4 + length
    if 0xFFFFFFFF in numbers:
        raise window.error("has no size or place: the archive is corrupt", name)
    return numbers


def _find_data(window: Window, offset: int, raw: bytes, name: str) -> int:
    """Return the first byte of the data after a local header, which must have the name of the entry."""
    local = window.read(offset, _LOCAL.size + len(raw))
    if local[:4] != b"PK\3\4" or len(local) < _LOCAL.size + len(raw) or local[_LOCAL.size :] != raw:
        raise window.error(f"has no header at byte {offset:,}: the archive is truncated or corrupt", name)
    *_, name_size, extra_size = _LOCAL.unpack_from(local)
    return offset + _LOCAL.size + name_size + extra_size
