"""Sweeps on Slurm: arrays that a killed sweep finds again, lost tasks, refused flags; with marker slurm, a cluster."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster import require_cluster, run, show_job
from support.processes import wait_for
from support.runs import ROOT, small_options
from support.sweeps import make_sweep

from distribuuuu.commands.sweep import slurm_executor as slurm
from distribuuuu.commands.sweep.slurm_executor import SlurmExecutor, check_slurm
from distribuuuu.config import ConfigError

VALUES = [{"OPTIM.BASE_LR": lr} for lr in ("0.1", "0.2", "0.4")]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return a folder whose commands take the place of Slurm's; sbatch records its arguments, squeue prints `queue`."""
    commands = tmp_path / "bin"
    commands.mkdir()
    write_command(commands / "sbatch", f"echo $@ >>{tmp_path}/calls; echo 7")
    write_command(commands / "squeue", f"cat {tmp_path}/queue")
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "POLL_S", 0.0)
    monkeypatch.setattr(slurm, "LOST_S", -1.0)
    (tmp_path / "calls").write_text("")
    return tmp_path


def write_command(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_jobs_are_tasks_of_an_array_and_are_found_again(fake):
    sweep = make_sweep(fake / "out of 100%", VALUES, epochs=4, eta=2)
    first, second, third = jobs = [sweep.job(trial, 0, 2) for trial in range(3)]
    assert SlurmExecutor(sweep, "gpu", ["--gres=gpu:1"], 2).update(jobs) == {}
    (call,) = (fake / "calls").read_text().splitlines()
    assert "--array=0-1" in call and "--partition=gpu" in call and "--requeue" in call and "--gres=gpu:1" in call
    executor = SlurmExecutor(sweep, "gpu", [], 2)  # the sweep was killed
    assert list(executor.running) == [first, second]
    tasks = list(executor.running.values())
    (fake / "queue").write_text("".join(f"7 {task}\n" for task in tasks))
    assert executor.update(jobs) == {} and (fake / "calls").read_text().count("\n") == 1
    (sweep.out_dir / "slurm" / f"{tasks[0]}.status").write_text("0\n")
    assert executor.update([second, third]) == {first: 0}
    assert list(executor.running) == [second, third] and (fake / "calls").read_text().count("\n") == 2
    (fake / "queue").write_text(f"7 {tasks[1]}\n")
    assert executor.update([]) == {third: -1}  # scancel, or killed by the system
    write_command(fake / "bin" / "squeue", "exit 1")
    (fake / "queue").write_text("")
    assert executor.update([]) == {}  # no answer is not an empty queue
    executor.stop(signal.SIGINT)
    assert not executor.running and list(SlurmExecutor(sweep, "gpu", [], 2).running) == [second, third]


def test_refused_submissions(fake, caplog):
    write_command(fake / "bin" / "sbatch", "echo 'sbatch: error: invalid account' >&2; exit 1")
    sweep = make_sweep(fake / "out", VALUES, epochs=4, eta=2)
    executor, jobs = SlurmExecutor(sweep, "gpu", [], None), [sweep.job(0, 0, 2)]
    with pytest.raises(ConfigError, match="--slurm: sbatch failed: sbatch: error: invalid account"):
        executor.update(jobs)
    assert not list((sweep.out_dir / "slurm").glob("*.json"))
    (sweep.out_dir / "slurm" / "sweep-0000-ab.json").write_text("[[1, 0, 2]]")  # one that was accepted
    assert executor.update(jobs) == {} and "invalid account; trying again" in caplog.text
    (fake / "queue").write_text("")
    assert executor.update([]) == {} and not executor.running  # not an attempt of the run that was killed


def test_flags_that_slurm_refuses(fake, monkeypatch):
    flags = ["--gres=gpu:1", "--time=4:00:00", "--qos=a"]
    assert check_slurm("gpu", [" ".join(flags[:2]), flags[2]]) == flags
    with pytest.raises(ConfigError, match="--sbatch: got '; No closing quotation"):
        check_slurm("gpu", ["'"])
    write_command(fake / "bin" / "sbatch", "echo 'sbatch: error: Invalid gres' >&2; exit 1")
    with pytest.raises(ConfigError, match="--slurm: got gpu with --sbatch '--gres=x'; sbatch: error: Invalid gres"):
        check_slurm("gpu", ["--gres=x"])
    monkeypatch.setenv("PATH", str(fake))
    with pytest.raises(ConfigError, match="--slurm: got gpu; sbatch is not installed here"):
        check_slurm("gpu", [])


@pytest.fixture
def start_sweep(image_folder, tmp_path):
    """Return start_sweep(NAME, ARG, ...): a process of a sweep on the cluster, whose jobs are canceled at the end."""
    require_cluster(nodes=2, partition="batch")

    def start(name: str, *args: str) -> subprocess.Popen:
        options = small_options(image_folder, tmp_path / name, "OPTIM.MAX_EPOCH", 40, "TRAIN.PRINT_FREQ", 100)
        command = [sys.executable, "-m", "distribuuuu", "sweep", "--slurm", "batch", *options, *args]
        log = open(tmp_path / f"{name}.log", "a")
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)

    yield start
    names = {path.stem for path in tmp_path.glob("*/slurm/*.json")}
    for name in names:
        run("scancel", f"--name={name}")


