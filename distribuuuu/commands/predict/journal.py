"""The partial output of a prediction: an append-only file of finished chunks, from which a killed job resumes.

Each line is a CRC-32 and a record in JSON: first the job, then the rows and the broken images of each chunk, in order.
Reading ends at the first line that is incomplete or damaged; it and those after it are predicted again.
"""

import contextlib
import itertools
import json
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.json_file import load_json
from distribuuuu.data.datasets.table_file import csv_line
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.locks import lock_file
from distribuuuu.files.untrusted import open_regular, parse_json, printable


def partial_path(out: Path) -> Path:
    """Return the file of the finished chunks of an output file."""
    return out.with_name(f"{out.name}.partial")


def finished_path(out: Path) -> Path:
    """Return the file that says which prediction an output file holds."""
    return out.with_name(f".{out.name}.finished")


def check_output_file(out: Path) -> None:
    """Raise ConfigError if a path cannot be that of a new output file, of one to resume, or of a finished one."""
    if out.suffix not in (".csv", ".jsonl"):
        raise ConfigError(f"--out: got {out}; expected a file name that ends with .csv or .jsonl")
    if not out.parent.is_dir():
        raise ConfigError(f"--out: no such folder: {out.parent}")
    if out.is_dir():
        raise ConfigError(f"--out: {out} is a folder; expected a file name")
    if out.exists() and not partial_path(out).exists() and not finished_path(out).exists():
        raise ConfigError(f"--out: {out} exists; fix: remove it, or name another file")


def find_finished(out: Path, job: dict[str, Any]) -> int | None:
    """Return the number of broken images of a finished job; None if the output file does not exist, or is partial.

    Raises:
        ConfigError: the output file is that of another job, or was changed since.
    """
    if not out.exists() or partial_path(out).exists():
        return None
    fix = "fix: remove it, or name another file"
    found = load_json(finished_path(out))
    if not isinstance(found, dict) or not isinstance(found.get("job"), dict) or type(found.get("broken")) is not int:
        raise ConfigError(f"--out: {out} exists; {fix}")
    if changed := _list_differences(job, found["job"]):
        raise ConfigError(f"--out: {out} exists: a prediction with another {', '.join(changed)}; {fix}")
    if found.get("crc32") != _checksum(out):
        raise ConfigError(f"--out: {out} exists, and was changed since it was written; {fix}")
    return found["broken"]


