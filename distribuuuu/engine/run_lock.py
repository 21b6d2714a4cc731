"""A lock on OUT_DIR: one training at a time writes to a folder.

The lock is the kernel's on OUT_DIR/.lock: it ends with its process, even after SIGKILL, and network file systems share
it with other hosts. The content of the file only describes the holder.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from distribuuuu.config import ConfigError
from distribuuuu.config.run_files import LOCK
from distribuuuu.distributed import comm as dist
from distribuuuu.files import locks
from distribuuuu.files.atomic_file import open_for_writing
from distribuuuu.launch.detect import describe_job

logger = logging.getLogger(__name__)

# Seconds to wait for a training that may be exiting, e.g. after its launcher was killed.
PATIENCE_S = 10.0
POLL_S = 0.2
# Fields of the file that describe the holder.
_FIELDS: dict[str, type] = {"host": str, "pid": int, "started": str, "job": str, "restarts": int}


class OutDirLocked(ConfigError):
    """Another training writes to OUT_DIR, or the lock file cannot be written; raised on every process."""

    on_all_processes = True


@contextlib.contextmanager
def lock_out_dir(out_dir: str | os.PathLike) -> Iterator[Callable[[], str | None]]:
    """Lock an existing folder for the length of the block. Every process must call it.

    Yields a function for the main process, see `RunLock.find_loss`.

    Raises:
        OutDirLocked: another training holds the lock, or the folder is not writable.
    """
    path = Path(out_dir) / LOCK
    file, problem = _acquire(path) if dist.is_main() else (None, None)
    if problem := dist.broadcast_object(problem):
        raise OutDirLocked(problem)
    lock = RunLock(file, path) if file else None
    try:
        yield lock.find_loss if lock else lambda: None
    finally:
        if lock:
            lock.release()


def is_shared(out_dir: str | os.PathLike) -> bool:
    """Tell whether every process sees the lock of the main process, and so its checkpoints. All must call it."""
    # Not opened: the kernel releases the lock when its holder closes any descriptor of the file.
    path, deadline = Path(out_dir, LOCK), time.monotonic() + PATIENCE_S
    expected = dist.broadcast_object(path.exists() and path.stat().st_mtime_ns)
    while not (is_seen := path.exists() and path.stat().st_mtime_ns == expected) and time.monotonic() < deadline:
        time.sleep(POLL_S)  # on network file systems this takes seconds
    return all(dist.gather_objects(is_seen))


class RunLock:
    """A lock that this process holds on a folder, which may be deleted or replaced meanwhile.

    Args:
        file: the open and locked file.
        path: its path.
    """

    def __init__(self, file: IO, path: Path):
        self._file, self._path, self._folder = file, path, os.stat(path.parent)
        self._own = locks.read_holder(file, _FIELDS)
        self._changing = threading.Lock()

    def find_loss(self) -> str | None:
        """Return why this process must not write to the folder any more; None if it may.

        A deleted lock is taken again, and a deleted folder is created again, with a warning. Any thread may call it.
        The last checkpoint may still be in progress when an error has released the lock; it is not lost.
        """
        with self._changing:
            if self._file.closed:
                return None
            try:
                return None if locks.is_at(self._file, self._path) else self._lock_again()
            except OSError:  # e.g. of a network file system; the write will tell
                return None

    def _lock_again(self) -> str | None:
        folder = self._path.parent
        is_same = folder.exists() and os.path.samestat(os.stat(folder), self._folder)
        if not is_same and folder.exists() and any(folder.iterdir()) and not self._is_copied():
            return f"OUT_DIR: {folder} was replaced by another folder, which is not empty"
        folder.mkdir(parents=True, exist_ok=True)
        file, problem = _acquire(self._path, patience_s=0.0)
        if file is None:
            return problem
        what = f"{self._path} was deleted" if is_same else f"{folder} was moved, deleted or replaced"
        logger.warning("OUT_DIR: %s during this training; it is locked again, and later files are written there", what)
        self._file.close()
        self._file, self._folder = file, os.stat(folder)
        return None

    def _is_copied(self) -> bool:
        """Tell whether the folder is a copy of that of this run, which has its lock file."""
        with contextlib.suppress(OSError), open(self._path, encoding="utf-8") as file:
            return bool(self._own) and locks.read_holder(file, _FIELDS) == self._own
        return False

    def release(self) -> None:
        """Delete and unlock the file."""
        with self._changing, contextlib.suppress(OSError), self._file:
            if locks.is_at(self._file, self._path):
                os.unlink(self._path)


def _acquire(path: Path, patience_s: float | None = None) -> tuple[IO | None, str | None]:
    """Return the open and locked file, or the problem after `patience_s` seconds (PATIENCE_S)."""
    patience_s = PATIENCE_S if patience_s is None else patience_s
    deadline, has_warned = time.monotonic() + patience_s, False
    while True:
        try:
            file = open_for_writing(path, "a+", encoding="utf-8")
            is_locked = locks.try_lock(file, is_inherited=False)  # loader workers may live longer
        except OSError as error:
            return None, f"OUT_DIR: {path} cannot be written: {error.strerror or error}"
        holder = locks.read_holder(file, _FIELDS)
        if is_locked is None and not locks.is_running_here(holder):
            logger.warning("OUT_DIR: the file system of %s has no locks: a second training in the same folder is not "
                           "detected", path.parent)  # fmt: skip
            is_locked = True
        if is_locked and locks.is_at(file, path):
            locks.write_holder(file, describe_holder())
            return file, None
        file.close()
        if is_locked:  # of a file that its holder has deleted meanwhile
            continue
        if time.monotonic() > deadline:
            return None, _describe(path, holder)
        if _is_earlier_start(holder):  # its host is down, and the file server still keeps the lock
            with contextlib.suppress(OSError):
                path.unlink()
        elif not has_warned:
            has_warned = True
            logger.warning("OUT_DIR: another training holds %s; waiting up to %.0f s for its end", path, patience_s)
        time.sleep(POLL_S)


def describe_holder(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the content of the lock file: host, pid, start time, and the job with its number of restarts."""
    job, restarts = describe_job(env)
    return {**locks.describe_process(), "job": job, "restarts": restarts}


def _is_earlier_start(holder: dict[str, Any]) -> bool:
    """Tell whether the holder is an earlier start of this job, on another host: the launcher has ended it."""
    own = describe_holder()
    is_same_job = bool(own["job"]) and holder.get("job") == own["job"] and holder.get("host") != own["host"]
    return is_same_job and holder.get("restarts", 0) < own["restarts"]


def _describe(path: Path, holder: dict[str, Any]) -> str:
    known = [f"host {holder['host']}, pid {holder['pid']}, started {holder['started']}"] if "pid" in holder else []
    who = ", ".join([*known, *filter(None, [holder.get("job")])]) or "unknown process"
    remedy = f"set another OUT_DIR, or stop the other training; if its host is down, delete {path}"
    return f"OUT_DIR: {path.parent} is in use by another training ({who}); fix: {remedy}"
