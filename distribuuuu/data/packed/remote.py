"""Packs at URLs: each file is copied into the cache before a run reads it, by a child process with limited memory.

    CACHE/remote/KEY/index.bin, shard-00000.bin, ...    KEY: of the URL and the version of the index

A file appears when it is complete and its checksums match. See store.py for the reasons of the process.
"""

import contextlib
import functools
import hashlib
import json
import mmap
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from distribuuuu.config import ConfigError, Problem
from distribuuuu.data.datasets.array_file import Arrays, checksum_of
from distribuuuu.data.packed.format import FOREIGN_SHARD, HEADER_SIZE, INDEX, Meta, read_index_file, shard_header
from distribuuuu.data.packed.store import (
    READABLE,
    RemoteError,
    UnreachableError,
    read_answer,
    read_parts,
    read_range,
    set_up_child,
    start_python,
    write_answer,
)
from distribuuuu.files.atomic_file import remove_temporary_files, replacing
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.locks import take_turn
from distribuuuu.files.untrusted import printable

# Files that are copied at the same time, and the seconds of a request; also in the checks before a start, with the
# seconds of failures that they wait. Seconds to wait for another process that copies.
NUM_THREADS, REQUEST_S, CHECK_S, LONGEST_COPY_S = 4, 60.0, (20.0, 1.5), 86_400.0
# Attempts after which wrong bytes are not an accident of the network.
MAX_WRONG = 4


def copy_pack(url: str, cache_dir: str, timeout_s: float, only_index: bool = False) -> Path:
    """Return the local folder of the pack at a URL, after its files were copied there, or its index alone.

    For the other arguments see DATA.CACHE_DIR and DATA.TIMEOUT_S.

    Raises:
        ConfigError: the pack cannot be read, is damaged, or does not fit on the disk.
    """
    if (protocol := url.partition("://")[0]) not in READABLE:
        raise RemoteError(f"{printable(url)}: got the protocol {protocol}; expected one of {', '.join(READABLE)}")
    folder, limits = cache_folder(cache_dir).absolute() / "remote", CHECK_S if only_index else (REQUEST_S, timeout_s)
    try:
        # One process of a machine copies; the others find the files.
        with take_turn(folder / hashlib.sha256(url.encode()).hexdigest()[:32], LONGEST_COPY_S):
            words = json.dumps([url, str(folder), *limits, only_index])
            with start_python("-m", __name__, words) as process:
                answer = read_answer(process)
    except OSError as error:
        answer = {"key": "DATA.CACHE_DIR", "problem": _explain_disk(folder, error.strerror)}
    if "folder" in answer:
        return Path(answer["folder"])
    if answer.get("key"):
        raise ConfigError(Problem(answer["key"], answer["problem"]))
    raise RemoteError(answer["problem"] if "key" in answer else f"{url}: {answer['problem']}")


def _explain_disk(folder: Path | str, reason: str | None) -> str:
    return f"{folder}: {reason}; fix: free some space, or set it to another folder"


def main(url: str, root: str, request_s: float, retry_s: float, only_index: bool) -> None:
    """Copy a pack, and write its folder or the problem to standard output as JSON: the child process."""
    set_up_child()
    try:
        write_answer(folder=str(Copy(url, Path(root), request_s, retry_s).make(only_index)))
    except ConfigError as error:
        write_answer(key=str(error.problems[0].key or ""), problem=error.problems[0].message)
    except UnreachableError as error:
        fix = "check the URL and the network, or raise DATA.TIMEOUT_S"
        write_answer(key="", problem=f"{url} cannot be read: {error}; fix: {fix}")
    except OSError as error:
        write_answer(key="DATA.CACHE_DIR", problem=_explain_disk(root, error.strerror))
    os._exit(0)  # not waiting for requests that hang


class _WrongBytesError(Exception):
    """A file whose bytes are not those of the index."""


class Copy:
    """The copy of a pack in a sub-folder of `root`; for the other arguments see `copy_pack` and `open_store`."""

    def __init__(self, url: str, root: Path, request_s: float, retry_s: float):
        self.url, self.root, self._limits = url, root, (request_s, retry_s)

    def make(self, only_index: bool) -> Path:
        """Copy the files that are missing; return the folder; errors as of `copy_pack`, or OSError of the disk."""
        _, size, version = read_range(self.url, INDEX, 0, HEADER_SIZE, *self._limits)
        self.folder = self.root / hashlib.sha256(f"{self.url} {version} {size}".encode()).hexdigest()[:32]
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_temporary_files(self.folder)  # of killed processes
        if find_index_problem(self.folder / INDEX):
            self._check_space(size)
            self._download(INDEX, size, find_index_problem)
        meta, columns = read_index_file(self.folder)
        sizes = {shard["name"]: shard["size"] for shard in meta["shards"]}
        present = {path.name for path in self.folder.iterdir() if path.stat().st_size == sizes.get(path.name)}
        needed = sum(size for name, size in sizes.items() if name not in present)
        self._check_space(needed)
        bar = tqdm(total=needed, desc=f"{self.url} to {self.folder}", unit="B", unit_scale=True, leave=False, delay=1)

        def download(number: int, name: str) -> None:
            if name not in present:
                self._download(name, sizes[name], functools.partial(find_wrong_record, meta, columns, number))
                bar.update(sizes[name])

        if not only_index:
            list(ThreadPoolExecutor(NUM_THREADS).map(download, range(len(sizes)), sizes))
        bar.close()
        return self.folder

    def _check_space(self, needed: int) -> None:
        """Raise ConfigError if the disk lacks space for what is needed of a pack."""
        if needed > (free := shutil.disk_usage(self.folder).free):
            sizes = f"{needed / 1e9:,.1f} GB are needed for {self.url}, and {free / 1e9:,.1f} GB are free"
            raise ConfigError(Problem("DATA.CACHE_DIR", _explain_disk(self.folder, sizes)))

    def _download(self, name: str, size: int, find_problem: Callable[[Path], str]) -> None:
        """Copy an object of `size` bytes to a file in which nothing is wrong."""
        url, problem = f"{self.url}/{name}", ""
        for _ in range(MAX_WRONG):
            with contextlib.suppress(_WrongBytesError), replacing(self.folder / name) as file:
                for data in read_parts(self.url, name, size, *self._limits):
                    file.write(data)
                file.flush()
                if problem := "the answer is cut" if file.tell() < size else find_problem(Path(file.name)):
                    raise _WrongBytesError(problem)  # which deletes the file
                return
        raise RemoteError(f"{url}: {problem}, {MAX_WRONG} times; fix: upload this file again")


def find_index_problem(path: Path) -> str:
    """Return what is wrong with an index, or ""."""
    try:
        meta, columns = read_index_file(path.parent, path.name)
    except ConfigError as error:
        return str(error)
    return "" if meta["crc32"] == checksum_of(columns) else "its checksum does not match"


def find_wrong_record(meta: Meta, columns: Arrays, number: int, path: Path) -> str:
    """Return what is wrong with a shard, or ""."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:HEADER_SIZE] != shard_header(number, meta):
            return FOREIGN_SHARD
        for image in np.flatnonzero(columns["shard"] == number).tolist():
            start = int(columns["offset"][image])
            if zlib.crc32(content[start : start + int(columns["length"][image])]) != columns["crc32"][image]:
                return f"the checksum of image {image} does not match"
    return ""


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
