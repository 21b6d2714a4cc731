"""Exclusive file locks: one process does the work while the others wait for its result."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # the module is optional

# Seconds to wait for another process, which may be suspended or have lost its disk, before doing the work as well.
LONGEST_WAIT_S = 600.0
POLL_S = 0.02


def lock_file(descriptor: int, timeout_s: float) -> bool:
    """Lock an open file or folder until it is closed or the process ends.

    Returns:
        False if another process holds the lock until the timeout; True also where locks are not supported.
    """
    deadline = time.monotonic() + timeout_s
    while fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        except OSError:  # a file system without locks
            break
    return True


@contextlib.contextmanager
def take_turn(file: Path, timeout_s: float = LONGEST_WAIT_S) -> Iterator[int]:
    """Wait until no other process creates `file`, then yield the time in ns by the clock of its file system.

    Raises:
        OSError: the folder cannot be written to.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "ab") as lock:
        lock_file(lock.fileno(), timeout_s)
        # The disk may belong to another machine, whose clock sets the modification times of folders.
        os.utime(lock.name)
        yield os.fstat(lock.fileno()).st_mtime_ns
