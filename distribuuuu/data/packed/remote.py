"""Packs at URLs: each file is copied into the cache before a run reads it, by a child process with limited memory.

    CACHE/remote/KEY/index.bin, shard-00000.bin, ...    KEY: of the URL and the version of the index

A file appears when it is complete and its checksums match. See store.py for the reasons of the process.
"""

import functools
import hashlib
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from distribuuuu.config import ConfigError, Problem
from distribuuuu.data.datasets.array_file import Arrays, checksum_of
from distribuuuu.data.packed.format import FOREIGN_SHARD, HEADER_SIZE, INDEX, Meta, read_index_file, shard_header
from distribuuuu.data.packed.store import Store, check_space, read_answer, start
from distribuuuu.files.atomic_file import remove_temporary_files
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.locks import take_turn

# Files that are copied at the same time, and the seconds of a request; also in the checks before a start, with the
# seconds of failures that they wait. Seconds to wait for another process that copies.
NUM_THREADS, REQUEST_S, CHECK_S, LONGEST_COPY_S = 4, 60.0, (20.0, 1.5), 86_400.0


def copy_pack(url: str, cache_dir: str, timeout_s: float, only_index: bool | str = False) -> Path:
    """Return the local folder of the pack at a URL, after its files were copied there, or its index alone.

    For the other arguments see DATA.CACHE_DIR and DATA.TIMEOUT_S.

    Raises:
        ConfigError: the pack cannot be read, is damaged, or does not fit on the disk.
    """
    folder, limits = cache_folder(cache_dir).absolute() / "remote", CHECK_S if only_index else (REQUEST_S, timeout_s)
    try:
        # One process of a machine copies; the others find the files.
        turn = take_turn(folder / hashlib.sha256(url.encode()).hexdigest()[:32], LONGEST_COPY_S)
        with turn, start(__name__, url, str(folder), *limits, only_index) as process:
            return Path(read_answer(process.communicate()[0], url))
    except OSError as error:
        problem = f"{folder}: {error.strerror or error}; fix: free some space, or set it to another folder"
        raise ConfigError(Problem("DATA.CACHE_DIR", problem)) from error


def main(url: str, root: str, request_s: float, retry_s: float, only_index: bool | str) -> Iterator[str]:
    """Copy the missing files of a pack, or its index alone, to a folder below `root`; yield it: in a child process.

    Raises:
        RemoteError: the pack cannot be read, or is damaged.
        OSError: of the disk, which may lack space for all of its files.
    """
    store = Store(url, request_s, retry_s)
    _, meta = store.read(INDEX, 0, HEADER_SIZE)
    size, version = meta["size"], f"{url} {meta['e_tag'] or meta['last_modified']} {meta['size']}"
    folder = Path(root, hashlib.sha256(version.encode()).hexdigest()[:32])
    folder.mkdir(parents=True, exist_ok=True)
    remove_temporary_files(folder)  # of killed processes
    store.download(INDEX, size, folder / INDEX, check_index)
    meta, columns = read_index_file(folder)
    present = {path.name: path.stat().st_size for path in folder.iterdir()}
    jobs = [
        (shard["name"], shard["size"], folder / shard["name"], functools.partial(check_shard, meta, columns, number))
        for number, shard in enumerate(meta["shards"])
        if present.get(shard["name"]) != shard["size"]
    ]
    if only_index != "labels":  # those of the training, of which an evaluation reads nothing else
        check_space(folder, sum(size for _, size, *_ in jobs), url)
    if not only_index:
        copied = ThreadPoolExecutor(NUM_THREADS).map(lambda job: store.download(*job), jobs)
        list(tqdm(copied, f"{url} to {folder}", len(jobs), unit="file", leave=False, delay=1))
    yield str(folder)


def check_index(path: Path) -> None:
    """Raise ValueError if an index is damaged."""
    meta, columns = read_index_file(path.parent, path.name)
    if meta["crc32"] != checksum_of(columns):
        raise ValueError("its checksum does not match")


def check_shard(meta: Meta, columns: Arrays, number: int, path: Path) -> None:
    """Raise ValueError if a shard is damaged, or belongs to another pack."""
    content = np.memmap(path, np.uint8, "r")
    if len(content) != meta["shards"][number]["size"] or content[:HEADER_SIZE].tobytes() != shard_header(number, meta):
        raise ValueError(FOREIGN_SHARD)
    for image in np.flatnonzero(columns["shard"] == number).tolist():
        start = int(columns["offset"][image])
        if zlib.crc32(content[start : start + int(columns["length"][image])].data) != columns["crc32"][image]:
            raise ValueError(f"the checksum of image {image} does not match")
