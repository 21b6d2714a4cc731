"""Exclusive file locks: one process does the work while the others wait for its result; new folders, all or nothing."""

import contextlib
import os
import shutil
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


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `target`, which takes its name when the block ends; else it is deleted.

    Temporary folders that killed processes have left are deleted too: nobody holds their locks.

    Args:
        target: a path that does not exist, or is an empty folder.

    Raises:
        OSError: it cannot be written.
    """
    parent, prefix = target.absolute().parent, f".{target.absolute().name}."
    parent.mkdir(parents=True, exist_ok=True)
    for entry in sorted(parent.iterdir()) if fcntl else ():
        if entry.name.startswith(prefix) and entry.suffix == ".new" and entry.is_dir() and not entry.is_symlink():
            with contextlib.suppress(OSError), _locked(entry):
                shutil.rmtree(entry, ignore_errors=True)
    temporary = parent / f"{prefix}{os.urandom(8).hex()}.new"
    temporary.mkdir()
    try:
        with _locked(temporary):
            yield temporary
            os.replace(temporary, target.absolute())
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; raises BlockingIOError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not lock_file(descriptor, timeout_s=0.0):
            raise BlockingIOError(f"{folder} is in use")
        yield
    finally:
        os.close(descriptor)
