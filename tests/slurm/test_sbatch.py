"""The scripts of tools/slurm: whatever Slurm does to a job, it ends with the weights of an undisturbed one."""

import os
import time

import pytest
import torch
from support.cluster import SHARED, Job, need, processes_left, run, srun_words
from support.runs import ROOT, small_options

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager

EPOCHS = ("OPTIM.MAX_EPOCH", 60)


@pytest.fixture(autouse=True)
def cluster():
    """Skip where srun reaches no cluster of two nodes."""
    need(nodes=2)


@pytest.fixture(scope="module")
def undisturbed(image_folder, tmp_path_factory):
    """The weights of the run that nothing happens to."""
    need(nodes=2)
    out_dir = tmp_path_factory.mktemp("undisturbed")
    done = run(*srun_words(image_folder, out_dir, *EPOCHS))
    assert done.returncode == 0, done.stderr
    return read_checkpoint(CheckpointManager(out_dir).list()[-1])["state_dict"]


@pytest.fixture
def start_job(image_folder, tmp_path):
    """Return start_job(OPTION, ...): a job of train.sbatch that has made some steps; cancelled with the test."""
    started = []

    def start(*options: str) -> Job:
        words = small_options(image_folder, tmp_path / "out", *SHARED, *EPOCHS)
        started.append(Job("train.sbatch", tmp_path, words, "--nodes=2", *options))
        started[-1].wait_for_steps()
        return started[-1]

    yield start
    for job in started:
        run("scancel", job.id)


def assert_same_end(job: Job, undisturbed) -> None:
    job.finish()
    weights = read_checkpoint(CheckpointManager(job.out_dir).list()[-1])["state_dict"]
    assert all(torch.equal(weights[key], undisturbed[key]) for key in undisturbed)


def test_a_signal_saves_and_requeues(start_job, undisturbed):
    job = start_job()
    run("scancel", "--signal=USR1", job.id)
    job.wait_for(lambda: "SIGUSR1: stopped in epoch" in job.text())
    assert_same_end(job, undisturbed)
    assert job.show()["Restarts"] == "1" and "resumed from" in job.text()


@pytest.mark.parametrize("partition, is_saved", [("batch", False), ("grace", True)])
def test_a_preempted_job_goes_on(start_job, undisturbed, partition, is_saved):
    """Jobs in grace get their --signal some seconds before they are preempted."""
    need(partition="high")
    need(partition=partition)
    job = start_job(f"--partition={partition}")
    nodes = job.show()["NodeList"]
    high = run("srun", "--partition=high", f"--nodelist={nodes}", "-N2", "--exclusive", "sleep", "1")
    assert high.returncode == 0, high.stderr
    assert_same_end(job, undisturbed)
    assert int(job.show()["Restarts"]) >= 1 and "resumed from" in job.text()
    assert "SIGUSR1: stopped in epoch" in job.text() or not is_saved


def test_a_job_that_loses_a_node_goes_on(start_job, undisturbed):
    """NODE_POWER is a command that switches nodes: NODE_POWER down NAME; without it the node is only declared down."""
    job = start_job()
    power, name = os.environ.get("NODE_POWER"), job.show()["BatchHost"].replace("node1", "node2")
    declare = ("scontrol", "update", f"nodename={name}", "reason=test")
    done = run(*power.split(), "down", name) if power else run(*declare, "state=down")
    if done.returncode:
        pytest.skip(f"may not switch a node: {done.stderr}")
    job.wait_for(lambda: job.show()["JobState"] != "RUNNING")
    run(*power.split(), "up", name) if power else run(*declare, "state=resume")
    assert_same_end(job, undisturbed)
    assert "resumed from" in job.text()


def test_a_cancelled_job_leaves_no_process(start_job):
    job = start_job()
    began = time.monotonic()
    run("scancel", job.id)
    job.wait_for(lambda: job.show()["JobState"] == "CANCELLED" and not processes_left(str(job.out_dir)))
    assert time.monotonic() - began < 15
    assert CheckpointManager(job.out_dir).list(), "and its checkpoint stays"


def restarts_of(job: str) -> str:
    fields = run("scontrol", "-o", "show", "job", job).stdout.split()
    return next(field.removeprefix("Restarts=") for field in fields if field.startswith("Restarts="))


def test_an_element_of_an_array_requeues_itself_alone(image_folder, tmp_path):
    """SLURM_JOB_ID of the element that started last is the number of the whole array."""
    words = small_options(image_folder, tmp_path / "unused", *SHARED, "OPTIM.MAX_EPOCH", 10000)
    words = words[: words.index("OUT_DIR")] + words[words.index("OUT_DIR") + 2 :]
    metrics = [tmp_path / "sweep" / f"lr0.1_seed{seed}" / "metrics.jsonl" for seed in (1, 2)]
    job = Job("sweep.sbatch", tmp_path, words, "--nodes=1", "--array=0-1")
    try:
        job.wait_for(lambda: all(path.exists() and path.read_text().count("\n") > 6 for path in metrics))
        ids = dict(
            line.split() for line in run("squeue", "-h", "-j", job.id, "-t", "R", "-o", "%K %A").stdout.splitlines()
        )
        own = next(task for task, number in ids.items() if number == job.id)
        run("scancel", "--signal=USR1", f"{job.id}_{own}")
        job.wait_for(lambda: restarts_of(f"{job.id}_{own}") == "1")
        job.wait_for(lambda: "resumed from" in job.text())
        assert restarts_of(f"{job.id}_{1 - int(own)}") == "0"
    finally:
        run("scancel", job.id)


@pytest.mark.parametrize("script", ["sweep.sbatch", "train.sbatch"])
@pytest.mark.parametrize("array, requeued", [({}, "7"), ({"ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "3"}, "7_3")])
def test_what_the_scripts_requeue(tmp_path, script, array, requeued):
    for name, line in {"srun": "exit 75", "scontrol": f"echo $@ > {tmp_path}/said"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    of_job = {"JOB_ID": "7", "JOB_NUM_NODES": "1", "ARRAY_TASK_ID": "0"} if "sweep" in script else {
        "JOB_ID": "7", "JOB_NUM_NODES": "1"}  # fmt: skip
    env = {f"SLURM_{name}": value for name, value in {**of_job, **array}.items()}
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert run("bash", str(ROOT / "tools" / "slurm" / script), PATH=path, **env).returncode == 75
    assert (tmp_path / "said").read_text() == f"requeue {requeued}\n"


def test_torchrun_inside_sbatch_across_two_nodes(image_folder, tmp_path, undisturbed):
    job = Job("torchrun.sbatch", tmp_path, small_options(image_folder, tmp_path / "out", *SHARED, *EPOCHS), "--nodes=2")
    assert_same_end(job, undisturbed)
    assert "launcher: torchrun, process 0 of 4" in job.text()


def test_a_sweep_trains_each_of_its_runs(image_folder, tmp_path):
    words = small_options(image_folder, tmp_path / "unused", *SHARED, "OPTIM.MAX_EPOCH", 1)
    words = words[: words.index("OUT_DIR")] + words[words.index("OUT_DIR") + 2 :]
    job = Job("sweep.sbatch", tmp_path, words, "--nodes=1", "--array=0,5")
    job.wait_for(lambda: not run("squeue", "-h", "-j", job.id).stdout.strip())
    found = sorted(path.parent.name for path in tmp_path.glob("sweep/*/best.pth.tar"))
    assert found == ["lr0.1_seed1", "lr0.4_seed2"], job.text()
