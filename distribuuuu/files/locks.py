"""Locks of files and folders by the kernel, which end with their process, and the description of a lock's holder."""

import contextlib
import datetime
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from distribuuuu.files.atomic_file import open_for_writing
from distribuuuu.files.untrusted import printable

# Seconds to wait for another process, which may be suspended or have lost its disk, before doing the work as well.
LONGEST_WAIT_S = 600.0
POLL_S = 0.02
# Errors of file systems without locks.
_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
# Characters of a description that are read.
_MAX_CHARACTERS = 400


def try_lock(file: int | IO, is_inherited: bool = True) -> bool | None:
    """Lock an open file or folder until it is closed or the process ends; return whether it is locked.

    False: another process holds the lock; None: the file system has no locks. With `is_inherited`, child processes that
    inherit the file hold the lock too, and may live longer; without, the file must be open for writing.
    """
    lock = fcntl.flock if is_inherited else fcntl.lockf
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def lock_file(descriptor: int, timeout_s: float) -> bool:
    """Lock as `try_lock`, but wait for other processes; False: the time is over. True also if there are no locks."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(OSError):
        while try_lock(descriptor) is False:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
    return True


@contextlib.contextmanager
def take_turn(file: Path, timeout_s: float = LONGEST_WAIT_S) -> Iterator[int]:
    """Wait until no other process creates `file`, then yield the time in ns by the clock of its file system."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open_for_writing(file.with_suffix(".lock"), "ab") as lock:
        lock_file(lock.fileno(), timeout_s)
        # The disk may belong to another machine, whose clock sets the modification times of folders.
        os.utime(lock.name)
        yield os.fstat(lock.fileno()).st_mtime_ns


def is_at(file: IO, path: Path) -> bool:
    """Tell whether an open file is still the one at its path: the holder of a lock may delete it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def write_holder(file: IO, job: str) -> None:
    """Replace the content of a locked file by the description of this process; on a full disk it has none."""
    now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.write(f"host {socket.gethostname()}, pid {os.getpid()}, started {now}{job and f', {job}'}\n")
        file.flush()
        os.fsync(file.fileno())


def read_holder(file: IO) -> str:
    """Return the description of a lock's holder; an empty one if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        file.seek(0)
        return printable(file.read(_MAX_CHARACTERS).strip())
    return ""


def read_stat(pid: int, field: int) -> str | None:
    """Return a field of a process in proc(5), 0: state, 19: start; None: the process has ended or is unknown."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[field]
    return None
