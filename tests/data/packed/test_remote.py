"""Packed data at a URL: the batches of the local pack whatever the network does, or an error that names the cause."""

import errno
import functools
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.batches import ALONE, CPU, assert_same_batches, batches_of
from support.images import draw_folder
from support.packs import pack as make_pack
from support.processes import wait_for
from support.range_server import ENDLESS, RangeServer
from support.runs import message_of, run_python, small_options
from support.tables import slow

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.loader import build_loader
from distribuuuu.data.packed import cache, dataset, store
from distribuuuu.data.packed import format as packed_format
from distribuuuu.data.packed.cache import DiskCache
from distribuuuu.data.packed.dataset import Packed
from distribuuuu.data.packed.format import BlockShuffle
from distribuuuu.data.packed.store import Part, RemoteError
from distribuuuu.engine.preflight import find_run_problems

S3 = "s3://bucket/sets/small"
KINDS = [(0, "thread"), (2, "thread"), slow(2, "process")]


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    root, out = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("packed")
    draw_folder(root, "train", {"ant": 30, "bee": 30, "cat": 30})
    draw_folder(root, "val", {"ant": 6, "bee": 7, "cat": 7})
    make_pack(out, "--shard-mb", "0.02", "TRAIN.DATASET", root, split="both")
    return out