def queued_tasks(out_dir: Path) -> dict[str, str]:
    """Return the id of each task in the queue, by its number in the first array of a sweep."""
    name = next((path.stem for path in out_dir.glob("slurm/*.json")), "none")
    lines = run("squeue", "-h", "-r", "-t", "R", f"--name={name}", "-o", "%K %F_%K").stdout.splitlines()
    return dict(line.split() for line in lines)


@pytest.mark.slurm
def test_two_sweeps_one_killed_one_interrupted_and_a_requeued_task(start_sweep, tmp_path):
    """A requeue of one task restarts that run only; a sweep that is started again waits for the jobs it has left."""
    one, two = tmp_path / "one", tmp_path / "two"
    words = {one: "OPTIM.MOMENTUM=0.7,0.8,0.9", two: "OPTIM.WEIGHT_DECAY=0,1e-4"}
    sweeps = {out_dir: start_sweep(out_dir.name, word) for out_dir, word in words.items()}
    folders = [one / f"trial_00{trial}/seed_3/checkpoints" for trial in range(3)]
    wait_for(lambda: all(list(folder.glob("*")) for folder in folders), *sweeps.values())
    ids = queued_tasks(one)
    assert set(ids) == {"0", "1", "2"}
    run("scontrol", "requeue", ids["1"])
    sweeps[one].send_signal(signal.SIGKILL)
    wait_for(lambda: (two / "slurm").exists() and list(two.glob("trial_*/seed_3/metrics.jsonl")))
    sweeps[two].send_signal(signal.SIGINT)
    assert sweeps[two].wait() == 130 and sweeps[one].wait() == -signal.SIGKILL
    message = r"[12] jobs? in the Slurm queue will continue; rerun the same command .* to cancel: scancel \d+"
    assert re.search(message, (tmp_path / "two.log").read_text())
    again = [start_sweep(out_dir.name, word) for out_dir, word in words.items()]
    assert [process.wait() for process in again] == [0, 0], (tmp_path / "one.log").read_text()
    assert {trial: show_job(name)["Restarts"] for trial, name in ids.items()} == {"0": "0", "1": "1", "2": "0"}
    for out_dir, num in ((one, 3), (two, 2)):
        assert len(list(out_dir.glob("slurm/*.json"))) == 1  # nothing was submitted twice
        rows = json.loads((out_dir / "sweep_results.json").read_text())["rows"]
        assert [row["status"] for row in rows] == ["finished"] * num and (out_dir / "sweep.html").exists()
        resumed = ["resumed from" in path.read_text() for path in sorted(out_dir.glob("trial_*/seed_3/console.log"))]
        assert resumed == ([False, True, False] if num == 3 else [False, False])


@pytest.mark.slurm
def test_a_partition_that_does_not_exist(start_sweep, tmp_path):
    process = start_sweep("one", "OPTIM.MOMENTUM=0.8,0.9", "--slurm", "bathc")
    assert process.wait() == 2 and not (tmp_path / "one").exists()
    assert "--slurm: got bathc" in (tmp_path / "one.log").read_text()
