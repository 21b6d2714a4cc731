"""Packed data at a URL: the batches of the local pack whatever the network does, or an error that names the cause."""

import functools
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.batches import assert_same_batches, batches_of
from support.images import draw_folder
from support.packs import pack as make_pack
from support.processes import wait_for
from support.range_server import RangeServer
from support.runs import run_python, small_options
from support.tables import slow

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.packed import format as packed_format
from distribuuuu.data.packed import remote, store
from distribuuuu.data.packed.remote import copy_pack
from distribuuuu.engine.preflight import find_run_problems

S3 = "s3://bucket/sets/small"


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    root, out = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("packed")
    draw_folder(root, "train", {"ant": 30, "bee": 30, "cat": 30})
    draw_folder(root, "val", {"ant": 6, "bee": 7, "cat": 7})
    make_pack(out, "--shard-mb", "0.02", "TRAIN.DATASET", root, split="both")
    return out


@pytest.fixture
def source(packed, tmp_path):
    """A server of a copy of the pack."""
    shutil.copytree(packed, tmp_path / "served")
    with RangeServer(tmp_path / "served") as server:
        yield server


@pytest.fixture
def copy(source, tmp_path):
    """Copy the training split and return the folder, or the message of the error."""

    def copy_it(timeout_s=10.0, cache="cache"):
        try:
            return copy_pack(f"{source.url}/train", str(tmp_path / cache), timeout_s)
        except ConfigError as error:
            return str(error)

    return copy_it


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


def assert_same_files(folder: Path, local: Path) -> None:
    found, expected = ({path.name: path.read_bytes() for path in one.iterdir()} for one in (folder, local))
    assert found == expected


@pytest.mark.parametrize("workers", [0, slow(2)])
def test_batches_over_a_faulty_network_are_the_local_ones(source, packed, tmp_path, workers):
    local, remote = (cfg_of(root, tmp_path, "TRAIN.WORKERS", str(workers)) for root in (packed, source.url))
    source.failures = 0.4
    for train in (False, True):  # the evaluation needs the training's index alone
        assert_same_batches(batches_of(remote, train), batches_of(local, train))
        assert train or not any("train/shard" in path for path, *_ in source.requests)
    assert source.num_faults
    assert max(Counter(path for path, *_ in source.requests if "shard" in path).values()) <= 6  # once, and after faults
    source.failures = 0.0
    source.requests.clear()
    assert_same_batches(batches_of(remote), batches_of(local))
    assert all(last < packed_format.HEADER_SIZE for _, _, last in source.requests)  # of the index, at a start


@pytest.mark.slow
def test_problems_are_found_before_training_without_torch(source, tmp_path):
    code = "import sys, distribuuuu.data.packed.remote; sys.exit('torch' in sys.modules)"
    assert run_python("-c", code).returncode == 0
    problems = functools.partial(problem_of, tmp_path=tmp_path)
    assert not problems(source.url)
    assert not any("shard" in path for path, *_ in source.requests)
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
    assert "cannot be reached: " in problems(source.url)
    folders = load_cfg(None, ["TRAIN.DATASET", source.url])
    assert "for a URL set DATA.NAME packed" in str(find_run_problems(folders, train=True)[0])


def test_a_copy_that_finds_no_space_is_refused_before_training(source, copy, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert copy(cache="file/cache").startswith(f"DATA.CACHE_DIR: {tmp_path}/file/cache/remote: Not a directory; fix: ")
    enough_for_the_index = (source.folder / "train/index.bin").stat().st_size
    monkeypatch.setattr(store.shutil, "disk_usage", lambda folder: SimpleNamespace(free=enough_for_the_index))
    with pytest.raises(OSError, match=f" GB are needed for {source.url}/train.*, and 0.0 GB are free"):
        next(remote.main(f"{source.url}/train", str(tmp_path / "other"), 5.0, 5.0, True))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, limits[1]))  # of this process and its children
    try:
        assert "remote: File too large; fix: free some space, or set it" in copy()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_same_files(folder := copy(), source.folder / "train")
    words = f"{source.url}/train", str(folder.parent), 5.0, 5.0, False
    assert next(remote.main(*words)) == str(folder), "no space is needed for what is there"


