"""A lock on OUT_DIR: one training at a time writes to a folder.

The lock is the kernel's on OUT_DIR/.lock: it ends with its process, even after SIGKILL, and network file systems share
it with other hosts. The content of the file only describes the holder.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from distribuuuu.config import ConfigError
from distribuuuu.config.run_files import LOCK
from distribuuuu.distributed import comm as dist
from distribuuuu.files import locks
from distribuuuu.files.atomic_file import open_for_writing
from distribuuuu.launch.detect import list_jobs

logger = logging.getLogger(__name__)

# Seconds to wait for a training that may be exiting, e.g. after its launcher was killed.
PATIENCE_S = 10.0
POLL_S = 0.2


class OutDirLocked(ConfigError):
    """Another training writes to OUT_DIR, or the lock file cannot be written; raised on every process."""

    on_all_processes = True


@contextlib.contextmanager
def lock_out_dir(out_dir: str | os.PathLike) -> Iterator[None]:
    """Lock an existing folder for the length of the block. Every process must call it.

    Raises:
        OutDirLocked: another training holds the lock, or the folder is not writable.
    """
    path = Path(out_dir) / LOCK
    with contextlib.ExitStack() as held:

        def acquire() -> None:
            held.enter_context(_acquire(path))

        dist.on_main(acquire)
        yield


def _acquire(path: Path) -> IO:
    """Return the open and locked file; raise OutDirLocked after `PATIENCE_S`."""
    deadline, has_warned = time.monotonic() + PATIENCE_S, False
    while True:
        try:
            file = open_for_writing(path, "a+", encoding="utf-8")
            is_locked = locks.try_lock(file, is_inherited=False)  # loader workers may live longer
        except OSError as error:
            raise OutDirLocked(f"OUT_DIR: {path} cannot be written: {error.strerror or error}") from error
        if is_locked is None:
            logger.warning("OUT_DIR: the file system of %s has no locks: a second training in the same folder is not "
                           "detected", path.parent)  # fmt: skip
        if is_locked is not False:
            locks.write_holder(file, ", ".join(list_jobs()))
            return file
        who = locks.read_holder(file)
        file.close()
        if time.monotonic() > deadline:
            fix = f"set another OUT_DIR, or stop the other training; if its host is down, delete {path}"
            raise OutDirLocked(f"OUT_DIR: {path.parent} is in use by another training ({who}); fix: {fix}")
        if not has_warned:
            has_warned = True
            logger.warning("OUT_DIR: another training holds %s; waiting up to %.0f s for its end", path, PATIENCE_S)
        time.sleep(POLL_S)
