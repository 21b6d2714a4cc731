"""Random mutations of files, reproducible by seed, and the tally of their verdicts for the fuzzers."""

import argparse
import collections
import faulthandler
import logging
import random
import resource
import signal
import struct
import tempfile
import traceback
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError

# Seconds for a case, and growth of the memory in MiB, that are violations.
MAX_S, MAX_GROWTH = 20, 512
TEXT = b"this is not the file that you are looking for\n"
_EXTREMES = (0, 1, 0x7F, 0x80, 0xFF)


def flip_bits(data: bytearray, rng: random.Random) -> None:
    """Flip one or several bits."""
    for _ in range(rng.choice((1, 1, 1, 20))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def set_bytes(data: bytearray, rng: random.Random) -> None:
    """Set one or several bytes to random values."""
    for _ in range(rng.choice((1, 1, 20))):
        data[rng.randrange(len(data))] = rng.choice((*_EXTREMES, rng.randrange(256)))


def truncate(data: bytearray, rng: random.Random) -> None:
    """Truncate the file."""
    del data[rng.choice((len(data) - 1, rng.randrange(len(data)))) :]


def insert(data: bytearray, rng: random.Random) -> None:
    """Insert random bytes."""
    place = rng.randrange(len(data) + 1)
    data[place:place] = rng.randbytes(rng.choice((1, 4, 100)))


def delete(data: bytearray, rng: random.Random) -> None:
    """Delete a block."""
    place = rng.randrange(len(data))
    del data[place : place + rng.choice((1, 4, 100))]


def zero_block(data: bytearray, rng: random.Random) -> None:
    """Overwrite a block with zeros."""
    place = rng.randrange(len(data))
    size = min(rng.choice((4, 64, 4096)), len(data) - place)
    data[place : place + size] = bytes(size)


def duplicate_block(data: bytearray, rng: random.Random) -> None:
    """Duplicate a block, overwriting the bytes after it or moving them."""
    place, size = rng.randrange(len(data)), rng.choice((4, 64, 512))
    block = data[place : place + size]
    end = place + len(block)
    data[end : end + rng.choice((0, len(block)))] = block


def swap_blocks(data: bytearray, rng: random.Random) -> None:
    """Swap two blocks of the same size."""
    size = min(rng.choice((4, 64, 512)), len(data) // 2)
    one, other = rng.randrange(len(data) - 2 * size + 1), len(data) - size
    data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]


def change_header(data: bytearray, rng: random.Random) -> None:
    """Change a byte or a 32-bit number in the headers of a zip file, or in the first bytes of another file."""
    places = [place for place in _zip_headers(data) if place < len(data)] or range(min(len(data), 600))
    place = places[rng.randrange(len(places))]
    if rng.random() < 0.5:
        data[place] = rng.choice((*_EXTREMES, rng.randrange(256)))
    else:
        number = struct.pack("<I", rng.choice((0, 1, 2**31 - 1, 2**32 - 1, rng.randrange(2**32))))
        data[place : place + 4] = number[: len(data) - place]


def append(data: bytearray, rng: random.Random) -> None:
    """Append random bytes."""
    data += rng.randbytes(rng.choice((1, 50, 70_000)))


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip_bits, set_bytes, truncate, insert, delete, zero_block, duplicate_block, swap_blocks, change_header,
    change_header, change_header, append,
)  # fmt: skip


def damage(path: Path, whole: bytes, others: list[bytes], rng: random.Random) -> str:
    """Replace a file by a damaged version; return the names of the mutations.

    Args:
        path: the file.
        whole: its undamaged content.
        others: contents of other files, one of which may replace it.
        rng: the source of randomness.
    """
    if path.is_dir():
        path.rmdir()
    if rng.random() < 0.03:
        kind = rng.choice(("text", "empty", "directory", "another file"))
        path.unlink(missing_ok=True)
        if kind == "directory":
            path.mkdir()
        else:
            path.write_bytes({"text": TEXT, "empty": b"", "another file": rng.choice(others)}[kind])
        return kind
    data, done = bytearray(whole), []
    for _ in range(rng.choice((1, 1, 1, 2))):
        if data:
            mutate = rng.choice(MUTATIONS)
            mutate(data, rng)
            done.append(mutate.__name__)
    path.write_bytes(data)
    return ", ".join(done)


