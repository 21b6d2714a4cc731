"""One training at a time per OUT_DIR; however it ends, the next one starts at once."""

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from support.runs import ROOT, small_options

from distribuuuu.config import load_cfg
from distribuuuu.engine import run_lock
from distribuuuu.engine.run_lock import OutDirLocked, lock_out_dir
from distribuuuu.files import locks
from distribuuuu.trainer import evaluate_weights, train_model

if sys.platform != "linux":
    pytest.skip("kills and finds processes as on Linux", allow_module_level=True)

from bench_support.training_process import TrainingProcess


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.3)
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def hold(out_dir: Path, is_held, seconds: float) -> None:
    with lock_out_dir(out_dir):
        is_held.set()
        time.sleep(seconds)


@contextlib.contextmanager
def held(out_dir: Path, seconds: float = 60):
    context = multiprocessing.get_context("fork")
    is_held = context.Event()
    process = context.Process(target=hold, args=(out_dir, is_held, seconds))
    process.start()
    assert is_held.wait(60)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def test_a_second_run_is_refused_and_names_the_owner_of_the_folder(tmp_path):
    with held(tmp_path) as holder, pytest.raises(OutDirLocked) as refused, lock_out_dir(tmp_path):
        pass
    for part in (socket.gethostname(), f"pid {holder.pid},", "started 20", "set another OUT_DIR"):
        assert part in str(refused.value)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_a_file_but_no_lock(tmp_path, signum):
    with held(tmp_path) as holder:
        os.kill(holder.pid, signum)
        holder.join()
        with lock_out_dir(tmp_path):
            assert f"pid {os.getpid()}," in (tmp_path / ".lock").read_text()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(locks.fcntl, "lockf", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with lock_out_dir(tmp_path):
        assert "has no locks" in caplog.text


@pytest.mark.slow
def test_beside_a_running_training_another_is_refused_and_an_evaluation_is_not(image_folder, tmp_path):
    out_dir = tmp_path / "out"
    words = small_options(image_folder, out_dir, "OPTIM.MAX_EPOCH", 10000, "CHECKPOINT.EVERY_STEPS", 1)
    run = TrainingProcess([sys.executable, str(ROOT / "tools" / "train_net.py"), *words], out_dir, 4)
    try:
        run.wait_for((out_dir / "best.pth.tar").exists)
        temporary = out_dir / "checkpoints" / ".ckpt_ep_000.pth.tar.0123456789abcdef.tmp"  # that of a save
        temporary.write_bytes(b"half")
        assert evaluate_weights(load_cfg(None, words))["count"] == 37
        with pytest.raises(OutDirLocked, match="in use by another training"):
            train_model(load_cfg(None, words))
        assert temporary.exists()
        run.signal_launcher(signal.SIGKILL)
        run.wait(60)
        train_model(load_cfg(None, [*words, "OPTIM.MAX_EPOCH", "0"]))
        assert not temporary.exists()
    finally:
        run.kill()
    keys = [(record["epoch"], record["step"], record["kind"]) for record in run.records()]
    assert len(set(keys)) == len(keys)