@pytest.fixture
def source(packed, tmp_path, monkeypatch):
    """A server of a copy of the pack; blocks have a few images, and retries come at once."""
    monkeypatch.setattr(packed_format, "BLOCK_BYTES", 4000)
    monkeypatch.setattr(store, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(dataset, "START_S", 0.1)
    shutil.copytree(packed, tmp_path / "served")
    with RangeServer(tmp_path / "served") as server:
        yield server


@pytest.fixture
def open_pack(source, tmp_path):
    def open_it(gb=1.0, timeout_s=30.0, split="train"):
        return Packed(source.url, split, None, str(tmp_path / "cache"), gb, timeout_s)

    return open_it


def cfg_of(root, tmp_path, *overrides):
    words = [*small_options(root, tmp_path / "out"), "DATA.NAME", "packed", "DATA.CACHE_DIR", str(tmp_path / "cache")]
    words += ["DATA.TIMEOUT_S", 5]
    return load_cfg(None, [*map(str, words), "TRAIN.DATASET", str(root), "TEST.DATASET", str(root), *overrides])


def problem_of(url, tmp_path) -> str:
    """Return what the checks before training report about a URL, which takes seconds at most."""
    begin = time.monotonic()
    found = "\n".join(str(problem) for problem in find_run_problems(cfg_of(url, tmp_path), train=True))
    assert time.monotonic() - begin < 20
    return found


def block_files(tmp_path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.name.isdigit() and path.is_file()]


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_batches_over_a_faulty_network_are_the_local_ones(source, packed, tmp_path, monkeypatch, workers, kind):
    monkeypatch.setattr(packed_format, "WINDOW", 5)
    for shuffle in ["global", "blocks"][kind == "process" :]:
        words = ["DATA.SHUFFLE", shuffle, "TRAIN.WORKERS", str(workers), "DATA.WORKER_KIND", kind]
        local = cfg_of(packed, tmp_path, *words)
        remote = cfg_of(source.url, tmp_path, *words)
        for train in (True, False):
            expected = batches_of(local, train)
            source.failures = 0.2
            assert_same_batches(batches_of(remote, train), expected)
            source.failures = 0.0
    assert source.num_faults
    blocks = Counter(request for request in source.requests if request[1] >= packed_format.HEADER_SIZE)
    assert max(blocks.values()) <= 4  # once, and again after a fault
    source.requests.clear()
    assert_same_batches(batches_of(remote), batches_of(local))
    assert all(last < packed_format.HEADER_SIZE for _, _, last in source.requests)  # the checks of a start


def test_what_a_batch_reads_is_fetched_ahead(source, open_pack):
    images = open_pack()
    blocks = {*images.remote.blocks_of(range(6)).tolist()}
    images.remote.read_ahead([(0, index) for index in range(6)])
    wait_for(lambda: {int(path.name) for path in block_files(source.folder.parent)} == blocks, timeout_s=10)


def test_blocks_are_read_once_per_epoch_within_a_window():
    sizes = np.random.default_rng(0).integers(1, 9, 200)
    num, block_of = int(sizes.sum()), np.repeat(np.arange(200), sizes)
    places = np.concatenate([np.arange(size) for size in sizes])
    offsets = packed_format.HEADER_SIZE + block_of * packed_format.BLOCK_BYTES + places
    columns = {"shard": np.zeros(num, np.int32), "offset": offsets.astype(np.int64)}
    assert packed_format.block_starts(columns).tolist() == [0, *np.cumsum(sizes)[:-1]]
    columns["shard"][-1] = 1  # begins a block
    assert len(packed_format.block_starts(columns)) == 201
    columns["shard"][-1] = 0
    shuffle = BlockShuffle(SimpleNamespace(columns=columns), 10)
    orders = [shuffle.draw(num, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(orders[0], orders[1]) and not torch.equal(orders[0], orders[2])
    assert orders[0].sort().values.equal(torch.arange(num))
    block = block_of[orders[0].numpy()]
    spans = [np.ptp(np.flatnonzero(block == number)) for number in range(200)]
    assert max(spans) <= num * 10 / 200 + 9 < num / 10  # a global order would span nearly all of it
    assert np.mean(np.diff(block) == 0) < 0.3  # mixed with other blocks
    firsts = [int(np.flatnonzero(block == number)[0]) for number in range(200)]
    assert abs(np.corrcoef(firsts, np.arange(200))[0, 1]) < 0.3  # and these in a random order
    whole = BlockShuffle(SimpleNamespace(columns=columns), 200).draw(num, torch.Generator().manual_seed(1))
    assert whole.equal(torch.randperm(num, generator=torch.Generator().manual_seed(1)))


def test_problems_are_found_before_training_without_torch(source, tmp_path):
    code = "import sys, distribuuuu.data.packed.remote; sys.exit('torch' in sys.modules)"
    assert run_python("-c", code).returncode == 0
    problems = functools.partial(problem_of, tmp_path=tmp_path)
    assert not problems(source.url)
    found = problems(f"{source.url}/no")
    assert "command line" in found and "/no/train/index.bin: no such object" in found
    assert "expected one of https, http, s3, gs, az, hf" in problems("ftp://host/data")
    source.status = 403
    assert "access denied (HTTP 403 " in problems(source.url)
    source.status = 0
    source.has_ranges = False
    assert "does not send the requested bytes" in problems(source.url)
    source.has_ranges = True
    (source.folder / "val" / "index.bin").write_text("<html>Welcome</html>")
    assert "TEST.DATASET" in (found := problems(source.url)) and "not a valid pack" in found
    source.is_gone = True
    assert "cannot be read for" in problems(source.url)
    folders = load_cfg(None, ["TRAIN.DATASET", source.url])
    assert "for a URL set DATA.NAME packed" in str(find_run_problems(folders, train=True)[0])
    with pytest.raises(ConfigError, match="DATA.SHUFFLE.*expected global"):
        load_cfg(None, ["DATA.SHUFFLE", "blocks"])


def test_a_cache_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    assert "DATA.CACHE_DIR" in message_of(DiskCache, tmp_path / "file" / "cache", 10)
    (tmp_path / "cache").mkdir(mode=0o500)
    if os.getuid():
        assert "DATA.CACHE_DIR" in message_of(DiskCache, tmp_path / "cache", 10)


def test_a_changed_object_is_reported_and_never_mixed_in(source, open_pack, packed):
    images, local = open_pack(), Packed(packed, "train")
    shard = source.folder / "train" / "shard-00001.bin"
    content = bytearray(shard.read_bytes())
    shard.write_bytes(content)  # another version, the same bytes: nothing is wrong
    inside = np.flatnonzero(local.columns["shard"] == 1).tolist()
    assert bytes(images.read(inside[0])) == bytes(local.read(inside[0]))
    content[-1] ^= 1
    shard.write_bytes(content)
    assert "does not match, 4 times" in message_of(images.read, inside[-1])
    shard.write_bytes(content + b"0")
    assert "truncated or replaced" in message_of(images.read, inside[-1])
    shard.write_bytes(content[:80])
    assert "does not send the requested bytes (HTTP 416" in message_of(images.read, inside[-1])
    shard.unlink()
    assert "shard-00001.bin: no such object" in message_of(images.read, inside[-1])
    assert bytes(images.read(inside[0])) == bytes(local.read(inside[0]))  # from the cache
    source.status = 401
    assert "access denied (HTTP 401 " in message_of(images.read, 0)


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_a_lost_shard_ends_the_run_even_where_broken_images_are_skipped(source, tmp_path, workers, kind):
    words = ["DATA.ON_BAD_IMAGE", "skip", "TRAIN.WORKERS", str(workers), "DATA.WORKER_KIND", kind]
    for shard in (source.folder / "train").glob("shard-*.bin"):
        shard.write_bytes(shard.read_bytes()[:-1] + b"!")  # wrong from the start
    loader = build_loader(cfg_of(source.url, tmp_path, *words), ALONE, CPU, True)
    with pytest.raises(RemoteError) as error:
        list(loader.batches_from(5, 1, 1))
    loader._batches.pool.clear()  # a thread that still reads would log in another test
    assert str(error.value).startswith(source.url) and str(error.value).endswith("4 times; fix: upload this file again")
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_an_outage_is_waited_for_and_logged_and_has_a_limit(source, open_pack, packed, monkeypatch, caplog):
    monkeypatch.setattr(store, "QUIET_S", 0.1)
    images, expected = open_pack(timeout_s=20), bytes(Packed(packed, "train").read(50))
    source.is_gone = True
    threading.Timer(0.6, setattr, (source, "is_gone", False)).start()
    with caplog.at_level(logging.WARNING, "distribuuuu"):
        assert bytes(images.read(50)) == expected
    (message,) = (text for text in map(logging.LogRecord.getMessage, caplog.records) if source.url in text)
    assert "cannot be read: HTTP error: error sending request" in message
    images, source.is_gone = open_pack(timeout_s=0.3), True
    assert f"{source.url}/train/shard-00000.bin cannot be read for" in (found := message_of(images.read, 0))
    assert "DATA.TIMEOUT_S" in found


def test_a_request_that_gets_no_answer_is_made_again(source, open_pack, packed, monkeypatch):
    images, source.attack = open_pack(timeout_s=60), ENDLESS["silence"]
    monkeypatch.setattr(store, "STALL_S", 0.5)
    threading.Timer(0.2, setattr, (source, "attack", None)).start()
    assert bytes(images.read(50)) == bytes(Packed(packed, "train").read(50))


def test_the_reading_process_serves_forks_and_is_started_again(source, open_pack, packed, monkeypatch):
    images, local, context = open_pack(), Packed(packed, "train"), multiprocessing.get_context("fork")
    monkeypatch.setattr(images.remote._cache, "read", lambda *args: None)
    monkeypatch.setattr(images.remote._cache, "fetch", lambda *args: None)
    reads = [lambda: images.read(50), lambda: ThreadPoolExecutor(1).submit(images.read, 50).result()]

    def check() -> None:
        for read in reads * 2:
            assert bytes(read()) == bytes(local.read(50))

    check()
    children = [context.Process(target=check) for _ in range(3)]
    for child in children:
        child.start()
    check()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 3
    first = store._reader[0]
    first.kill()
    first.wait()
    check()
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    second = store._reader[0]
    check()
    assert second.wait(10) == 0 and store._reader[1]["AWS_SKIP_SIGNATURE"] == "true"  # no process is left behind


def test_the_reading_process_outlives_a_lack_of_descriptors(monkeypatch):
    own, other = multiprocessing.Pipe()
    found = iter([OSError(errno.EMFILE, "too many open files"), other, SystemExit()])

    def accept():
        if isinstance(item := next(found), BaseException):
            raise item
        return item

    monkeypatch.setattr(store, "read_range", lambda *request: Part(b"data", 4, "version"))
    own.send(())
    with pytest.raises(SystemExit):
        store._accept(SimpleNamespace(accept=accept))
    assert own.poll(10) and own.recv().data == b"data"


def test_the_cache_is_bounded_and_evicts_what_was_not_used_for_longest(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "TOUCH_S", 0)
    files = DiskCache(tmp_path, 1000)
    for name in range(9):
        assert files.fetch(f"a/{name}", lambda: bytes(100)) == bytes(100)
        os.utime(tmp_path / f"a/{name}", (name, name))
    assert files.fetch("a/3", lambda: pytest.fail("it exists")) is None
    assert files.read("a/0", 10, 20) == bytes(20) and files.read("a/0", 90, 20) is None  # it is too short
    assert files.read("b", 0, 1) is None
    (tmp_path / "a" / ".8.0123.tmp").write_bytes(bytes(5000))  # a kill has left it, long ago
    os.utime(tmp_path / "a" / ".8.0123.tmp", (1, 1))
    for name in (9, 10):
        files.fetch(f"a/{name}", lambda: bytes(100))
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"0", *map(str, range(3, 11))}
    assert DiskCache(tmp_path, 50).fetch("large", lambda: bytes(100)) and not (tmp_path / "large").exists()


def test_damage_in_the_cache_is_repaired(source, open_pack, packed, tmp_path):
    images, local = open_pack(), Packed(packed, "train")
    expected = [bytes(local.read(index)) for index in range(90)]
    assert [bytes(images.read(index)) for index in range(90)] == expected
    damages = [
        lambda path: path.write_bytes(b""), lambda path: path.write_bytes(bytes(path.stat().st_size)), Path.unlink,
    ]  # fmt: skip
    for number, path in enumerate(sorted(block_files(tmp_path))):
        damages[number % 3](path)
    for index in (tmp_path / "cache").rglob("index.bin"):
        content = index.read_bytes()
        index.write_bytes(content[:-3] + b"xyz")
    images = open_pack()
    assert [bytes(images.read(index)) for index in range(90)] == expected
    assert images.describe(3) == local.describe(3).replace(str(packed), source.url)


def test_a_full_disk_costs_speed_only(open_pack, packed, monkeypatch, caplog, tmp_path):
    images, local = open_pack(), Packed(packed, "train")

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache.os, "replace", fail)
    with caplog.at_level(logging.WARNING, "distribuuuu"):
        for index in range(90):
            assert bytes(images.read(index)) == bytes(local.read(index))
    # Workers of an earlier test may still be reading ahead.
    (message,) = (text for text in map(logging.LogRecord.getMessage, caplog.records) if str(tmp_path) in text)
    assert "No space left on device: data is read without the cache" in message
    assert not block_files(tmp_path)


def read_everything(images, expected, seed, failed) -> None:
    for index in np.random.default_rng(seed).permutation(90).tolist():
        if bytes(images.read(index)) != expected[index]:
            failed.set()


@pytest.mark.slow
@pytest.mark.parametrize("gb", [1.0, 3e-5])
def test_processes_share_the_cache_and_survive_kills(source, open_pack, packed, gb, tmp_path):
    local, images, source.failures = Packed(packed, "train"), open_pack(gb=gb), 0.1
    expected = [bytes(local.read(index)) for index in range(90)]
    context = multiprocessing.get_context("fork")
    failed = context.Event()
    children = [context.Process(target=read_everything, args=(images, expected, seed, failed)) for seed in range(5)]
    for child in children:
        child.start()
    for child in children[:2]:
        time.sleep(0.1)
        os.kill(child.pid, signal.SIGKILL)
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children[2:]] == [0, 0, 0] and not failed.is_set()
    images = open_pack(gb=gb)
    assert [bytes(images.read(index)) for index in range(90)] == expected
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and not path.name.endswith(".tmp")]
    assert sum(path.stat().st_size for path in files) <= gb * 1e9 + 100


