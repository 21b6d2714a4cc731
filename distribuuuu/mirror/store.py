"""Objects of a mirrored run: uploads and verified downloads, and the index that names a complete state.

    URL/mirror.json         the index: name -> SHA-256 and size of each file; written before the first object
    URL/objects/SHA256      the content of a file; never overwritten with another one

A store is not trusted: the index has limits, its names are files of a run, and content is used after its hash matches.
"""

import concurrent.futures
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fsspec.callbacks import Callback

from distribuuuu.config.run_files import is_run_file
from distribuuuu.data.packed.transport import MissingObjectError, call_filesystem
from distribuuuu.files.untrusted import parse_json
from distribuuuu.mirror import OBJECT_STORES

INDEX, OBJECTS = "mirror.json", "objects"
# Limits of an index: its bytes, files, levels of folders, and the bytes of a file.
MAX_INDEX, MAX_FILES, MAX_LEVELS, MAX_SIZE = 1 << 22, 10_000, 5, 1 << 44
# Bytes of a part, which is held in memory; a multipart upload has at most 5,000 parts here (S3: 10,000).
PART = 1 << 23
# Seconds without progress after which a request has failed; bytes per second of a copy that does not tell its progress.
REQUEST_S, LEAST_RATE = 60.0, 1 << 20
_PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,+=@%-]{0,199}")
_SHA256 = re.compile("[0-9a-f]{64}")


class Entry(NamedTuple):
    """Content of a file: its SHA-256 and its size in bytes."""

    sha256: str
    size: int


class Index(NamedTuple):
    """State of a run: an identifier, which changes with every write, a number of writes, and the files by name."""

    id: str
    generation: int
    files: dict[str, Entry]


class MirrorError(Exception):
    """An object or the index is damaged, or another run has written to the URL; trying again does not help."""


def is_mirrored(name: str) -> bool:
    """Tell whether a file is mirrored, by its path relative to OUT_DIR with `/`: those of a run, no hidden ones."""
    parts = name.split("/")
    is_plain = len(parts) <= MAX_LEVELS and all(_PART_NAME.fullmatch(part) for part in parts)
    is_config = len(parts) == 1 and name.endswith((".yaml", ".yml"))
    return is_plain and not name.endswith((".tmp", ".partial", ".broken")) and (is_run_file(parts[0]) or is_config)


def parse_index(data: bytes) -> Index:
    """Return the index in a JSON text.

    Raises:
        MirrorError: it is none, or exceeds a limit, or names a file outside of a run.
    """
    try:
        content = parse_json(data)
        if content["format"] != 1:
            raise MirrorError(f"{INDEX} has another format; fix: use a newer version of distribuuuu")
        files = {name: Entry(entry["sha256"], entry["size"]) for name, entry in content["files"].items()}
        index = Index(content["id"], int(content["generation"]), files)
        is_valid = all(_SHA256.fullmatch(entry.sha256) and 0 <= entry.size < MAX_SIZE for entry in files.values())
        if not (is_valid and _SHA256.fullmatch(index.id) and len(files) <= MAX_FILES and all(map(is_mirrored, files))):
            raise ValueError("an entry is invalid, or no file of a run")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise MirrorError(f"{INDEX} is not an index of a run: {error!r:.200}") from error
    return index


