"""Trainings on a Slurm cluster: by srun, by the scripts of tools/slurm, and by elastic torchrun."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from bench_support.training_process import TrainingProcess
from support.cluster import SHARED, TIMEOUT_S, Job, require_cluster, run, srun_command
from support.failing_models import assert_fault_is_reported, fault_words
from support.processes import ends, free_port
from support.runs import GROUP_NORM, ROOT, TRAIN_NET, assert_close, newest, small_options

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
    assert_close(*(read_checkpoint(tmp_path / name / "best.pth.tar") for name in ("alone", "slurm")), 1e-5)


def test_two_runs_on_the_same_nodes_do_not_interfere(image_folder, tmp_path):
    runs = [
        subprocess.Popen(srun_command(image_folder, tmp_path / name), stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        for name in ("one", "two")
    ]
    errors = [process.communicate(timeout=300)[1].decode() for process in runs]
    assert [process.returncode for process in runs] == [0, 0], errors
    assert_close(*(read_checkpoint(tmp_path / name / "best.pth.tar") for name in ("one", "two")), 0)


@pytest.fixture
def long_run(image_folder, tmp_path):
    command = srun_command(image_folder, tmp_path / "out", "OPTIM.MAX_EPOCH", 10000)
    process = TrainingProcess([command[0], f"--job-name={JOB_NAME}", *command[1:]], tmp_path / "out")
    process.wait_for(process.records)
    yield process
    process.kill()


@pytest.mark.parametrize("fault", ["killed", "stopped", "hung"])
def test_a_fault_of_one_task_ends_all_and_says_where_each_is(image_folder, tmp_path, fault):
    command = srun_command(image_folder, tmp_path / "out", *fault_words(fault, 1))
    process = TrainingProcess(command, tmp_path / "out")
    try:
        assert process.wait(TIMEOUT_S) and ends(process)
        assert_fault_is_reported(process.out_dir, fault, 1, 4)
    finally:
        process.kill()


def test_sigterm_to_a_step_saves_and_ends_every_process(long_run):
    run("scancel", "--signal=TERM", f"--name={JOB_NAME}")
    assert ends(long_run)
    assert "SIGTERM: stopped in epoch" in Path(f"{long_run.out_dir}.console").read_text()
    assert long_run.wait(10) == 143


EPOCHS = ("OPTIM.MAX_EPOCH", 60, "DIST.TIMEOUT_S", 20)


@pytest.fixture(scope="module")
def uninterrupted(image_folder, tmp_path_factory):
    require_cluster(nodes=2)
    out_dir = tmp_path_factory.mktemp("uninterrupted")
    done = run(*srun_command(image_folder, out_dir, *EPOCHS))
    assert done.returncode == 0, done.stderr
    return newest(out_dir)["state_dict"]


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
    weights = newest(job.out_dir)["state_dict"]
    assert all(torch.equal(weights[key], uninterrupted[key]) for key in uninterrupted)


def test_a_signal_saves_and_requeues(start_job, uninterrupted):
    job = start_job()
    run("scancel", "--signal=USR1", job.id)
    job.wait_for(lambda: "SIGUSR1: stopped in epoch" in job.text())
    assert_same_weights(job, uninterrupted)
    assert job.show()["Restarts"] == "1" and "resumed from" in job.text()


def test_a_suspended_job_goes_on(start_job, uninterrupted):
    job = start_job()
    for command in ("suspend", "resume"):
        done = run("scontrol", command, job.id)
        if done.returncode:
            pytest.skip(f"no permission to {command} a job: {done.stderr}")
        time.sleep(30 if command == "suspend" else 0)  # longer than DIST.TIMEOUT_S
    assert_same_weights(job, uninterrupted)
    assert "resumed from" not in job.text()


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


def test_the_tasks_of_an_array_join_a_sweep(image_folder, tmp_path):
    options = small_options(image_folder, tmp_path / "sweep", *SHARED, "OPTIM.MAX_EPOCH", 2)
    job = Job("sweep.sbatch", tmp_path, [*options, "OPTIM.MOMENTUM=0.5,0.7,0.9"], "--nodes=1", "--array=0,1")
    job.wait_for(lambda: not run("squeue", "-h", "-j", job.id).stdout.strip())
    results = [json.loads(path.read_text()) for path in (tmp_path / "sweep").glob("trial_*/seed_*/results.json")]
    assert [run["finished"] for run in results] == [True] * 3, job.text()


ELASTIC = (
    "TRAIN.GLOBAL_BATCH_SIZE", 12, *GROUP_NORM, "TRAIN.WORKERS", 1, "CHECKPOINT.EVERY_STEPS", 2,
    "OPTIM.LR_UPDATE", "step", "OPTIM.BASE_LR", 0.001, "TRAIN.PRINT_FREQ", 4,
)  # fmt: skip


class Nodes:
    """Agents of torchrun, one per node, that can be started and killed during the training."""

    def __init__(self, nnodes: str, root: Path, out_dir: Path, *overrides):
        options = [f"--nnodes={nnodes}", "--nproc_per_node=1", "--max-restarts=9", "--rdzv-backend=c10d"]
        options += [f"--rdzv-endpoint=node1:{free_port()}", "--rdzv-id=elastic", "--rdzv-conf=last_call_timeout=3"]
        self.command = [sys.executable, "-m", "torch.distributed.run", *options, str(TRAIN_NET)]
        self.command += small_options(root, out_dir, *ELASTIC, *overrides)
        self.out_dir = out_dir
        self.agents: dict[str, TrainingProcess] = {}

    def start(self, node: str) -> None:
        # With a shared store, torch gives a node that joins later no address of the store (seen with torch 2.15).
        srun = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
        srun += ["srun", f"--nodelist={node}", "-N1", "-n1", f"--job-name=elastic-{node}"]
        self.agents[node] = TrainingProcess([*srun, *self.command], self.out_dir)

    def kill(self, node: str) -> None:
        agent = self.agents.pop(node)
        agent.signal_everybody(signal.SIGKILL)
        agent.kill()
        run("scancel", "--signal=KILL", f"--name=elastic-{node}")

    def wait_for(self, condition) -> None:
        """Wait for a condition; raise an error if the agent of the first node ends."""
        self.agents["node1"].wait_for(condition)

    def log(self) -> str:
        """Return train.log, which holds the lines of all starts."""
        path = self.out_dir / "train.log"
        return path.read_text() if path.exists() else ""

    def num_records(self) -> int:
        path = self.out_dir / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def wait_for_progress(self) -> None:
        """Wait until the run has written some more records."""
        seen = self.num_records()
        self.wait_for(lambda: self.num_records() > seen + 3)


@pytest.fixture
def nodes(image_folder, tmp_path):
    """Return nodes(NNODES, KEY, VALUE, ...): the agents of a run, killed at the end of the test."""
    started = []

    def make(nnodes: str, *overrides) -> Nodes:
        started.append(Nodes(nnodes, image_folder, tmp_path / "out", *overrides))
        return started[-1]

    yield make
    for run_of_nodes in started:
        for node in list(run_of_nodes.agents):
            with contextlib.suppress(ProcessLookupError):
                run_of_nodes.kill(node)


def assert_equal_to_one_process(image_folder, tmp_path, out_dir, *overrides) -> None:
    """Train the same config on one process, and compare the weights."""
    train_model(load_cfg(None, small_options(image_folder, tmp_path / "alone", *ELASTIC, *overrides)))
    alone, other = newest(tmp_path / "alone"), newest(out_dir)
    assert (alone["epoch"], alone["step"]) == (other["epoch"], other["step"])
    assert_close(alone, other, 1e-5)


def test_a_lost_node_that_returns_changes_no_weight(nodes, image_folder, tmp_path):
    require_cluster(nodes=3)
    epochs = ("OPTIM.MAX_EPOCH", 250)
    agents = nodes("1:3", *epochs)
    for node in ("node1", "node2", "node3"):
        agents.start(node)
    agents.wait_for(lambda: "process 0 of 3" in agents.log())
    agents.wait_for_progress()
    agents.kill("node3")
    agents.wait_for(lambda: "process 0 of 2" in agents.log())
    agents.wait_for_progress()
    agents.start("node3")
    agents.wait_for(lambda: agents.log().count("process 0 of 3") == 2)
    for agent in list(agents.agents.values()):
        agent.finish()
    assert agents.log().count("resumed from") >= 2
    assert_equal_to_one_process(image_folder, tmp_path, agents.out_dir, *epochs)