@pytest.fixture
def s3(object_server, packed, monkeypatch):
    """A server of the S3 protocol with the pack at S3; blocks have a few images, and retries come at once."""
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(packed_format, "BLOCK_BYTES", 4000)
    monkeypatch.setattr(store, "FIRST_PAUSE_S", 0.05)
    object_server.reset()
    for path in filter(Path.is_file, packed.rglob("*")):
        store.open_store(S3, 60.0).put(path.relative_to(packed).as_posix(), path)
    return object_server


@pytest.mark.slow
def test_the_batches_of_a_pack_on_s3_are_those_of_the_local_one(s3, packed, tmp_path):
    assert problem_of(S3, tmp_path) == ""  # the reading process runs before the workers are forked
    for kind in ("thread", "process"):
        words = ["TRAIN.WORKERS", "2", "DATA.WORKER_KIND", kind, "DATA.TIMEOUT_S", "30"]
        for train in (True, False):
            remote = batches_of(cfg_of(S3, tmp_path / kind, *words), train)
            assert_same_batches(remote, batches_of(cfg_of(packed, tmp_path, *words), train))
        assert len(block_files(tmp_path / kind)) > 10


@pytest.mark.slow
def test_missing_objects_and_refused_access_on_s3_are_reported_before_training(s3, tmp_path):
    for url in ("s3://no-such-bucket/set", "s3://bucket/none"):
        assert f"{url}/train/index.bin: no such object; fix: check the URL" in problem_of(url, tmp_path)
    images = Packed(S3, "train", None, str(tmp_path / "cache"), 1.0, 30.0)
    # S3 answers expired tokens with status 400, and HEAD requests without the code.
    for refusal in ((403, "AccessDenied"), (400, "ExpiredToken"), (403, "InvalidAccessKeyId"), (400, "InvalidToken")):
        s3.refusal = refusal
        found = problem_of(S3, tmp_path)
        assert f"{S3}/train/index.bin: access denied" in found and "fix: renew them" in found, found
        begin = time.monotonic()
        assert "access denied" in message_of(images.read, 59) and time.monotonic() - begin < 10
