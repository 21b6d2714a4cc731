"""Packed data on a server of the S3 protocol: read bitwise, clear errors."""

import time
from pathlib import Path

import pytest
from support.batches import assert_same_batches, batches_of
from support.commands import command_module, run_command
from support.runs import message_of, small_options

from distribuuuu.config import load_cfg
from distribuuuu.data.packed import format as packed_format
from distribuuuu.data.packed import store as packed_store
from distribuuuu.data.packed.dataset import Packed
from distribuuuu.engine.preflight import find_run_problems

pytestmark = pytest.mark.slow
command_module("pack.pack")

URL = "s3://bucket/sets/small"


@pytest.fixture(scope="module")
def packed(sixty_images, tmp_path_factory) -> Path:
    """A local pack of the images, in several shards."""
    root = tmp_path_factory.mktemp("sets")
    words = [root / "local", "--shard-mb", "0.02", "--workers", "0", "TRAIN.DATASET", sixty_images]
    assert run_command("pack", *map(str, words)) == 0
    return root / "local"


@pytest.fixture
def store(object_server, packed, monkeypatch):
    """The server, with the pack at URL; blocks have a few images, and retries come at once."""
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(packed_format, "BLOCK_BYTES", 4000)
    monkeypatch.setattr(packed_store, "FIRST_PAUSE_S", 0.05)
    object_server.reset()
    for path in filter(Path.is_file, packed.rglob("*")):
        files().put(path.relative_to(packed).as_posix(), path)
    return object_server


def files():
    return packed_store.open_store(URL, 60.0)


def cfg_of(root, tmp_path, *overrides):
    words = [*small_options(root, tmp_path / "out"), "DATA.NAME", "packed", "DATA.CACHE_DIR", str(tmp_path / "cache")]
    words += ["DATA.TIMEOUT_S", "30", "TEST.DATASET", str(root)]
    return load_cfg(None, [*words, *map(str, overrides)])


def problem_of(url, tmp_path) -> str:
    """Return what the checks before training report about a URL, which takes seconds at most."""
    begin = time.monotonic()
    found = "\n".join(str(problem) for problem in find_run_problems(cfg_of(url, tmp_path), train=True))
    assert time.monotonic() - begin < 20
    return found


def test_the_batches_of_an_uploaded_pack_are_those_of_the_local_one(store, packed, tmp_path):
    assert problem_of(URL, tmp_path) == ""  # the event loop runs before the workers are forked
    for kind in ("thread", "process"):
        words = ["TRAIN.WORKERS", 2, "DATA.WORKER_KIND", kind]
        for train in (True, False):
            remote = batches_of(cfg_of(URL, tmp_path, *words, "DATA.CACHE_DIR", tmp_path / kind), train)
            assert_same_batches(remote, batches_of(cfg_of(packed, tmp_path, *words), train))
        assert len([path for path in (tmp_path / kind).rglob("*") if path.name.isdigit() and path.is_file()]) > 10


def test_missing_objects_and_refused_access_are_reported_before_training(store, tmp_path):
    for url in ("s3://no-such-bucket/set", "s3://bucket/none"):
        assert f"{url}/train/index.bin: no such object; fix: check the URL" in problem_of(url, tmp_path)
    images = Packed(URL, "train", None, str(tmp_path / "cache"), 1.0, 30.0)
    # S3 answers expired tokens with status 400, and HEAD requests without the code.
    for refusal in ((403, "AccessDenied"), (400, "ExpiredToken"), (403, "InvalidAccessKeyId"), (400, "InvalidToken")):
        store.refusal = refusal
        found = problem_of(URL, tmp_path)
        assert f"{URL}/train/index.bin: access denied" in found and "fix: renew them" in found, found
        begin = time.monotonic()
        assert "access denied" in message_of(images.read, 59) and time.monotonic() - begin < 10
