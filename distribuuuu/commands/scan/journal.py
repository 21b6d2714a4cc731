"""The partial output of a pass over images: an append-only file of finished chunks, from which a killed job resumes.

Its lines are JSON: first the hash of the job, then the rows, as text, and the broken images of each chunk.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distribuuuu.commands.output import check_out_file
from distribuuuu.config import ConfigError
from distribuuuu.data.datasets.table_file import csv_line
from distribuuuu.files.atomic_file import open_for_writing, replacing
from distribuuuu.files.locks import lock_file
from distribuuuu.files.untrusted import InvalidFileError, parse_json, untrusted

_FIX = "fix: remove it, or name another file"


def check_output_file(out: Path, *endings: str) -> None:
    """Raise ConfigError if a path cannot be that of a new output file, or of one to resume."""
    check_out_file(out)
    if out.suffix not in endings:
        raise ConfigError(f"--out: got {out}; expected a file name that ends with {' or '.join(endings)}")
    if os.path.lexists(out):
        raise ConfigError(f"--out: {out} exists already; {_FIX}")


class Journal:
    """The finished chunks of an output file, locked against other processes until it is closed.

    Args:
        job: a hash of what the rows depend on; a partial file of another job is refused.

    Attributes:
        num_chunks: finished chunks.
        broken: [path, cause] of each broken image in them.

    Raises:
        ConfigError: the partial file belongs to another job, is in use, or cannot be written.
    """

    def __init__(self, out: Path, job: str):
        self.out, self.path = out, out.with_name(f"{out.name}.partial")
        self.num_chunks, self.broken = 0, list[list[str]]()
        with self._explained():
            self._file = open_for_writing(self.path, "a+b", buffering=0)
            if not lock_file(self._file.fileno(), timeout_s=0.0):
                raise ConfigError(f"--out: another process writes {self.path}; fix: wait for it, or name another file")
            if not self._file.tell():
                self._append(job)
            with untrusted(self.path, "partial output"):
                lines = self._lines()
                found = parse_json(next(lines, b""))
                for _, errors in map(parse_json, lines):
                    self._count(errors)
            if found != job:
                what = f"{self.path} has rows of another model, other options or other images"
                raise ConfigError(f"--out: {what}; {_FIX}")
            self._file.truncate(sum(map(len, self._lines())))

    def _lines(self) -> Iterator[bytes]:
        """Yield the complete lines; a kill may have cut the last one."""
        with open(self.path, "rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))

    def _count(self, errors: list[list[str]]) -> None:
        self.num_chunks += 1
        self.broken += errors

    def append(self, rows: str, errors: list[list[str]]) -> None:
        """Add the next chunk: the text of its rows, and [path, cause] of each broken image."""
        with self._explained():
            self._append([rows, errors])
        self._count(errors)

    def _append(self, content: Any) -> None:
        line = json.dumps(content).encode() + b"\n"
        while line:
            line = line[self._file.write(line) :]

    def finish(self, header: str) -> None:
        """Write the output file and, if images are broken, the file that lists them; remove the partial file."""
        texts: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
        errors = self.out.with_name(f"{self.out.name}.errors.csv")
        with self._explained(), untrusted(self.path, "partial output"):
            errors.unlink(missing_ok=True)
            if self.broken:
                with replacing(errors, "w", **texts) as file:
                    file.writelines(map(csv_line, (["path", "error"], *self.broken)))
            with replacing(self.out, "w", **texts) as file:
                file.write(header)
                file.writelines(rows for rows, _ in map(parse_json, itertools.islice(self._lines(), 1, None)))
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
