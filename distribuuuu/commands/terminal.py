"""Standard output and standard error of a command, and tables in them."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence

from distribuuuu.config import ConfigError, Problem
from distribuuuu.files.untrusted import printable

# Values of --format, and the columns of a text.
FORMATS = ("text", "json")
WIDTH = 80


class _TolerantStream(io.TextIOWrapper):
    """Standard error that drops what cannot be written, e.g. because its reader has exited."""

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Write the buffered text, or drop it."""
        with contextlib.suppress(OSError):
            super().flush()


def open_standard_streams() -> None:
    """Open those of descriptors 0 to 2 that are closed, and ignore write errors on standard error.

    Otherwise the next opened file would get the descriptor, and the output that is meant for the standard stream.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        raw, encoding = io.BufferedWriter(io.FileIO(2, "w", closefd=False)), getattr(sys.stderr, "encoding", "utf-8")
        sys.stderr = _TolerantStream(raw, encoding=encoding, errors="backslashreplace", line_buffering=True)


@contextlib.contextmanager
def ending_with_reader() -> Iterator[None]:
    """End the process without an error if the reader of what the block prints, e.g. `head`, has gone.

    The block only prints: any connection that its other side closes would end the process too.
    """
    name = getattr(signal, "SIGPIPE", None)  # None: Windows
    previous = name and signal.signal(name, signal.SIG_DFL)
    try:
        yield
        sys.stdout.flush()
    finally:
        if name:
            signal.signal(name, previous)


def align_columns(lines: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return the lines of a table with two spaces between its columns, without trailing spaces.

    Args:
        lines: the cells of each line; those after the last column are appended as they are.
        sides: '<' (left) or '>' (right) for each column.
    """
    formats = [f"{side}{max(len(line[column]) for line in lines)}" for column, side in enumerate(sides)]
    table = ([*map(format, line, formats), *line[len(sides) :]] for line in lines)
    return ["  ".join(cells).rstrip() for cells in table]


def print_report(text: str) -> None:
    """Print a text, with escapes for what the encoding of standard output lacks.

    Raises:
        ConfigError: it cannot be written.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with ending_with_reader():
            print(printable(text, keep="\n"), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the rest of the buffer, which is written at exit
        message = f"cannot be written: {error.strerror}; fix: redirect it to another file"
        raise ConfigError(Problem("standard output", message)) from error
