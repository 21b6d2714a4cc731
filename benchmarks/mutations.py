"""Random damage to files, the same for the same seed."""

import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

TEXT = b"this is not the file that you are looking for\n"
_EXTREMES = (0, 1, 0x7F, 0x80, 0xFF)


def flip_bits(data: bytearray, chance: random.Random) -> None:
    """Flip one bit, or some."""
    for _ in range(chance.choice((1, 1, 1, 20))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def set_bytes(data: bytearray, chance: random.Random) -> None:
    """Set one byte, or some, to any value."""
    for _ in range(chance.choice((1, 1, 20))):
        data[chance.randrange(len(data))] = chance.choice((*_EXTREMES, chance.randrange(256)))


def truncate(data: bytearray, chance: random.Random) -> None:
    """Cut the end off."""
    del data[chance.choice((len(data) - 1, chance.randrange(len(data)))) :]


def insert(data: bytearray, chance: random.Random) -> None:
    """Insert random bytes."""
    place = chance.randrange(len(data) + 1)
    data[place:place] = chance.randbytes(chance.choice((1, 4, 100)))


def delete(data: bytearray, chance: random.Random) -> None:
    """Delete a block."""
    place = chance.randrange(len(data))
    del data[place : place + chance.choice((1, 4, 100))]


def zero_block(data: bytearray, chance: random.Random) -> None:
    """Write zeros over a block."""
    place = chance.randrange(len(data))
    size = min(chance.choice((4, 64, 4096)), len(data) - place)
    data[place : place + size] = bytes(size)


def duplicate_block(data: bytearray, chance: random.Random) -> None:
    """Repeat a block, in place of what follows it or before it."""
    place, size = chance.randrange(len(data)), chance.choice((4, 64, 512))
    block = data[place : place + size]
    end = place + len(block)
    data[end : end + chance.choice((0, len(block)))] = block


def swap_blocks(data: bytearray, chance: random.Random) -> None:
    """Exchange two blocks of the same size."""
    size = min(chance.choice((4, 64, 512)), len(data) // 2)
    one, other = chance.randrange(len(data) - 2 * size + 1), len(data) - size
    data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]


def change_header(data: bytearray, chance: random.Random) -> None:
    """Change a byte or a 32-bit number of a zip's directory and local headers, or else of the first bytes."""
    places = _zip_headers(data) or range(min(len(data), 600))
    place = places[chance.randrange(len(places))]
    if chance.random() < 0.5:
        data[place] = chance.choice((*_EXTREMES, chance.randrange(256)))
    else:
        number = struct.pack("<I", chance.choice((0, 1, 2**31 - 1, 2**32 - 1, chance.randrange(2**32))))
        data[place : place + 4] = number[: len(data) - place]


def append(data: bytearray, chance: random.Random) -> None:
    """Add random bytes at the end."""
    data += chance.randbytes(chance.choice((1, 50, 70_000)))


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip_bits, set_bytes, truncate, insert, delete, zero_block, duplicate_block, swap_blocks, change_header,
    change_header, change_header, append,
)  # fmt: skip


def damage(path: Path, whole: bytes, others: list[bytes], chance: random.Random) -> str:
    """Put a damaged version of a file in its place, and return what was done."""
    if path.is_dir():
        path.rmdir()
    if chance.random() < 0.03:
        kind = chance.choice(("text", "empty", "directory", "another file"))
        path.unlink(missing_ok=True)
        if kind == "directory":
            path.mkdir()
        else:
            path.write_bytes({"text": TEXT, "empty": b"", "another file": chance.choice(others)}[kind])
        return kind
    data, done = bytearray(whole), []
    for _ in range(chance.choice((1, 1, 1, 2))):
        if data:
            mutate = chance.choice(MUTATIONS)
            mutate(data, chance)
            done.append(mutate.__name__)
    path.write_bytes(data)
    return ", ".join(done)


def _zip_headers(data: bytearray) -> list[int]:
    """Return the places of a zip's bytes that are no content: of the local headers and of the directory."""
    if not data.startswith(b"PK\3\4"):
        return []
    import io

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            starts, directory = [entry.header_offset for entry in archive.infolist()], archive.start_dir
    except Exception:  # damaged before
        return []
    return [place for start in starts for place in range(start, start + 30)] + [*range(directory, len(data))] * 2