class Store:
    """The objects of a run below a URL without a slash at its end; `on_progress` gets the bytes of each part."""

    def __init__(self, url: str, temporary: Path, on_progress: Callable[[int], None] = lambda size: None):
        self.url, self._temporary, self._on_progress = url, temporary, on_progress
        self._executor = concurrent.futures.ThreadPoolExecutor(1)
        # Bytes of each object that an attempt has sent at most: only more of them are progress of a further attempt.
        self._sent: dict[str, int] = {}

    def _call(self, url: str, method: str, *args: Any, size: int = 0, **options: Any) -> Any:
        """Return what `call_filesystem` does; after `REQUEST_S` without progress, its thread is left behind.

        Raises:
            OSError, RemoteError: as `call_filesystem`; OSError if the store does not answer.
        """
        progress, begin = options.get("callback"), time.monotonic()
        limit_s = REQUEST_S + (size / LEAST_RATE if url.startswith("file:") else 0)
        future = self._executor.submit(call_filesystem, url, method, *args, **options)
        while not future.done():
            if time.monotonic() - max(begin, progress.moved_at if progress else 0.0) > limit_s:
                self._executor = concurrent.futures.ThreadPoolExecutor(1)
                raise OSError(f"no answer for {limit_s:.0f} s: {method} of {url}")
            concurrent.futures.wait([future], timeout=min(1.0, REQUEST_S))
        return future.result()

    def read(self, name: str) -> bytes | None:
        """Return a small object; None if there is none.

        Raises:
            MirrorError: it is larger than `MAX_INDEX` bytes.
            OSError, RemoteError: it cannot be read.
        """
        try:
            size, _ = self._call(f"{self.url}/{name}", "info")
            if size > MAX_INDEX:
                raise MirrorError(f"{name} has {size:,} bytes, more than {MAX_INDEX:,}")
            return self._call(f"{self.url}/{name}", "cat_file", start=0, end=MAX_INDEX) if size else b""
        except MissingObjectError:
            return None

    def write(self, name: str, data: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self._temporary) as file:
            file.write(data)
            file.flush()
            self._put(file.name, name)

    def _put(self, path: str, name: str, **options: Any) -> None:
        target, protocol = f"{self.url}/{name}", self.url.partition("://")[0]
        try:
            if protocol in OBJECT_STORES:
                return self._call(target, "put_file", path, **options)
            # An interrupted upload to a folder leaves a part of a file.
            self._call(target.rpartition("/")[0], "makedirs", exist_ok=True)
            self._call(f"{target}.partial", "put_file", path, size=os.path.getsize(path), **options)
            return self._call(target, "mv", f"{target}.partial")
        except MissingObjectError as error:
            if not os.path.exists(path):
                raise
            place = "bucket" if protocol in OBJECT_STORES else "folder"
            message = f"{self.url}: the {place} does not exist; fix: create it, or check the URL"
            raise MissingObjectError(message) from error

    def upload(self, path: Path, entry: Entry) -> None:
        """Upload a file, and verify its size.

        Raises:
            OSError, RemoteError: it cannot be uploaded, or is not what was sent.
        """
        name, part = f"{OBJECTS}/{entry.sha256}", max(PART, entry.size // 5000)
        options = {"chunksize": part, "max_concurrency": 2} if self.url.startswith("s3:") else {}
        self._put(str(path), name, callback=_Progress(self, entry.sha256), **options)
        size, _ = self._call(f"{self.url}/{name}", "info")
        if size != entry.size:
            raise OSError(f"{name} has {size:,} bytes after its upload, expected {entry.size:,}")

    def download(self, entry: Entry, write: Callable[[bytes], Any]) -> None:
        """Read an object in parts and pass each to `write`.

        Raises:
            MirrorError: it is missing or has another size or content.
        """
        url, hashed = f"{self.url}/{OBJECTS}/{entry.sha256}", hashlib.sha256()
        try:
            size, _ = self._call(url, "info")
        except MissingObjectError as error:
            raise MirrorError("its object is missing") from error
        if size != entry.size:
            raise MirrorError(f"its object has {size:,} bytes, expected {entry.size:,}")
        for start in range(0, size, PART):
            data = self._call(url, "cat_file", start=start, end=min(start + PART, size))
            hashed.update(data)
            write(data)
            self._on_progress(len(data))
        if hashed.hexdigest() != entry.sha256:
            raise MirrorError("its object has another content")

    def list_objects(self) -> set[str]:
        """Return the names of the objects with content, and of what interrupted uploads have left."""
        try:
            found = self._call(f"{self.url}/{OBJECTS}", "find")
        except MissingObjectError:
            return set()
        names = {os.path.basename(path) for path in found}
        return {name for name in names if _SHA256.fullmatch(name.removesuffix(".partial"))}

    def delete_others(self, kept: set[str]) -> None:
        """Delete the objects whose hash is not in `kept`, and what interrupted uploads have left."""
        for name in self.list_objects() - kept:
            self._call(f"{self.url}/{OBJECTS}/{name}", "rm_file")


class _Progress(Callback):
    """Callback of fsspec for each part of an upload."""

    def __init__(self, store: Store, sha256: str):
        super().__init__()
        self._store, self._sha256, self._num_bytes, self.moved_at = store, sha256, 0, 0.0

    def relative_update(self, inc: int = 1) -> None:
        """Report the bytes of a part, unless an earlier attempt has sent as much."""
        self._num_bytes, self.moved_at = self._num_bytes + inc, time.monotonic()
        if self._num_bytes > self._store._sent.get(self._sha256, 0):
            self._store._sent[self._sha256] = self._num_bytes
            self._store._on_progress(inc)


def hash_file(path: Path) -> Entry:
    """Return SHA-256 and size of a file."""
    hashed = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(PART):
            hashed.update(data)
        return Entry(hashed.hexdigest(), file.tell())