def _list_differences(job: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [printable(name) for name in {**job, **other} if job.get(name) != other.get(name)]


def _checksum(path: Path) -> str:
    checksum = 0
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return f"{checksum:08x}"


class Journal:
    """The finished chunks of an output file, locked against other processes until it is closed.

    Args:
        out: the output file.
        job: what the rows depend on, by name; a partial file of another job is refused.
        header: the first line of the output file, or an empty text.

    Attributes:
        num_chunks, num_broken: finished chunks, and broken images in them.

    Raises:
        ConfigError: the partial file belongs to another job, is in use, or cannot be written.
    """

    def __init__(self, out: Path, job: dict[str, Any], header: str):
        self.out, self.path = out, partial_path(out)
        self._header, self._job = header, job
        self.num_chunks = self.num_broken = 0
        with self._explained():
            if os.path.lexists(self.path) and not self.path.is_file():
                raise ConfigError(f"--out: {self.path} is not a regular file; fix: remove it, or name another file")
            self._file = open(self.path, "a+b", buffering=0)
            if not lock_file(self._file.fileno(), timeout_s=0.0):
                raise ConfigError(f"--out: another process writes {self.path}; fix: wait for it, or name another file")
            if not self._file.tell():
                self._append(job)
            records = self._valid_records()
            found = next(records, None)
            if found is None:
                raise ConfigError(f"--out: {self.path} is not a partial output; fix: remove it, or name another file")
            if changed := _list_differences(job, found):
                what = f"{self.path} belongs to a prediction with another {', '.join(changed)}"
                raise ConfigError(f"--out: {what}; fix: remove it to start over, or name another file")
            broken = [len(record["errors"]) for record in records]
            self.num_chunks, self.num_broken = len(broken), sum(broken)
            self._file.truncate(self._end)

    def _valid_records(self) -> Iterator[dict[str, Any]]:
        """Yield the records up to the first damaged line, and note where they end."""
        self._end = 0
        with open(self.path, "rb") as file:
            for line in file:
                checksum, _, data = line.partition(b" ")
                if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(data[:-1]):
                    return
                try:
                    record = parse_json(data)
                except ValueError:  # not written by this class, although the checksum is right
                    return
                if not isinstance(record, dict) or self._end and not _is_chunk(record):
                    return
                self._end += len(line)
                yield record

    def _chunks(self) -> Iterator[dict[str, Any]]:
        with open(self.path, "rb") as file:
            yield from (json.loads(line.partition(b" ")[2]) for line in itertools.islice(file, 1, None))

    def append(self, rows: str, errors: list[list[str]]) -> None:
        """Add the next chunk: the text of its rows, and [path, cause] of each broken image."""
        with self._explained():
            self._append({"rows": rows, "errors": errors})
        self.num_chunks, self.num_broken = self.num_chunks + 1, self.num_broken + len(errors)

    def _append(self, record: dict[str, Any]) -> None:
        data = json.dumps(record).encode()
        line = b"%08x %s\n" % (zlib.crc32(data), data)
        while line:  # what a full disk leaves of a line is not valid
            line = line[self._file.write(line) :]

    def finish(self) -> None:
        """Write the output file and, if images are broken, the file that lists them; remove the partial file."""
        errors = self.out.with_name(f"{self.out.name}.errors.csv")
        with self._explained():
            if self.num_broken:
                lines = (csv_line(error) for chunk in self._chunks() for error in chunk["errors"])
                _write(errors, csv_line(["path", "error"]), lines)
            else:
                errors.unlink(missing_ok=True)
            _write(self.out, self._header, (chunk["rows"] for chunk in self._chunks()))
            found = {"job": self._job, "broken": self.num_broken, "crc32": _checksum(self.out)}
            _write(finished_path(self.out), json.dumps(found) + "\n", iter(()))
            self.path.unlink()

    def close(self) -> None:
        """Release the lock."""
        self._file.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise an OSError of the block as ConfigError."""
        try:
            yield
        except OSError as error:
            fix = "fix: make room or name a file in a folder that is writable, then rerun the command"
            kept = f"finished images are kept in {self.path}; " if self.num_chunks else ""
            raise ConfigError(f"--out: {self.out} cannot be written: {error.strerror or error}; {kept}{fix}") from error


def _is_chunk(record: dict[str, Any]) -> bool:
    """Return whether a record of the partial file has the types of a chunk."""
    errors = record.get("errors")
    is_list = isinstance(errors, list) and all(
        isinstance(error, list) and len(error) == 2 and all(isinstance(text, str) for text in error) for error in errors
    )
    return is_list and isinstance(record.get("rows"), str)


class StandardOutput:
    """Standard output in place of a journal: nothing to resume, broken images on standard error only."""

    num_chunks = 0

    def __init__(self, header: str):
        self.num_broken = 0
        self.append(header, [])

    def append(self, rows: str, errors: list[list[str]]) -> None:
        """Print the rows of the next chunk."""
        self.num_broken += len(errors)
        try:
            shown = printable(rows, keep="\n") if sys.stdout.isatty() else rows
            sys.stdout.buffer.write(shown.encode(errors="surrogateescape"))
            sys.stdout.buffer.flush()
        except OSError as error:
            raise ConfigError(f"standard output cannot be written: {error.strerror or error}") from error

    def finish(self) -> None:
        """Do nothing: everything has been printed."""

    close = finish


def _write(path: Path, header: str, lines: Iterator[str]) -> None:
    with replacing(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.writelines(itertools.chain([header], lines))
