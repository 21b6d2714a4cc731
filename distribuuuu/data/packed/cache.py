"""Cache on disk: files that several processes and runs share, within a size; the least recently used go first.

A file appears under its name when it is complete. Locks only spare work: without one, a file is fetched twice. The
reader checks the contents, which a power failure may damage.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from distribuuuu.config import ConfigError
from distribuuuu.files.atomic_file import open_for_writing, replacing
from distribuuuu.files.locks import lock_file

logger = logging.getLogger(__name__)

# Part of the size that remains after files were evicted.
KEPT = 0.9
# Seconds between two updates of the time of last use, to wait for a lock, until a file of a killed process is deleted,
# and without attempts to write after a disk was full.
TOUCH_S, LOCK_S, STALE_S, REST_S = 10.0, 60.0, 3600.0, 30.0


class DiskCache:
    """Files of at most `max_bytes` in a folder; raises ConfigError if it cannot be written to."""

    def __init__(self, folder: Path, max_bytes: int):
        self.folder, self.max_bytes, self._rests_until = folder, max_bytes, 0.0
        self._usage = folder / "usage"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._lock("usage.lock"):
                self._note_usage(sum(size for _, size, _ in self._scan()))
        except OSError as error:
            raise ConfigError(f"DATA.CACHE_DIR: {folder}: {error.strerror}; fix: set it to another folder") from error

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
            self._reserve(len(data))
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

    def _reserve(self, size: int) -> None:
        """Add the size of a new file to the bytes in use; delete files if there is no room for it."""
        with self._lock("usage.lock"):
            try:
                used = int(self._usage.read_bytes()) + size
            except (OSError, ValueError):  # a kill has interrupted the writing
                used = self.max_bytes + 1
            self._note_usage(used if size <= used <= self.max_bytes else self._evict(size))

    def _note_usage(self, num_bytes: int) -> None:
        with open_for_writing(self._usage, "w") as file:
            file.write(str(num_bytes))

    def _evict(self, num_new: int) -> int:
        """Delete files to make room for `num_new` bytes; return the bytes in use, with the new ones."""
        files = sorted(self._scan())
        used = sum(size for _, size, _ in files) + num_new
        for _, size, path in files:
            if used <= KEPT * self.max_bytes:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                used -= size
        return used

    def _scan(self) -> Iterator[tuple[float, int, str]]:
        """Yield (time of last use, size, path) of each file; delete what killed processes have left."""
        for folder, _, names in os.walk(self.folder):
            for path in (os.path.join(folder, name) for name in names if not name.startswith("usage")):
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