@pytest.mark.slow
def test_a_changed_object_is_reported_and_never_mixed_in(source, copy, packed):
    shard, index = (source.folder / "train" / name for name in ("shard-00001.bin", "index.bin"))
    content = shard.read_bytes()
    for wrong, said in (
        (content[:-1] + bytes([content[-1] ^ 1]), "of image 41 does not match, 4 times; fix: upload this file"),
        (b"X" + content[1:], "does not belong to this pack, or its header is corrupt; pack the data again, 4 times"),
        (content + b"0", "truncated or replaced; fix: restore it"), (content[:-1], "truncated or replaced"),
    ):  # fmt: skip
        shard.write_bytes(wrong)
        assert (found := copy()).startswith(f"{source.url}/train/shard-00001.bin: ") and said in found, found
    shard.unlink()
    assert "shard-00001.bin: no such object" in copy()
    source.status = 401
    assert "access denied (HTTP 401 " in copy()
    source.status = 0
    shard.write_bytes(content)
    folder = copy()
    assert_same_files(folder, packed / "train")
    os.utime(index, (1, 1))  # another version of the pack
    assert copy() != folder
    index.write_bytes(index.read_bytes()[:-3] + b"xyz")
    assert (found := copy()).startswith(f"{source.url}/train/index.bin: ") and "4 times; fix: upload" in found


def test_damage_in_the_cache_is_repaired(copy, packed):
    folder, local = copy(), packed / "train"
    first, second, *_ = sorted(folder.glob("shard-*"))
    first.write_bytes(b"")
    second.unlink()
    (index := folder / "index.bin").write_bytes(index.read_bytes()[:-3] + b"xyz")
    (folder / ".shard-00000.bin.0123456789abcdef.tmp").write_bytes(b"of a killed process")
    assert_same_files(copy(), local)


def test_an_outage_is_waited_for_and_has_a_limit(source, copy, packed):
    source.is_gone = True
    threading.Timer(0.6, setattr, (source, "is_gone", False)).start()
    assert_same_files(copy(timeout_s=20), packed / "train")
    source.is_gone = True
    assert f"{source.url}/train/index.bin: it cannot be reached: HTTP error" in (found := copy(timeout_s=0.3))
    assert "DATA.TIMEOUT_S" in found


@pytest.mark.slow
def test_one_process_copies_and_a_killed_one_is_replaced(source, packed, tmp_path):
    context, cache, source.is_gone = multiprocessing.get_context("fork"), tmp_path / "cache", True
    words = f"{source.url}/train", str(cache), 30.0
    children = [context.Process(target=copy_pack, args=words) for _ in range(3)]
    for child in children:
        child.start()
    wait_for(lambda: [*(cache / "remote").glob("*.lock")], timeout_s=60)
    time.sleep(0.5)
    for child in children[:2]:
        os.kill(child.pid, signal.SIGKILL)
    source.is_gone = False
    children[2].join(60)
    assert children[2].exitcode == 0
    assert_same_files(next(path for path in (cache / "remote").iterdir() if path.is_dir()), packed / "train")
    shards = [path for path, *_ in source.requests if "shard" in path]
    assert len(shards) < 2 * len({*shards}), "one process copies; it may try a request again"


@pytest.fixture
def s3(object_server, packed, monkeypatch):
    """A server of the S3 protocol with the pack at S3."""
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    object_server.reset()
    for path in filter(Path.is_file, packed.rglob("*")):
        with store.Store(S3, 60.0, 60.0).request("") as objects:
            objects.put(path.relative_to(packed).as_posix(), path)
    return object_server


@pytest.mark.slow
def test_the_batches_of_a_pack_on_s3_are_those_of_the_local_one(s3, packed, tmp_path):
    words = ["TRAIN.WORKERS", "2", "DATA.WORKER_KIND", "process", "DATA.TIMEOUT_S", "30"]
    remote, local = (cfg_of(root, tmp_path, *words) for root in (S3, packed))
    for train in (True, False):
        assert_same_batches(batches_of(remote, train), batches_of(local, train))


@pytest.mark.slow
def test_missing_objects_and_refused_access_on_s3_are_reported_before_training(s3, tmp_path):
    for url in ("s3://no-such-bucket/set", "s3://bucket/none"):
        assert f"{url}/train/index.bin: no such object or bucket; fix: check the URL" in problem_of(url, tmp_path)
    # S3 answers expired tokens with status 400, and HEAD requests without the code.
    for refusal in ((403, "AccessDenied"), (400, "ExpiredToken"), (403, "InvalidAccessKeyId"), (400, "InvalidToken")):
        s3.refusal = refusal
        found = problem_of(S3, tmp_path)
        assert f"{S3}/train/index.bin: access denied" in found and "fix: renew them" in found, found
