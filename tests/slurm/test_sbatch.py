"""The scripts of tools/slurm: a signaled, preempted or requeued job has the weights of an uninterrupted one."""

import os

import pytest
import torch
from support.cluster import SHARED, Job, require_cluster, run, srun_command
from support.runs import ROOT, small_options

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager

pytestmark = pytest.mark.slurm

EPOCHS = ("OPTIM.MAX_EPOCH", 60)


@pytest.fixture(autouse=True)
def cluster():
    """Skip the test without a cluster of two nodes."""
    require_cluster(nodes=2)


@pytest.fixture(scope="module")
def uninterrupted(image_folder, tmp_path_factory):
    require_cluster(nodes=2)
    out_dir = tmp_path_factory.mktemp("uninterrupted")
    done = run(*srun_command(image_folder, out_dir, *EPOCHS))
    assert done.returncode == 0, done.stderr
    return read_checkpoint(CheckpointManager(out_dir).list()[-1])["state_dict"]


@pytest.fixture
def start_job(image_folder, tmp_path):
    """Return start_job(OPTION, ...): a job of train.sbatch after some steps; canceled at the end of the test."""
    started = []

    def start(*options: str) -> Job:
        overrides = small_options(image_folder, tmp_path / "out", *SHARED, *EPOCHS)
        started.append(Job("train.sbatch", tmp_path, overrides, "--nodes=2", *options))
        started[-1].wait_for_steps()
        return started[-1]

    yield start
    for job in started:
        run("scancel", job.id)


def assert_same_weights(job: Job, uninterrupted) -> None:
    job.finish()
    weights = read_checkpoint(CheckpointManager(job.out_dir).list()[-1])["state_dict"]
    assert all(torch.equal(weights[key], uninterrupted[key]) for key in uninterrupted)


def test_a_signal_saves_and_requeues(start_job, uninterrupted):
    job = start_job()
    run("scancel", "--signal=USR1", job.id)
    job.wait_for(lambda: "SIGUSR1: stopped in epoch" in job.text())
    assert_same_weights(job, uninterrupted)
    assert job.show()["Restarts"] == "1" and "resumed from" in job.text()


@pytest.mark.parametrize("partition, is_saved", [("batch", False), ("grace", True)])
def test_a_preempted_job_resumes(start_job, uninterrupted, partition, is_saved):
    """Jobs in the partition `grace` receive their --signal some seconds before the preemption."""
    require_cluster(partition="high")
    require_cluster(partition=partition)
    job = start_job(f"--partition={partition}")
    nodes = job.show()["NodeList"]
    high = run("srun", "--partition=high", f"--nodelist={nodes}", "-N2", "--exclusive", "sleep", "1")
    assert high.returncode == 0, high.stderr
    assert_same_weights(job, uninterrupted)
    assert int(job.show()["Restarts"]) >= 1 and "resumed from" in job.text()
    assert "SIGUSR1: stopped in epoch" in job.text() or not is_saved


def test_a_job_that_loses_a_node_resumes(start_job, uninterrupted):
    """`$NODE_POWER down NAME` switches a node off; without NODE_POWER, the node is only declared down."""
    job = start_job()
    power, name = os.environ.get("NODE_POWER"), job.show()["BatchHost"].replace("node1", "node2")
    declare = ("scontrol", "update", f"nodename={name}", "reason=test")
    done = run(*power.split(), "down", name) if power else run(*declare, "state=down")
    if done.returncode:
        pytest.skip(f"no permission to switch off a node: {done.stderr}")
    job.wait_for(lambda: job.show()["JobState"] != "RUNNING")
    run(*power.split(), "up", name) if power else run(*declare, "state=resume")
    assert_same_weights(job, uninterrupted)
    assert "resumed from" in job.text()


@pytest.mark.parametrize("script", ["sweep.sbatch", "train.sbatch"])
@pytest.mark.parametrize("array, requeued", [({}, "7"), ({"ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "3"}, "7_3")])
def test_the_scripts_requeue_their_own_job_or_element(tmp_path, script, array, requeued):
    for name, line in {"srun": "exit 75", "scontrol": f"echo $@ > {tmp_path}/args"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    job = {"JOB_ID": "7", "JOB_NUM_NODES": "1", **({"ARRAY_TASK_ID": "0"} if "sweep" in script else {})}
    env = {f"SLURM_{name}": value for name, value in {**job, **array}.items()}
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert run("bash", str(ROOT / "tools" / "slurm" / script), PATH=path, **env).returncode == 75
    assert (tmp_path / "args").read_text() == f"requeue {requeued}\n"


def test_torchrun_trains_on_two_nodes_of_a_job(image_folder, tmp_path, uninterrupted):
    job = Job("torchrun.sbatch", tmp_path, small_options(image_folder, tmp_path / "out", *SHARED, *EPOCHS), "--nodes=2")
    assert_same_weights(job, uninterrupted)
    assert "launcher: torchrun, process 0 of 4" in job.text()


def test_a_sweep_trains_every_run(image_folder, tmp_path):
    words = small_options(image_folder, tmp_path, *SHARED, "OPTIM.MAX_EPOCH", 1)
    place = words.index("OUT_DIR")  # a sweep sets it for each run
    overrides = words[:place] + words[place + 2 :]
    job = Job("sweep.sbatch", tmp_path, overrides, "--nodes=1", "--array=0,5")
    job.wait_for(lambda: not run("squeue", "-h", "-j", job.id).stdout.strip())
    found = sorted(path.parent.name for path in tmp_path.glob("sweep/*/best.pth.tar"))
    assert found == ["lr0.1_seed1", "lr0.4_seed2"], job.text()
