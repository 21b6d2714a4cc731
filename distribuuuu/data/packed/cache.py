"""Cache on disk: files that several processes and runs share, within a size; the least recently used go first.

A file appears under its name when it is complete. Locks only spare work: without one, a file is fetched twice. The
reader checks the contents, which a power failure may damage.
"""

import contextlib
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from distribuuuu.config import ConfigError
from distribuuuu.files.atomic_file import open_for_writing, replacing
from distribuuuu.files.locks import lock_file

logger = logging.getLogger(__name__)
_random = random.SystemRandom()  # forks of one process draw different numbers

# Parts of the size: what is kept when files are evicted, and what is written, on average, between two scans for that.
KEPT, SCAN_PART = 0.9, 0.01
# Seconds between two updates of the time of last use, to wait for a lock, until a file of a killed process is deleted,
# and without attempts to write after a disk was full.
TOUCH_S, LOCK_S, STALE_S, REST_S = 10.0, 60.0, 3600.0, 30.0


class DiskCache:
    """Files of about `max_bytes` at most in a folder; raises ConfigError if it cannot be written to."""

    def __init__(self, folder: Path, max_bytes: int):
        self.folder, self.max_bytes, self._rests_until = folder, max_bytes, 0.0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ConfigError(f"DATA.CACHE_DIR: {folder}: {error.strerror}; fix: set it to another folder") from error
        self._evict(0)

    @property
    def is_writable(self) -> bool:
        """Whether the last write succeeded, or was long ago."""
        return time.monotonic() >= self._rests_until

    def read(self, name: str, start: int, length: int) -> bytearray | None:
        """Return bytes of a file in writable memory; None if it does not exist or is too short."""
        data = bytearray(length)
        with contextlib.suppress(OSError), open(self.folder / name, "rb", buffering=0) as file:
            if os.preadv(file.fileno(), [data], start) == length:
                if time.time() - os.fstat(file.fileno()).st_mtime > TOUCH_S:
                    os.utime(file.fileno())
                return data
        return None

    def fetch(self, name: str, fetch: Callable[[], bytes]) -> bytes | None:
        """Fetch a file, store it and return its content; None if it exists once no other process fetches it."""
        path, lock = self.folder / name, f"{name}.lock"
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(self._lock(lock))
                stack.callback(self.drop, lock)
            if path.exists():
                return None
            data = fetch()
            self._write(path, data)
        return data

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file unless it is too large; without space, nothing is written for REST_S."""
        if not self.is_writable or len(data) >= KEPT * self.max_bytes:
            return
        try:
            # Whatever the number of processes, once per SCAN_PART of the size on average.
            if _random.random() * SCAN_PART * self.max_bytes < len(data):
                self._evict(len(data))
            with replacing(path, survives_power_failure=False) as file:
                file.write(data)
        except OSError as error:
            self._rests_until = time.monotonic() + REST_S
            fix = "free some space, lower DATA.CACHE_GB, or set DATA.CACHE_DIR to another disk"
            logger.warning("%s: %s: data is read without the cache; %s", self.folder, error.strerror, fix)

    def drop(self, name: str) -> None:
        """Delete a file if it exists."""
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def _evict(self, num_new: int) -> None:
        """Delete the least recently used files to make room for `num_new` bytes."""
        files = sorted(self._scan())
        excess = sum(size for _, size, _ in files) + num_new - KEPT * self.max_bytes
        for _, size, path in files:
            if excess <= 0:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            excess -= size

    def _scan(self) -> Iterator[tuple[float, int, str]]:
        """Yield (time of last use, size, path) of each file; delete what killed processes have left."""
        for folder, _, names in os.walk(self.folder):
            for path in (os.path.join(folder, name) for name in names):
                with contextlib.suppress(OSError):
                    status = os.stat(path)
                    if not path.endswith((".tmp", ".lock")):
                        yield status.st_mtime, status.st_size, path
                    elif time.time() - status.st_mtime > STALE_S:
                        os.unlink(path)

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        with open_for_writing(self.folder / name, "ab") as file:
            lock_file(file.fileno(), LOCK_S)
            yield
