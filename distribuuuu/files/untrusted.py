"""Untrusted input: regular files within a size, texts, JSON within limits, and names without control characters.

A named pipe or a device blocks a plain `open` or never ends, and a name may hold sequences that a terminal or a browser
acts on.
"""

import codecs
import contextlib
import errno
import io
import json
import os
import re
import stat
from collections.abc import Iterator
from typing import IO, Any

# Bytes of a JSON file, its levels, and the least integer that is refused.
MAX_JSON, MAX_DEPTH, MAX_INTEGER = 1 << 24, 50, 1 << 64
# Control characters, marks of the writing direction (Unicode, UAX 9), line separators, and what UTF-8 cannot represent.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: Any, keep: str = "") -> str:
    """Return a text with its control and direction characters, except those to keep, as escape sequences."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], str(text))


def open_regular(path: str | os.PathLike) -> IO[bytes]:
    """Open a file for reading, through links too; raise OSError for a folder, a named pipe, a socket or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return open(descriptor, "rb")


def open_text(path: str | os.PathLike, **options: Any) -> IO[str]:
    """Open a regular text file in UTF-8, or in UTF-16 if it begins with its mark; marks are no part of the text."""
    file = open_regular(path)
    head = file.read(3)
    file.seek(0)
    is_utf16 = head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return io.TextIOWrapper(file, encoding="utf-16" if is_utf16 else "utf-8-sig", **options)


class InvalidFileError(ValueError):
    """A file that is not what it should be; the message names it."""


@contextlib.contextmanager
def untrusted(path: str | os.PathLike, what: str) -> Iterator[None]:
    """Report whatever the parsing of a file in the block raises as an InvalidFileError, 'PATH: not a valid WHAT: ...'.

    A file that cannot be read, or for which there is no memory, may be valid: OSError and MemoryError pass.
    """
    try:
        yield
    except (OSError, MemoryError, InvalidFileError):
        raise
    except Exception as error:  # damaged content raises nearly anything
        text = " ".join(str(error).split())
        reason = text if isinstance(error, ValueError) and text else f"{type(error).__name__} {text}".strip()
        raise InvalidFileError(f"{printable(path)}: not a valid {what}: {printable(reason)[:300]}") from error


def read_regular(path: str | os.PathLike, most: int) -> bytes:
    """Return the content of a regular file of at most so many bytes; raises OSError as `open_regular`."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
    return data


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text in UTF-8; raise ValueError if it is not JSON, or exceeds the limits above."""
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, int) and abs(item) >= MAX_INTEGER:
            raise ValueError("it has an integer of 2**64 or more")
        children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        waiting += [(child, depth + 1) for child in children]
    return value
