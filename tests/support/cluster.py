"""The cluster that `srun` reaches, if any: run steps, submit the scripts of tools/slurm, watch jobs and processes."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import ROOT, small_options

TRAIN_NET = str(ROOT / "tools" / "train_net.py")
# The same bits from any number of starts, on two nodes of two processes.
SHARED = ("TRAIN.GLOBAL_BATCH_SIZE", 12, "TRAIN.WORKERS", 1, "TRAIN.PRINT_FREQ", 2, "CHECKPOINT.EVERY_STEPS", 2)


def run(*command: str, timeout_s: float = 300, **env: str) -> subprocess.CompletedProcess:
    """Run a command as a user would, with one thread a process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=timeout_s, stdin=subprocess.DEVNULL
    )


def num_nodes() -> int:
    """Return the nodes that answer; 0 where there is no cluster."""
    if not all(shutil.which(tool) for tool in ("srun", "sinfo", "sbatch", "scontrol")):
        return 0
    try:
        found = run("sinfo", "-h", "-N", "-t", "idle,alloc,mix,comp", "-o", "%N", timeout_s=10)
    except subprocess.TimeoutExpired:
        return 0
    return len(set(found.stdout.split())) if found.returncode == 0 else 0


def need(nodes: int = 2, partition: str | None = None) -> None:
    """Skip the test where the cluster has fewer nodes, or not that partition."""
    if num_nodes() < nodes:
        pytest.skip(f"srun reaches no Slurm cluster of {nodes} nodes")
    if partition and partition not in run("sinfo", "-h", "-o", "%R").stdout.split():
        pytest.skip(f"the cluster has no partition {partition}")


def srun_words(root: Path, out_dir: Path, *words) -> list[str]:
    """Return the command of a training on two nodes of two processes."""
    command = ["srun", "-N2", "--ntasks-per-node=2", sys.executable, "-u", TRAIN_NET]
    return [*command, *small_options(root, out_dir, *SHARED, *words)]


class Job:
    """A job of one of the scripts in tools/slurm, its lines about GPUs left out and two processes a node.

    Args:
        script: the name of the script.
        folder: gets the script, its log and OUT_DIR.
        words: KEY VALUE words; OUT_DIR is added.
        options: further options of sbatch.
    """

    def __init__(self, script: str, folder: Path, words: list[str], *options: str):
        self.out_dir = folder / "out"
        self.log = folder / "job.log"
        text = (ROOT / "tools" / "slurm" / script).read_text()
        text = re.sub(r"#SBATCH --(gres|cpus-per-gpu|partition)=.*\n", "", text)
        text = text.replace("exp/sweep", f"{folder}/sweep")
        path = folder / script
        path.write_text(text.replace("python ", f"{sys.executable} "))
        tasks = () if "torchrun" in script else ("--ntasks-per-node=2",)
        done = run("sbatch", "--parsable", f"--output={self.log}", *tasks, *options, str(path), *words, PROCESSES="2")
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    def show(self) -> dict[str, str]:
        """Return what scontrol says of the job."""
        fields = run("scontrol", "-o", "show", "job", self.id).stdout.split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 90) -> None:
        """Poll until a condition is true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{self.show().get('JobState')}:\n{self.text()[-4000:]}"
            time.sleep(0.1)

    def wait_for_steps(self, num_lines: int = 6) -> None:
        """Wait until the training has written so many records."""
        metrics = self.out_dir / "metrics.jsonl"
        self.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= num_lines)

    def finish(self, timeout_s: float = 120) -> None:
        """Wait for the end of the job, which must be a good one."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for(lambda: self.show().get("JobState") in over, timeout_s)
        assert self.show()["JobState"] == "COMPLETED", self.text()

    def text(self) -> str:
        """Return the job's log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def processes_left(mark: str) -> str:
    """Return the processes on the nodes whose command line holds a mark."""
    pattern = f"[{mark[0]}]{mark[1:]}"  # does not match itself
    return run("srun", "-N2", "--ntasks-per-node=1", "pgrep", "-a", "-f", pattern).stdout
