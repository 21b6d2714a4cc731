"""One training at a time per OUT_DIR; however it ends, the next one starts at once."""

import contextlib
import errno
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from support.processes import on_processes
from support.runs import ROOT, assert_same_run, small_options
from support.states import make_state

from distribuuuu import trainer
from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager, OutDirLost
from distribuuuu.config import load_cfg
from distribuuuu.distributed.process_group import process_group
from distribuuuu.engine import run_lock
from distribuuuu.engine.build import open_run
from distribuuuu.engine.run_lock import OutDirLocked, describe_holder, lock_out_dir
from distribuuuu.files import locks
from distribuuuu.launch.detect import detect_launch
from distribuuuu.records.metric_writers import RecordFile
from distribuuuu.trainer import test_model as evaluate_run
from distribuuuu.trainer import train_model

if sys.platform != "linux":
    pytest.skip("kills and finds processes as on Linux", allow_module_level=True)

from bench_support.training_process import TrainingProcess


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.3)
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def is_refused(out_dir: Path) -> bool:
    try:
        with lock_out_dir(out_dir):
            return False
    except OutDirLocked:
        return True


def test_the_lock_remains_after_the_check_that_all_processes_see_it(tmp_path):
    with lock_out_dir(tmp_path):
        assert run_lock.is_shared(tmp_path) and on_processes(1, is_refused, tmp_path) == [True]
        assert on_processes(2, is_seen_by_all, tmp_path) == [True, True]
    assert on_processes(1, is_refused, tmp_path) == [False]


def is_seen_by_all(out_dir: Path) -> bool:
    with process_group(detect_launch(), torch.device("cpu"), 60):
        return run_lock.is_shared(out_dir)


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
            record = json.loads((tmp_path / ".lock").read_text())
            assert record["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == [], "a run that ends by itself leaves nothing"


@pytest.mark.slow
def test_a_run_that_is_ending_is_waited_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run_lock, "PATIENCE_S", 60)
    with held(tmp_path, seconds=5), lock_out_dir(tmp_path):
        pass
    assert "waiting up to 60 s for its end" in caplog.text


def test_a_lock_of_a_file_that_was_deleted_is_not_taken_for_the_lock(tmp_path):
    """The lock file is deleted at the end; a process that opened it before would lock a deleted file."""
    with held(tmp_path):
        os.unlink(tmp_path / ".lock")
        with lock_out_dir(tmp_path):
            assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
            other = open(tmp_path / "other", "a+")
            assert locks.try_lock(other, is_inherited=False) and not locks.is_at(other, tmp_path / ".lock")


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_lock_that_was_deleted_is_taken_again_at_the_next_save(tmp_path, caplog):
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    with lock_out_dir(out_dir) as find_loss:
        folder = CheckpointManager(out_dir, find_loss=find_loss)
        folder.save(make_state(epoch=1))
        assert not caplog.records
        (out_dir / ".lock").unlink()
        folder.save(make_state(epoch=2))
        assert f"{out_dir / '.lock'} was deleted during this training; it is locked again" in caplog.text
        assert [path.name for path in folder.list()] == ["ckpt_ep_001.pth.tar", "ckpt_ep_002.pth.tar"]
        assert is_locked_for_others(out_dir)
    assert not (out_dir / ".lock").exists()


def is_locked_for_others(out_dir: Path) -> bool:
    def try_it(answers) -> None:
        try:
            with lock_out_dir(out_dir):
                answers.put(False)
        except OutDirLocked:
            answers.put(True)

    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=try_it, args=(answers,))
    process.start()
    process.join()
    return answers.get()


