"""Runs at URLs of other stores than S3: Google Cloud Storage, a folder; several nodes."""

import os
import shutil
import subprocess
import sys

import pytest
from support.processes import RESULT_S, free_port
from support.runs import ROOT, assert_same_run, run_python, small_options

from distribuuuu.config.run_files import local_folder

pytestmark = pytest.mark.slow

START = "import sys; from distribuuuu.commands.main import dispatch; sys.exit(dispatch('distribuuuu', sys.argv[1:]))"


@pytest.fixture
def google(monkeypatch):
    """An emulator of Google Cloud Storage; yields the URL of a bucket."""
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="gcp-storage-emulator is not installed")
    port = free_port()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # these requests leave the emulator
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    yield "gs://bucket"
    server.stop()


def test_a_run_is_mirrored_restored_and_continued(google, sixty_images, tmp_path, monkeypatch):
    url = f"{google}/runs/small"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["OPTIM.MAX_EPOCH", "3", "CHECKPOINT.EVERY_STEPS", "2"]
    plain, folder = tmp_path / "plain", local_folder(url)
    assert folder.startswith(str(tmp_path / "cache"))
    assert run_python("-c", START, "train", *small_options(sixty_images, plain, *words)).returncode == 0
    train = ["train", *map(str, small_options(sixty_images, url, *words))]
    stopped = run_python("-c", START, *train, "--stop-epoch", "2")
    assert stopped.returncode == 0 and f"mirror {url} is complete" in stopped.stderr, stopped
    shutil.rmtree(folder)
    resumed = run_python("-c", START, *train)
    assert resumed.returncode == 0 and f"mirror {url} is complete" in resumed.stderr, resumed
    assert "resumed from" in resumed.stderr
    assert_same_run(plain, folder)
    shutil.rmtree(folder)
    tested = run_python("-c", START, "test", url)
    assert tested.returncode == 0 and os.path.isfile(f"{folder}/test_results.json"), tested


@pytest.mark.parametrize("caches", [("cache", "cache"), ("cache", "other")])
def test_several_nodes_need_one_local_folder(caches, sixty_images, tmp_path):
    url, port = f"file://{tmp_path}/store", str(free_port())
    code = f"from distribuuuu.engine import run_lock; run_lock.PATIENCE_S = 1.0; {START}"
    words = ["train", *map(str, small_options(sixty_images, url, "TRAIN.WORKERS", 0))]
    nodes = []
    for rank, cache in enumerate(caches):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": f"{tmp_path}/{cache}"}
        env |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        nodes.append(subprocess.Popen([sys.executable, "-c", code, *words], env=env, stderr=subprocess.PIPE, text=True))
    said = [node.communicate(timeout=RESULT_S)[1] for node in nodes]
    statuses = [node.returncode for node in nodes]
    if caches[0] == caches[1]:
        assert statuses == [0, 0] and f"mirror {url} is complete: " in said[0], said
    else:
        assert statuses == [2, 2] and "is not the same one on all nodes; fix: set XDG_CACHE_HOME" in said[0], said
