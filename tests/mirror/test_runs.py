"""Runs at a URL: kills of the run and of the server, a store that is down, a folder as a store."""

import os
import random
import shutil
import subprocess
import sys
import time

import pytest
from support.processes import wait_for
from support.runs import ROOT, assert_same_run, run_python, small_options

from distribuuuu.config.run_files import local_folder

pytestmark = pytest.mark.slow

URL = "s3://bucket/runs/small"
MORE = ("OPTIM.MAX_EPOCH", 6, "CHECKPOINT.EVERY_STEPS", 2)
# The limit of the wait at the end of a run, for a store that stays down.
IMPATIENT = "from distribuuuu.mirror import sync; sync.END_S = 3.0; "
START = "import sys; from distribuuuu.commands.main import dispatch; sys.exit(dispatch('distribuuuu', sys.argv[1:]))"


@pytest.fixture(scope="module")
def undisturbed(sixty_images, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "plain"
    assert run_python("-c", START, "train", *small_options(sixty_images, out, *MORE)).returncode == 0
    return out


@pytest.fixture
def store(object_server, tmp_path, monkeypatch):
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    for name, value in {**object_server.environment, **own}.items():
        monkeypatch.setenv(name, value)
    object_server.reset()
    return object_server


def start(sixty_images, *words, before="") -> subprocess.Popen:
    command = [sys.executable, "-c", before + START, "train", *small_options(sixty_images, URL, *MORE, *words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    """Return the last line of a run whose mirror is complete."""
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert f"mirror {URL} is complete: " in (last := said.splitlines()[-1])
    return last


def test_runs_that_are_killed_resume_bitwise_on_an_empty_machine(store, sixty_images, undisturbed):
    folder, rng = local_folder(URL), random.Random(0)
    for _ in range(3):
        process = start(sixty_images)
        wait_for(lambda: os.path.exists(f"{folder}/train.log"), timeout_s=60)
        time.sleep(rng.uniform(0, 4))
        process.kill()
        process.communicate()
        shutil.rmtree(folder)
    finish(start(sixty_images))
    assert_same_run(undisturbed, folder)
    shutil.rmtree(folder)
    done = run_python("-c", START, "test", URL)
    assert done.returncode == 0 and "best.pth.tar" in done.stderr, done
    assert not os.path.exists(f"{folder}/checkpoints")
    finish(start(sixty_images))  # restores the checkpoints; nothing is left to train
    assert_same_run(undisturbed, folder)


def test_a_store_that_stays_down_or_lacks_the_bucket_is_reported(store, sixty_images, undisturbed):
    process, folder = start(sixty_images, before=IMPATIENT), local_folder(URL)
    wait_for(lambda: os.path.exists(f"{folder}/checkpoints"), timeout_s=60)
    store.stop()
    try:
        _, said = process.communicate(timeout=100)
        assert process.returncode == 74 and "is NOT complete: " in said.splitlines()[-1], said
        assert_same_run(undisturbed, folder)
    finally:
        store.start()
    finish(start(sixty_images))
    shutil.rmtree(folder)
    finish(start(sixty_images))
    assert_same_run(undisturbed, folder)
    words = small_options(sixty_images, "s3://nobucket/x", *MORE)
    done = run_python("-c", START, "train", *map(str, words))
    assert done.returncode == 2 and "s3://nobucket/x/states: no such object or bucket; fix: check" in done.stderr


@pytest.mark.parametrize("num", [1, 2])
def test_the_error_that_ends_a_run_is_in_the_mirrored_log(sixty_images, tmp_path, monkeypatch, num):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/store/run"
    slow = "from distribuuuu.mirror import sync; import time; stop = sync.MirrorClient.__exit__; "
    slow += "sync.MirrorClient.__exit__ = lambda *args: (time.sleep(7), stop(*args))[1]; "
    words = [*small_options(sixty_images, url, *MORE, "OPTIM.NAME", "sgd", "OPTIM.BASE_LR", 1e30), "--nproc", num]
    done = run_python("-c", slow + START, "train", *map(str, words))
    assert done.returncode == 2 and done.stderr.count("the training loss is") == 1, done
    assert f"mirror {url} is complete" in done.stderr
    shutil.rmtree(local_folder(url))
    run_python("-c", START, "report", url)
    assert "the training loss is" in open(f"{local_folder(url)}/train.log").read()
