"""Signals, deaths, errors and hangs: the run is saved, says what happened in few lines, and leaves nothing behind."""

import contextlib
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.failing_models import assert_fault_is_reported, fault_words
from support.images import draw_folder
from support.processes import ends, free_port, wait_for
from support.runs import FAILING_MODELS, TRAIN_NET, small_options

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.distributed.comm import StopRequest
from distribuuuu.launch.signals import RunStopped, SignalState

if sys.platform != "linux":
    pytest.skip("finds the processes of a run in /proc", allow_module_level=True)

from bench_support.training_process import TrainingProcess

pytestmark = pytest.mark.slow

RUN_S = 300  # catches a hang; a run takes seconds
NPROC = ("--nproc", "2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 75, signal.SIGHUP: 129}
LONG = ("OPTIM.MAX_EPOCH", 10000, "TRAIN.PRINT_FREQ", 4, "CHECKPOINT.EVERY_STEPS", 2, "TRAIN.WORKERS", 1,
        "TRAIN.GLOBAL_BATCH_SIZE", 12)  # fmt: skip


@pytest.fixture(scope="module")
def slow_to_evaluate(tmp_path_factory) -> Path:
    """A folder whose evaluation takes seconds, an image at a time."""
    root = tmp_path_factory.mktemp("images")
    draw_folder(root, "train", {"ant": 16, "bee": 16, "cat": 16})
    draw_folder(root, "val", {"ant": 500, "bee": 500, "cat": 500})
    return root


@contextlib.contextmanager
def started(root: Path, out_dir: Path, *words, launcher=NPROC, num_steps: int = 4) -> Iterator[TrainingProcess]:
    """Start a training on two processes, and kill what is left of it at the end."""
    before, flags = ((sys.executable,), launcher) if "--nproc" in launcher else (launcher, ())
    scripts = [*([str(FAILING_MODELS)] if "MODEL.ARCH" in words else []), str(TRAIN_NET)]
    command = [*before, *scripts, *flags, *small_options(root, out_dir, *LONG, *words)]
    run = TrainingProcess(command, out_dir, num_steps)
    try:
        yield run
    finally:
        run.kill()


def lines_said(run: TrainingProcess, since: int = 0) -> list[str]:
    """Return what the run has printed but for the log of its progress."""
    starts = "distribuuuu|python|device|model|data|step|loss|task|learning|training|mean|resumed|CHECKPOINT.KEEP_LAST"
    progress = re.compile(rf"^[\d:]{{8}} ({starts}|epoch|validation|best| )")
    text = Path(f"{run.out_dir}.console").read_text(errors="replace")
    return [line for line in text.splitlines()[since:] if line and not progress.match(line) and "/10000" not in line]


def checkpoints_of(run: TrainingProcess) -> list[Path]:
    return CheckpointManager(run.out_dir).list()


def wait_for_phase(run: TrainingProcess, phase: str) -> None:
    if phase == "start-up":
        run.wait_for(lambda: len(run.list_pids()) >= 3)
        time.sleep(1)
    elif phase == "epoch":
        run.wait_for(lambda: run.records())
    elif phase == "save":
        run.wait_for(run.temporary_file)
    else:
        run.wait_for(run.is_evaluating)


@pytest.mark.parametrize("phase, signum", [
    *((phase, signal.SIGTERM) for phase in ("start-up", "epoch", "save", "evaluation")),
    ("epoch", signal.SIGHUP), ("evaluation", signal.SIGINT),
])  # fmt: skip
def test_a_signal_saves_and_ends_two_processes_in_any_phase(slow_to_evaluate, tmp_path, phase, signum):
    slow = ("TEST.BATCH_SIZE", 1) if phase == "evaluation" else ()
    with started(slow_to_evaluate, tmp_path / "out", *slow) as run:
        wait_for_phase(run, phase)
        run.signal_launcher(signum)
        assert ends(run) and run.wait(10) == STATUS[signum]
        assert 1 <= len(lines_said(run)) <= 10 and "Traceback" not in run.last_lines()
        if phase == "start-up":
            assert "ended at once" in run.last_lines()
        else:
            assert f"{signum.name}: stopped in epoch" in run.last_lines()
            saved = read_checkpoint(checkpoints_of(run)[-1])
            assert f"epoch {saved['epoch'] + 2} after step {saved['step']}" in run.last_lines()
        if phase == "evaluation":
            assert (saved["epoch"], saved["step"]) == (-1, 4), "the steps are kept, the evaluation is not"


def test_a_second_signal_ends_at_once(slow_to_evaluate, tmp_path):
    with started(slow_to_evaluate, tmp_path / "out", "MODEL.ARCH", "sleepy", "MODEL.KWARGS.seconds", 600) as run:
        run.wait_for(lambda: "learning rate" in run.last_lines())
        time.sleep(1)  # in the first step, which takes ten minutes
        run.signal_launcher(signal.SIGINT)
        time.sleep(1.5)
        assert run.list_pids(), "the first signal waits for the end of the step"
        run.signal_launcher(signal.SIGINT)
        assert ends(run) and run.wait(10) == 130
        assert "SIGINT: ended at once" in run.last_lines()


def test_the_hours_of_a_run_end_it_with_the_status_to_start_it_again(image_folder, tmp_path):
    with started(image_folder, tmp_path / "out", "CHECKPOINT.MAX_HOURS", 1 / 3600) as run:
        assert run.wait(RUN_S) == 75
        assert "CHECKPOINT.MAX_HOURS: stopped in epoch" in run.last_lines()


def test_the_hours_count_from_the_start_of_the_process(monkeypatch):
    """Set-up, the index of the data and the check of files included: the job's time began there."""
    monkeypatch.setattr(SignalState.current, "started", time.monotonic() - 60)
    StopRequest(max_hours=90 / 3600).check("position")
    with pytest.raises(RunStopped, match="MAX_HOURS"):
        StopRequest(max_hours=30 / 3600).check("position")


def test_a_signal_ends_a_process_that_waits_for_the_others(image_folder, tmp_path, monkeypatch):
    """It waits in C, where Python's own signal handlers do not run."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    with started(image_folder, tmp_path / "out", launcher=(sys.executable,)) as run:
        wait_for(lambda: not socket.socket().connect_ex(("127.0.0.1", place["MASTER_PORT"])), timeout_s=60)
        time.sleep(1)
        run.signal_launcher(signal.SIGTERM)
        assert ends(run) and run.wait(10) == 143
        assert lines_said(run) == ["SIGTERM: ended at once; checkpoints stay"]


PLACES = {"nproc 2": (NPROC, 2, 1), "nproc 3": (NPROC, 3, 0), "torchrun 3": (TORCHRUN, 3, 0)}


@pytest.mark.parametrize("fault", ["killed", "stopped", "hung"])
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_of_one_process_ends_all_and_says_where_each_is(image_folder, tmp_path, place, fault):
    launcher, num, rank = PLACES[place]
    launcher = (*launcher[:-1], launcher[-1].replace("2", str(num)))
    with started(image_folder, tmp_path / "out", *fault_words(fault, rank), launcher=launcher) as run:
        status = run.wait(RUN_S)
        assert ends(run) and status == (137 if fault == "killed" and "--nproc" in launcher else 1)
        assert_fault_is_reported(run.out_dir, fault, rank, num)
        if fault == "killed" and "--nproc" in launcher:
            assert len(lines_said(run)) == 1


def test_a_process_killed_at_its_start_ends_the_others(image_folder, tmp_path):
    with started(image_folder, tmp_path / "out", launcher=NPROC) as run:
        run.wait_for(lambda: run.has_rank(1))
        run.signal_rank(1, signal.SIGKILL)
        assert ends(run, timeout_s=25) and run.wait(10) == 137


def test_a_killed_launcher_leaves_no_process_and_loses_no_step(image_folder, tmp_path):
    for launcher in (NPROC, TORCHRUN):
        with started(image_folder, tmp_path / f"out{len(launcher)}", launcher=launcher) as run:
            run.wait_for(run.records)
            run.signal_launcher(signal.SIGKILL)
            assert ends(run)
            assert "SIGTERM: stopped in epoch" in run.last_lines()


def test_an_exception_is_printed_once(image_folder, tmp_path):
    for launcher in (NPROC, TORCHRUN):
        with started(image_folder, tmp_path / f"out{len(launcher)}", "MODEL.ARCH", "failing", launcher=launcher) as run:
            assert run.wait(RUN_S) == 1
            text = Path(f"{run.out_dir}.console").read_text()
            assert ends(run)
            assert text.count("ArithmeticError: the flux has run out") == 1
            said = r"process 1 on \S+ died after epoch 1, step 2; the others stop"
            assert re.search(said, text)
            if launcher == NPROC:
                assert text.count("Traceback (most recent call last)") == 1
                assert checkpoints_of(run), "a checkpoint of the first two steps is there"


def test_sigquit_shows_the_stack_and_the_run_goes_on(image_folder, tmp_path):
    with started(image_folder, tmp_path / "out", "TRAIN.WORKERS", 2, launcher=(sys.executable,)) as run:
        run.wait_for(run.records)
        # Workers get it too. The system may give it to a thread of torch, which has no Python stack: it is sent again.
        run.wait_for(lambda: run.signal_everybody(signal.SIGQUIT) or "in train_model" in run.said_since_start())
        seen = len(run.records())
        run.wait_for(lambda: len(run.records()) > seen + 8)
        run.signal_launcher(signal.SIGTERM)
        assert run.wait(RUN_S) == 143 and "loader worker" not in run.last_lines()


def test_torchrun_starts_a_run_that_lost_a_process_again(image_folder, tmp_path):
    words = ("OPTIM.MAX_EPOCH", 40, "MODEL.KWARGS.width", 8)
    for name in ("peace", "war"):
        launcher = (*TORCHRUN, "--max-restarts=1", "--monitor-interval=0.1")
        with started(image_folder, tmp_path / name, *words, launcher=launcher) as run:
            if name == "war":
                run.wait_for(lambda: len(run.records()) > 5)
                run.signal_rank(1, signal.SIGKILL)
            assert run.wait(RUN_S) == 0
    assert "resumed from" in (tmp_path / "war" / "train.log").read_text()
    peace, war = (read_checkpoint(CheckpointManager(tmp_path / name).list()[-1]) for name in ("peace", "war"))
    assert all(torch.equal(peace["state_dict"][key], war["state_dict"][key]) for key in peace["state_dict"])


def test_a_launcher_killed_in_the_start_leaves_no_process(image_folder, tmp_path):
    """Neither the processes nor their loader workers may miss a death that comes before they listen for it."""
    for number, delay_s in enumerate((0.0, 1.0, 2.5)):
        with started(image_folder, tmp_path / f"out{number}", "TRAIN.WORKERS", 3) as run:
            run.wait_for(lambda run=run: run.has_rank(0))
            time.sleep(delay_s)
            run.signal_launcher(signal.SIGKILL)
            assert ends(run), delay_s
