"""Trainings that srun starts on two nodes: equal to one process, independent of each other, ended together."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench_support.training_process import TrainingProcess
from support.cluster import require_cluster, run, srun_command
from support.processes import ends
from support.runs import GROUP_NORM, TRAIN_NET, small_options

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.config import load_cfg
from distribuuuu.trainer import train_model

pytestmark = pytest.mark.slurm

JOB_NAME = "distribuuuu-test-of-srun"


@pytest.fixture(autouse=True)
def cluster():
    """Skip the test without a cluster of two nodes."""
    require_cluster(nodes=2)


def test_two_nodes_train_the_same_model_as_one_process(image_folder, tmp_path):
    shared = ("TRAIN.GLOBAL_BATCH_SIZE", 12, *GROUP_NORM)
    train_model(load_cfg(None, small_options(image_folder, tmp_path / "alone", *shared)))
    done = run(*srun_command(image_folder, tmp_path / "slurm", *shared))
    assert done.returncode == 0, done.stderr
    assert "launcher: srun, process 0 of 4; backend gloo" in done.stderr
    one, other = (read_checkpoint(tmp_path / name / "best.pth.tar")["state_dict"] for name in ("alone", "slurm"))
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, other[key], rtol=1e-5, atol=1e-5)


def test_a_config_error_is_reported_once():
    done = run("srun", "-N2", "--ntasks-per-node=2", sys.executable, str(TRAIN_NET), "NO.KEY", "1")
    assert done.stderr.count("NO.KEY") == 1 and "Traceback" not in done.stderr


def test_two_runs_on_the_same_nodes_do_not_interfere(image_folder, tmp_path):
    runs = [
        subprocess.Popen(srun_command(image_folder, tmp_path / name), stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        for name in ("one", "two")
    ]
    errors = [process.communicate(timeout=300)[1].decode() for process in runs]
    assert [process.returncode for process in runs] == [0, 0], errors
    one, two = (read_checkpoint(tmp_path / name / "best.pth.tar")["state_dict"] for name in ("one", "two"))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.fixture
def long_run(image_folder, tmp_path):
    command = srun_command(image_folder, tmp_path / "out", "OPTIM.MAX_EPOCH", 10000)
    process = TrainingProcess([command[0], f"--job-name={JOB_NAME}", *command[1:]], tmp_path / "out")
    process.wait_for(process.records)
    yield process
    process.kill()


def test_a_killed_task_ends_the_others(long_run):
    try:
        long_run.kill_marked("SLURM_PROCID=3")
    except StopIteration:
        pytest.skip("the processes of the nodes are not visible on this host")
    assert ends(long_run)
    text = Path(f"{long_run.out_dir}.console").read_text()
    assert re.search(r"process 3 on \S+ died after epoch \d+, ", text) and "Traceback" not in text


def test_sigterm_to_a_step_saves_and_ends_every_process(long_run):
    run("scancel", "--signal=TERM", f"--name={JOB_NAME}")
    assert ends(long_run)
    assert "SIGTERM: stopped in epoch" in Path(f"{long_run.out_dir}.console").read_text()
    assert long_run.wait(10) == 143