@pytest.mark.parametrize("is_late", [False, True], ids=["at the save", "at a retry of it"])
@pytest.mark.parametrize("cause", ["a second run", "another folder"])
def test_a_run_whose_folder_belongs_to_another_writes_beside_it_and_stops(tmp_path, cause, is_late):
    """A lock that was deleted by hand lets a second run start; OUT_DIR may be renamed, and its name be used again."""
    out_dir, state = tmp_path / "out", make_state(epoch=2, best=(12.5, 1))
    out_dir.mkdir()
    with contextlib.ExitStack() as stack:
        find_loss, is_asked = stack.enter_context(lock_out_dir(out_dir)), []

        def lose() -> None:
            if cause == "a second run":
                (out_dir / ".lock").unlink()
                stack.enter_context(held(out_dir))
            else:
                out_dir.rename(tmp_path / "elsewhere")
                out_dir.mkdir()
                (out_dir / "notes.txt").write_text("somebody's")

        def find_loss_late() -> str | None:
            is_asked.append(1)
            if is_late and len(is_asked) == 4:  # two for each save: at its request and in the background
                lose()
            return find_loss()

        folder = CheckpointManager(out_dir, find_loss=find_loss_late)
        folder.save(make_state(epoch=1))
        if not is_late:
            lose()
        before = contents_of(out_dir)
        with pytest.raises(OutDirLost) as lost:
            folder.save(state, ["raw"])
        after = contents_of(out_dir)
        assert is_late or after == before
        assert set(after) - set(before) <= {".lock", "notes.txt"}, "nothing is written to the folder of the other"
    saved = tmp_path / "out.1" / "checkpoints" / "ckpt_ep_002.pth.tar"
    assert f"its checkpoint is {saved}; fix: resume it with OUT_DIR {tmp_path / 'out.1'}" in str(lost.value)
    assert ("in use by another training" if cause == "a second run" else "was replaced") in str(lost.value)
    other = make_state()
    other.load_dict(read_checkpoint(CheckpointManager(tmp_path / "out.1").find_latest()), saved)
    assert (other.epoch, other.bests["raw"].value) == (2, 12.5)
    assert (tmp_path / "out.1" / "best.pth.tar").exists()


@pytest.mark.parametrize("cause", ["moved", "replaced by an empty one", "replaced by a copy", "replaced by a link"])
def test_a_folder_that_can_only_be_this_runs_is_used_on(tmp_path, cause, caplog):
    out_dir, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out_dir.mkdir()
    with lock_out_dir(out_dir) as find_loss:
        folder = CheckpointManager(out_dir, find_loss=find_loss)
        folder.save(make_state(epoch=1))
        out_dir.rename(elsewhere)
        if cause == "replaced by an empty one":
            out_dir.mkdir()
        elif cause == "replaced by a copy":  # e.g. on a larger disk
            shutil.copytree(elsewhere, out_dir)
        elif cause == "replaced by a link":
            out_dir.symlink_to(elsewhere)
        for number in range(2):  # a record before the next checkpoint must not make the folder look like another run's
            RecordFile(out_dir / "metrics.jsonl", find_loss).append({"number": number})
        folder.save(make_state(epoch=2))
        assert len((out_dir / "metrics.jsonl").read_text().splitlines()) == 2
        assert folder.list()[-1].name == "ckpt_ep_002.pth.tar" and is_locked_for_others(out_dir)
        assert ("was moved, deleted or replaced" in caplog.text) == (cause != "replaced by a link")
    assert not (tmp_path / "out.1").exists()


def test_a_training_whose_folder_was_replaced_continues_beside_it(finished_run, small_cfg, tmp_path, monkeypatch):
    finish_epoch, out_dir = trainer.finish_epoch, tmp_path / "out"

    def replace_out_dir(run, evaluations):
        if run.state.epoch == 1:
            out_dir.rename(tmp_path / "elsewhere")
            out_dir.mkdir()
            (out_dir / "notes.txt").write_text("somebody's")
        return finish_epoch(run, evaluations)

    with monkeypatch.context() as patch, pytest.raises(OutDirLost, match="out was replaced by another folder"):
        patch.setattr(trainer, "finish_epoch", replace_out_dir)
        train_model(small_cfg("CHECKPOINT.EVERY_STEPS", 2))
    assert not {"checkpoints", "best.pth.tar", "results.json", "train.log"} & {path.name for path in out_dir.iterdir()}
    assert "resumed from" not in (tmp_path / "elsewhere" / "train.log").read_text()
    train_model(small_cfg("CHECKPOINT.EVERY_STEPS", 2, "OUT_DIR", tmp_path / "out.1"))
    assert_same_run(tmp_path / "out.1", finished_run)


