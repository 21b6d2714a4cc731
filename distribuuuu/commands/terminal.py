"""Standard output and standard error of a command."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator


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
