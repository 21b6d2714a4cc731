"""The same command under srun, on whatever cluster it reaches."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.cluster import TRAIN_NET, need, run, srun_words
from support.runs import small_options
from training_process import TrainingProcess

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.config import load_cfg
from distribuuuu.trainer import train_model

JOB_NAME = "distribuuuu-test-of-srun"


@pytest.fixture(autouse=True)
def cluster():
    """Skip where srun reaches no cluster of two nodes."""
    need(nodes=2)


def test_two_nodes_train_the_model_that_one_process_trains(image_folder, tmp_path):
    shared = ("TRAIN.GLOBAL_BATCH_SIZE", 12, "MODEL.KWARGS.norm", "group")
    train_model(load_cfg(None, small_options(image_folder, tmp_path / "alone", *shared)))
    done = run(*srun_words(image_folder, tmp_path / "slurm", *shared))
    assert done.returncode == 0, done.stderr
    assert "launcher: srun, process 0 of 4; backend gloo" in done.stderr
    one, other = (read_checkpoint(tmp_path / name / "best.pth.tar")["state_dict"] for name in ("alone", "slurm"))
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, other[key], rtol=1e-5, atol=1e-5)


def test_one_task_is_one_process(image_folder, tmp_path):
    words = small_options(image_folder, tmp_path / "out", "OPTIM.MAX_EPOCH", 1)
    done = run("srun", "-N1", "-n1", sys.executable, TRAIN_NET, *words)
    assert done.returncode == 0 and "launcher: plain python, one process" in done.stderr, done.stderr


def test_a_mistake_is_told_once(tmp_path):
    done = run("srun", "-N2", "--ntasks-per-node=2", sys.executable, TRAIN_NET, "NO.KEY", "1")
    assert done.stderr.count("NO.KEY") == 1 and "Traceback" not in done.stderr


def test_two_runs_on_the_same_nodes_at_once_do_not_meet(image_folder, tmp_path):
    runs = [
        subprocess.Popen(srun_words(image_folder, tmp_path / name), stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        for name in ("one", "two")
    ]
    said = [process.communicate(timeout=200)[1].decode() for process in runs]
    assert [process.returncode for process in runs] == [0, 0], said
    one, two = (read_checkpoint(tmp_path / name / "best.pth.tar")["state_dict"] for name in ("one", "two"))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.fixture
def long_run(image_folder, tmp_path):
    command = srun_words(image_folder, tmp_path / "out", "OPTIM.MAX_EPOCH", 10000)
    process = TrainingProcess([command[0], f"--job-name={JOB_NAME}", *command[1:]], tmp_path / "out")
    process.wait_for(process.records)
    yield process
    process.kill()


def seconds_until_gone(run: TrainingProcess) -> float:
    began = time.monotonic()
    while run.list_pids() and time.monotonic() - began < 30:
        time.sleep(0.05)
    return time.monotonic() - began


def test_a_killed_task_ends_the_others(long_run):
    try:
        long_run.kill_marked("SLURM_PROCID=3")
    except StopIteration:
        pytest.skip("the processes of the nodes cannot be seen from here")
    assert seconds_until_gone(long_run) < 6
    text = Path(f"{long_run.out_dir}.console").read_text()
    assert re.search(r"process 3 on \S+ died after epoch \d+, ", text) and "Traceback" not in text


def test_a_terminated_step_saves_and_leaves_nothing(long_run):
    run("scancel", "--signal=TERM", f"--name={JOB_NAME}")
    assert seconds_until_gone(long_run) < 10
    assert "SIGTERM: stopped in epoch" in Path(f"{long_run.out_dir}.console").read_text()
    assert long_run.wait(1) == 143
