"""Elastic torchrun: training continues when a node is lost and when a node returns."""

import contextlib
import signal
import sys
from pathlib import Path

import pytest
import torch
from bench_support.training_process import TrainingProcess
from support.cluster import require_cluster, run
from support.processes import free_port
from support.runs import GROUP_NORM, TRAIN_NET, small_options

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.config import load_cfg
from distribuuuu.trainer import train_model

pytestmark = pytest.mark.slurm

SHARED = (
    "TRAIN.GLOBAL_BATCH_SIZE", 12, *GROUP_NORM, "TRAIN.WORKERS", 1, "CHECKPOINT.EVERY_STEPS", 2,
    "OPTIM.LR_UPDATE", "step", "OPTIM.BASE_LR", 0.001, "TRAIN.PRINT_FREQ", 4,
)  # fmt: skip


class Nodes:
    """Agents of torchrun, one per node, that can be started and killed during the training."""

    def __init__(self, nnodes: str, root: Path, out_dir: Path, *overrides):
        options = [f"--nnodes={nnodes}", "--nproc_per_node=1", "--max-restarts=9", "--rdzv-backend=c10d"]
        options += [f"--rdzv-endpoint=node1:{free_port()}", "--rdzv-id=elastic", "--rdzv-conf=last_call_timeout=3"]
        self.command = [sys.executable, "-m", "torch.distributed.run", *options, str(TRAIN_NET)]
        self.command += small_options(root, out_dir, *SHARED, *overrides)
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
    train_model(load_cfg(None, small_options(image_folder, tmp_path / "alone", *SHARED, *overrides)))
    alone, other = (read_checkpoint(CheckpointManager(path).list()[-1]) for path in (tmp_path / "alone", out_dir))
    assert (alone["epoch"], alone["step"]) == (other["epoch"], other["step"])
    for key, tensor in alone["state_dict"].items():
        torch.testing.assert_close(tensor, other["state_dict"][key], rtol=1e-5, atol=1e-5, msg=key)


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
