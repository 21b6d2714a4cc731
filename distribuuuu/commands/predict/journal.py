"""The partial output of a prediction: an append-only file of finished chunks, from which a killed job resumes.

Its lines are JSON: first the hash of the job, then the text of the rows and the broken images of each chunk.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from distribuuuu.commands.output import check_out_file
from distribuuuu.config import ConfigError
from distribuuuu.data.datasets.table_file import csv_line
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.locks import lock_file
from distribuuuu.files.untrusted import InvalidFileError, open_regular, parse_json, printable, untrusted

_FIX = "fix: remove it, or name another file"


def check_output_file(out: Path) -> None:
    """Raise ConfigError if a path cannot be that of a new output file, or of one to resume."""
    check_out_file(out)
    if out.suffix not in (".csv", ".jsonl"):
        raise ConfigError(f"--out: got {out}; expected a file name that ends with .csv or .jsonl")
    if os.path.lexists(out):
        raise ConfigError(f"--out: {out} exists already; {_FIX}")


class Journal:
    """The finished chunks of an output file, locked against other processes until it is closed.

    Args:
        out: the output file.
        job: a hash of what the rows depend on; a partial file of another job is refused.
        header: the first line of the output file, or an empty text.

    Attributes:
        num_chunks, num_broken: finished chunks, and broken images in them.

    Raises:
        ConfigError: the partial file belongs to another job, is in use, or cannot be written.
    """

    def __init__(self, out: Path, job: str, header: str):
        self.out, self.path, self._header = out, out.with_name(f"{out.name}.partial"), header
        self.num_chunks = self.num_broken = 0
        with self._explained():
            if os.path.lexists(self.path):
                open_regular(self.path).close()
            self._file = open(self.path, "a+b", buffering=0)
            if not lock_file(self._file.fileno(), timeout_s=0.0):
                raise ConfigError(f"--out: another process writes {self.path}; fix: wait for it, or name another file")
            if not self._file.tell():
                self._append(job)
            with untrusted(self.path, "partial output"):
                end = sum(map(len, self._lines()))
                found = parse_json(next(self._lines(), b""))
                for _, errors in self._chunks():
                    self.num_chunks, self.num_broken = self.num_chunks + 1, self.num_broken + len(errors)
            if found != job:
                what = f"{self.path} belongs to a prediction with another model, other options or other images"
                raise ConfigError(f"--out: {what}; fix: remove it to start over, or name another file")
            self._file.truncate(end)

    def _lines(self) -> Iterator[bytes]:
        """Yield the complete lines; a kill may have cut the last one."""
        with open(self.path, "rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))

    def _chunks(self) -> Iterator[tuple[str, list[list[str]]]]:
        lines = self._lines()
        next(lines)
        for line in lines:
            rows, errors = parse_json(line)
            yield rows, errors

    def append(self, rows: str, errors: list[list[str]]) -> None:
        """Add the next chunk: the text of its rows, and [path, cause] of each broken image."""
        with self._explained():
            self._append([rows, errors])
        self.num_chunks, self.num_broken = self.num_chunks + 1, self.num_broken + len(errors)

    def _append(self, content: Any) -> None:
        line = json.dumps(content).encode() + b"\n"
        while line:
            line = line[self._file.write(line) :]

    def finish(self) -> None:
        """Write the output file and, if images are broken, the file that lists them; remove the partial file."""
        with self._explained(), untrusted(self.path, "partial output"):
            errors = self.out.with_name(f"{self.out.name}.errors.csv")
            errors.unlink(missing_ok=True)
            if self.num_broken:
                broken = (csv_line(one) for _, found in self._chunks() for one in found)
                _write(errors, csv_line(["path", "error"]), broken)
            _write(self.out, self._header, (rows for rows, _ in self._chunks()))
            self.path.unlink()

    def close(self) -> None:
        """Release the lock."""
        self._file.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise an error of the block about a file as ConfigError."""
        try:
            yield
        except InvalidFileError as error:
            raise ConfigError(f"--out: {error}; {_FIX}") from error
        except OSError as error:
            fix = "fix: make room or name a file in a folder that is writable, then rerun the command"
            kept = f"finished images are kept in {self.path}; " if self.num_chunks else ""
            raise ConfigError(f"--out: {self.out} cannot be written: {error.strerror or error}; {kept}{fix}") from error


def print_rows(rows: str) -> None:
    """Print the text of rows; on a terminal with escapes for what would control it."""
    try:
        shown = printable(rows, keep="\n") if sys.stdout.isatty() else rows
        sys.stdout.buffer.write(shown.encode(errors="surrogateescape"))
        sys.stdout.buffer.flush()
    except OSError as error:
        raise ConfigError(f"standard output cannot be written: {error.strerror or error}") from error


def _write(path: Path, header: str, lines: Iterable[str]) -> None:
    with replacing(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.write(header)
        file.writelines(lines)
