"""Sweeps on Slurm: the options of srun, its exit statuses, refused flags; with marker slurm, a cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace

import pytest
from support.cluster import require_cluster, run
from support.processes import wait_for
from support.runs import ROOT, small_options
from support.sweeps import make_sweep

from distribuuuu.commands.sweep.executors import SlurmExecutor
from distribuuuu.commands.sweep.sweep import check_slurm
from distribuuuu.config import ConfigError


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Return slurm(SCRIPT): srun and scancel are shell scripts, of which srun ends with the given one."""

    def write(script: str) -> None:
        for name, text in (("srun", f"echo $@ >>{tmp_path}/calls\n{script}"), ("scancel", "")):
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)

    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return write


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 2", 2), ("exit 1", -1), ("kill -9 $$", -9)])
def test_a_job_is_an_srun_and_a_canceled_one_is_tried_again(slurm, tmp_path, script, status):
    slurm(script)
    sweep = make_sweep(tmp_path / "out", [{"OPTIM.BASE_LR": lr} for lr in ("0.1", "0.2")], epochs=4)
    executor, job = SlurmExecutor(1, sweep.out_dir, ["--gres=gpu:1", "--partition=gpu"]), sweep.job(0, 0, 4)
    assert executor.update([job, sweep.job(1, 0, 4)]) == {} and executor.running == [job]
    while not (ended := executor.update([])):
        time.sleep(0.01)
    assert ended == {job: status}
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "--gres=gpu:1 --partition=gpu --job-name=sweep-" in call and f"OUT_DIR {tmp_path}/out/trial_000" in call


def test_flags_that_slurm_refuses(slurm, monkeypatch, tmp_path):
    slurm("exit 0")
    flags = Namespace(slurm="gpu", sbatch=["--gres=gpu:1 --time=4:00:00", "--qos=a"], nproc=2)
    expected = ["--signal=USR1@120", "--ntasks=2", "--gres=gpu:1", "--time=4:00:00", "--qos=a", "--partition=gpu"]
    assert check_slurm(flags) == expected
    with pytest.raises(ConfigError, match="--sbatch: got '; No closing quotation"):
        check_slurm(Namespace(slurm="gpu", sbatch=["'"], nproc=1))
    slurm("echo 'srun: error: Invalid gres' >&2; exit 1")
    with pytest.raises(ConfigError, match="--slurm: got gpu .*; srun: error: Invalid gres"):
        check_slurm(flags)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="--slurm: got gpu; srun is not installed here"):
        check_slurm(flags)


@pytest.mark.slurm
def test_a_sweep_that_is_killed_and_then_interrupted_continues(image_folder, tmp_path):
    """The jobs save their checkpoints; those that a killed sweep has left are canceled by the next start."""
    require_cluster(nodes=2, partition="batch")
    out, log = tmp_path / "out", tmp_path / "log"
    options = small_options(image_folder, out, "OPTIM.MAX_EPOCH", 40, "TRAIN.PRINT_FREQ", 100)
    words = ["sweep", "--slurm", "batch", *options, "OPTIM.MOMENTUM=0.7,0.8,0.9"]

    def start() -> subprocess.Popen:
        command, env = [sys.executable, "-m", "distribuuuu", *words], {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(log, "w") as stream:
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=stream, stderr=stream, start_new_session=True)

    for stop, status in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        sweep = start()
        wait_for(lambda: "running" in log.read_text() and list(out.glob("trial_000/seed_3/checkpoints/*")), sweep)
        sweep.send_signal(stop)
        assert sweep.wait() == status
    assert "sweep-" not in run("squeue", "-h", "-o", "%j").stdout, "an interrupted sweep leaves no job"
    assert start().wait() == 0, log.read_text()
    rows = json.loads((out / "sweep_results.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["finished"] * 3
    assert "resumed from" in (out / "trial_000/seed_3/console.log").read_text()


@pytest.mark.slurm
def test_a_partition_that_does_not_exist():
    require_cluster()
    with pytest.raises(ConfigError, match="--slurm: got bathc"):
        check_slurm(Namespace(slurm="bathc", sbatch=[], nproc=1))
