"""A packed data set at a URL: its index, and its images by blocks of neighboring records through a cache on disk.

Each record is compared with its checksum in the index before a process uses it the first time, wherever it comes from.
An object that was replaced can therefore stop a run, but never changes what is trained on.
"""

import hashlib
import os
import queue
import threading
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from distribuuuu.config import ConfigError
from distribuuuu.data.datasets.array_file import checksum_of
from distribuuuu.data.packed import format as packed_format
from distribuuuu.data.packed.cache import KEPT, DiskCache
from distribuuuu.data.packed.format import INDEX
from distribuuuu.data.packed.store import MAX_WRONG, Part, RemoteError, fetch
from distribuuuu.files.cache_folder import cache_folder

# Threads of each process that read ahead; seconds of failures after which they leave a block to its reader.
NUM_THREADS, AHEAD_S = 4, 2.0
# The longest request in a check before a start, in seconds.
START_TIMEOUT_S = 20.0
# Bytes per read of an index.
_CHUNK = 16 << 20


class RemotePack:
    """A pack in the folder `url`, see DATA.CACHE_DIR, DATA.CACHE_GB and DATA.TIMEOUT_S.

    Of a check before a start, `retry_s` are the seconds after which no other attempt begins.
    """

    def __init__(
        self, url: str, cache_dir: str = "", cache_gb: float = 100.0, timeout_s: float = 300.0,
        retry_s: float | None = None
    ):  # fmt: skip
        self.url, self._retry_s = url, retry_s
        self._timeout_s = min(timeout_s, START_TIMEOUT_S) if retry_s else timeout_s
        self._cache = DiskCache(cache_folder(cache_dir) / "remote", int(cache_gb * 1e9))
        self._key = hashlib.sha256(url.encode()).hexdigest()[:16]
        self.meta, self.columns = self._load_index(f"{url}/{INDEX}")
        self._starts = packed_format.block_starts(self.columns)
        self._is_checked = bytearray(len(self.columns["label"]))
        self._pid = 0

    def notes(self) -> list[str]:
        """Return a warning if the cache is smaller than the set."""
        size, limit = sum(shard["size"] for shard in self.meta["shards"]), self._cache.max_bytes
        sizes = f"DATA.CACHE_GB is {limit / 1e9:g}, but {self.url} has {size / 1e9:.1f} GB: an epoch reads most blocks"
        return [f"{sizes} repeatedly, and with DATA.SHUFFLE blocks once"] if size > limit else []

    def _load_index(self, path: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        def read(first: int, end: int) -> Part:
            return fetch(path, first, end, self._timeout_s, retry_s=self._retry_s)

        start, limit = read(0, packed_format.HEADER_SIZE), self._cache.max_bytes
        if start.size >= KEPT * limit:
            sizes = f"got {limit / 1e9:g}; expected room for the {start.size:,} bytes of {path}"
            raise ConfigError(f"DATA.CACHE_GB: {sizes}; fix: raise it")

        def download() -> bytes:
            ranges = ((first, min(first + _CHUNK, start.size)) for first in range(0, start.size, _CHUNK))
            return b"".join(read(*ends).data for ends in ranges)

        version = hashlib.sha256(f"{start.version} {start.size}".encode()).hexdigest()[:16]
        folder, name, problem = self._cache.folder / self._key / version, f"{self._key}/{version}/{INDEX}", ""
        for _ in range(MAX_WRONG):  # a byte may be wrong, and a copy be damaged, or be evicted by another process
            self._cache.fetch(name, download)
            if not self._cache.is_writable:
                raise ConfigError(f"DATA.CACHE_DIR: {folder} has no space for the index; fix: free some space")
            try:
                os.utime(folder / INDEX)
                meta, columns = packed_format.read_index_file(folder)
                if meta["crc32"] == checksum_of(columns):
                    return meta, columns
                problem = "its checksum does not match"
            except (ConfigError, OSError) as error:
                problem = str(error)
            self._cache.drop(name)
        raise RemoteError(f"{path} is corrupt: {problem}; fix: pack the data again")

    def read(self, index: int) -> np.ndarray:
        """Return the stored bytes of image `index`, writable; raise RemoteError if they are wrong or cannot be read."""
        block = int(self.blocks_of(index))
        name, first = self._name(block), int(self._starts[block])
        start = int(self.columns["offset"][index] - self.columns["offset"][first])
        length, checksum = int(self.columns["length"][index]), self.columns["crc32"][index]
        for _ in range(3 * self._cache.is_writable):  # the block may be evicted between its arrival and its use
            data = self._cache.read(name, start, length)
            if data is not None and (self._is_checked[index] or zlib.crc32(data) == checksum):
                self._is_checked[index] = True
                return np.frombuffer(data, np.uint8)
            if data is not None:  # damaged on this disk
                self._cache.drop(name)
            if (content := self._fetch_block(block)) is not None:
                return np.frombuffer(bytearray(content[start : start + length]), np.uint8)
        return np.frombuffer(bytearray(self._download(index, index + 1)), np.uint8)

    def blocks_of(self, images: Any) -> np.ndarray:
        """Return the block of each image."""
        return np.searchsorted(self._starts, images, side="right") - 1

    def _name(self, block: int) -> str:
        return f"{self._key}/{self.meta['crc32']:08x}-{packed_format.BLOCK_BYTES}/{block // 1000}/{block}"

    def _fetch_block(self, block: int, retry_s: float | None = None) -> bytes | None:
        first, end = [*self._starts[block : block + 2].tolist(), len(self._is_checked)][:2]
        return self._cache.fetch(self._name(block), lambda: self._download(first, end, retry_s))

    def _download(self, first: int, end: int, retry_s: float | None = None) -> bytes:
        """Return the stored bytes of neighboring images, compared with their checksums."""
        columns, number = self.columns, int(self.columns["shard"][first])
        path, size = f"{self.url}/{self.meta['shards'][number]['name']}", self.meta["shards"][number]["size"]
        starts = columns["offset"][first:end].tolist()
        ends = (columns["offset"][first:end] + columns["length"][first:end]).tolist()

        def find_problem(part: Part) -> str:
            if part.size != size:
                sizes = f"it has {part.size:,} bytes, expected {size:,}"
                raise RemoteError(f"{path}: {sizes}: it was truncated or replaced; fix: restore it, or upload it again")
            view = memoryview(part.data)
            for image, start, stop in zip(range(first, end), starts, ends, strict=True):
                if zlib.crc32(view[start - starts[0] : stop - starts[0]]) != columns["crc32"][image]:
                    return f"the checksum of image {image} does not match"
            return ""

        return fetch(path, starts[0], ends[-1], self._timeout_s, find_problem, retry_s or self._retry_s).data

    def read_ahead(self, keys: Sequence[Sequence[int]]) -> None:
        """Start to fetch the blocks of a batch that are not in the cache, in the order of their use."""
        if self._pid != os.getpid():  # threads do not survive a fork
            self._queue, self._pid = queue.SimpleQueue[int](), os.getpid()
            for _ in range(NUM_THREADS):
                threading.Thread(target=self._fetch_queued, args=(self._queue,), name="read ahead", daemon=True).start()
        for block in dict.fromkeys(self.blocks_of([key[1] for key in keys]).tolist()):
            if not os.path.exists(self._cache.folder / self._name(block)):
                self._queue.put(block)

    def _fetch_queued(self, blocks: "queue.SimpleQueue[int]") -> None:
        while True:
            block = blocks.get()
            # What fails is left to the reader of the block, which retries for longer and reports it.
            with suppress(Exception):
                if self._cache.is_writable:
                    self._fetch_block(block, AHEAD_S)