def count_verdicts(trials: Iterable[tuple[str, str, str]]) -> tuple[dict[str, collections.Counter], list[str]]:
    """Count the verdicts of mutations by file; return the counts and the violations.

    Args:
        trials: the file, the mutation and the verdict of each; a verdict may have details after a colon.
    """
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    violations = []
    for number, (name, mutation, verdict) in enumerate(trials):
        counts[name][verdict.partition(":")[0]] += 1
        if verdict.startswith("violation"):
            violations.append(f"mutation {number} of {name}, {mutation}: {verdict}")
    return counts, violations


@dataclass
class Subject:
    """A file to damage and its reader.

    Attributes:
        path: the file.
        whole: its content.
        read: reads it; raises ConfigError, or AssertionError for a wrong result.
        craft: returns a changed content that is valid in form, or None.
        name: what an error has to name; empty: the folder of the files.
    """

    path: Path
    whole: bytes
    read: Callable[[], Any]
    craft: Callable[[bytes, random.Random], bytes] | None = None
    name: str = ""


def run_trials(subjects: Sequence[Subject], folder: Path, number: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Damage, read and restore files; yield the file, the mutation and the verdict of each trial.

    A case of more than MAX_S, and growth of the memory by more than MAX_GROWTH, are violations.
    """
    for subject in subjects:
        subject.read()
    chance, before = random.Random(seed), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(number):
        subject = chance.choice(subjects)
        if subject.craft and chance.random() < 0.5:
            subject.path.write_bytes(subject.craft(subject.whole, chance))
            mutation = "crafted"
        else:
            mutation = damage(subject.path, subject.whole, [other.whole for other in subjects], chance)
        verdict = verdict_of(subject.read, subject.name or str(folder))
        if subject.path.is_dir():
            subject.path.rmdir()
        subject.path.parent.mkdir(parents=True, exist_ok=True)
        subject.path.write_bytes(subject.whole)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        if grown > MAX_GROWTH:
            verdict = f"violation: the memory has grown by {grown} MiB"
        yield str(subject.path.relative_to(folder)), mutation, verdict


class HangError(BaseException):
    """A case that does not end."""


def end_case(*_: Any) -> None:
    """Raise HangError: the handler of the alarm."""
    raise HangError(f"more than {MAX_S} s")


def verdict_of(read: Callable[[], Any], name: str) -> str:
    """Return 'read', 'refused' or 'violation: ...'."""
    previous = signal.signal(signal.SIGALRM, end_case)
    signal.alarm(MAX_S)
    try:
        read()
    except ConfigError as error:
        return "refused" if name in str(error) else f"violation: {name} is not named: {error}"
    except BaseException:
        return f"violation: {traceback.format_exc()}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    return "read"


def run_fuzzer(description: str, *trials: Callable[[Path, int, int], tuple[dict, list[str]]]) -> int:
    """Parse --number and --seed, run the trials, print their verdicts and violations, and return the status."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=5000, help="number of mutations")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    faulthandler.enable()
    logging.getLogger("distribuuuu").setLevel(logging.ERROR)
    violations: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for trial in trials:
            (place := Path(folder) / trial.__name__).mkdir()
            counts, found = trial(place, args.number, args.seed)
            violations += found
            for name, verdicts in sorted(counts.items()):
                print(f"{name}: {', '.join(f'{verdict} {count}' for verdict, count in sorted(verdicts.items()))}")
    print(*violations, sep="\n")
    print(f"{args.number} mutations of each kind with seed {args.seed}: {len(violations)} violations")
    return 1 if violations else 0


def _zip_headers(data: bytearray) -> list[int]:
    """Return the byte positions of a zip file's local headers and directory."""
    if not data.startswith(b"PK\3\4"):
        return []
    import io

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            starts, directory = [entry.header_offset for entry in archive.infolist()], archive.start_dir
    except Exception:  # by an earlier mutation
        return []
    return [place for start in starts for place in range(start, start + 30)] + [*range(directory, len(data))] * 2