def test_a_requeued_job_takes_over_from_a_host_that_is_gone(tmp_path, monkeypatch):
    with held(tmp_path):  # stands for the lock that a file server still has of it
        path = tmp_path / ".lock"
        record = {**json.loads(path.read_text()), "host": "elsewhere", "job": "Slurm job 7"}
        path.write_text(json.dumps(record))
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        with pytest.raises(OutDirLocked, match="elsewhere.*Slurm job 7"), lock_out_dir(tmp_path):
            pass
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        with lock_out_dir(tmp_path):
            assert json.loads(path.read_text())["restarts"] == 1


def test_where_there_are_no_locks_a_warning_and_the_process_of_this_host_count(tmp_path, monkeypatch, caplog):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    with held(tmp_path) as holder:
        monkeypatch.setattr(locks.fcntl, "lockf", refuse)
        with pytest.raises(OutDirLocked, match=f"pid {holder.pid}"), lock_out_dir(tmp_path):
            pass
        record = json.loads((tmp_path / ".lock").read_text())
        (tmp_path / ".lock").write_text(json.dumps({**record, "pid_started": "1"}))  # of a pid that was used again
        with lock_out_dir(tmp_path):
            assert "has no locks" in caplog.text
    with lock_out_dir(tmp_path):
        pass


@pytest.mark.parametrize(
    "record", [b"\xff\x00", b"[" * 100_000, b"[1]", b'{"host": 1, "pid": "../self", "restarts": "x"}']
)
def test_a_damaged_record_names_nobody_and_stops_nothing(tmp_path, monkeypatch, record):
    (tmp_path / ".lock").write_bytes(record)
    with run_lock.lock_out_dir(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    (tmp_path / ".lock").write_bytes(record)
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.0)
    monkeypatch.setattr(run_lock.locks, "try_lock", lambda file, **options: False)
    with pytest.raises(OutDirLocked, match="unknown process"), run_lock.lock_out_dir(tmp_path):
        pass


def test_a_pipe_or_a_folder_in_the_place_of_the_lock_is_named(tmp_path):
    for make, said in ((os.mkfifo, r"\S+ \S+"), (os.mkdir, "Is a directory")):
        folder = tmp_path / make.__name__
        folder.mkdir()
        make(folder / ".lock")
        with pytest.raises(OutDirLocked, match=rf"OUT_DIR: .*\.lock cannot be written: {said}") as refused:
            lock_out_dir(folder).__enter__()
        assert "None" not in str(refused.value)


def test_a_holder_says_of_which_job_it_is():
    for env, job, restarts in [
        ({}, "", 0), ({"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "2"}, "Slurm job 5", 2),
        ({"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "1"}, "torchrun r", 1),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, "", 0),
    ]:  # fmt: skip
        assert (describe_holder(env)["job"], describe_holder(env)["restarts"]) == (job, restarts)


def be_refused(cfg) -> str:
    try:
        with open_run(cfg, detect_launch(), torch.device("cpu"), "train.log", locks=True):
            return "not refused"
    except OutDirLocked as error:
        return str(error)


def test_every_process_of_a_refused_run_gets_the_error(small_cfg):
    cfg = small_cfg()
    Path(cfg.OUT_DIR).mkdir()
    with held(Path(cfg.OUT_DIR)) as holder:
        answers = on_processes(2, be_refused, cfg)
    assert all(f"pid {holder.pid}" in answer for answer in answers)
    assert not (Path(cfg.OUT_DIR) / "train.log").exists(), "nothing is written to the other run's log"


@pytest.mark.slow
def test_beside_a_running_training_another_is_refused_and_an_evaluation_is_not(image_folder, tmp_path):
    out_dir = tmp_path / "out"
    words = small_options(image_folder, out_dir, "OPTIM.MAX_EPOCH", 10000, "CHECKPOINT.EVERY_STEPS", 1)
    run = TrainingProcess([sys.executable, str(ROOT / "tools" / "train_net.py"), *words], out_dir, 4)
    try:
        run.wait_for((out_dir / "best.pth.tar").exists)
        temporary = out_dir / "checkpoints" / ".ckpt_ep_000.pth.tar.0123.tmp"  # that of a save
        temporary.write_bytes(b"half")
        assert evaluate_run(load_cfg(None, words))["count"] == 37
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
