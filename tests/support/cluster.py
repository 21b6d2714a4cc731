"""The Slurm cluster that `srun` reaches, if any: job steps, jobs of the scripts of tools/slurm, processes on nodes."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import FAILING_MODELS, ROOT, TRAIN_NET, small_options

# A run whose weights are bitwise the same however often it is resumed, on two nodes of two processes.
SHARED = ("TRAIN.GLOBAL_BATCH_SIZE", 12, "TRAIN.WORKERS", 1, "TRAIN.PRINT_FREQ", 2, "CHECKPOINT.EVERY_STEPS", 2)
TIMEOUT_S = 300  # catches a hang; the cluster of a loaded machine is slow


def run(*command: str, timeout_s: float = TIMEOUT_S, **env: str) -> subprocess.CompletedProcess:
    """Run a command with one thread per process; return its status and output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    given = {"cwd": ROOT, "env": environment, "timeout": timeout_s, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, capture_output=True, text=True, **given)


def num_nodes() -> int:
    """Return the number of nodes in a usable state; 0 without a cluster."""
    if not all(shutil.which(tool) for tool in ("srun", "sinfo", "sbatch", "scontrol")):
        return 0
    try:
        found = run("sinfo", "-h", "-N", "-t", "idle,alloc,mix,comp", "-o", "%N", timeout_s=10)
    except subprocess.TimeoutExpired:
        return 0
    return len(set(found.stdout.split())) if found.returncode == 0 else 0


def require_cluster(nodes: int = 2, partition: str | None = None) -> None:
    """Skip the test if the cluster has fewer nodes, or does not have the partition."""
    if num_nodes() < nodes:
        pytest.skip(f"srun reaches no Slurm cluster of {nodes} nodes")
    if partition and partition not in run("sinfo", "-h", "-o", "%R").stdout.split():
        pytest.skip(f"the cluster has no partition {partition}")


def srun_command(root: Path, out_dir: Path, *overrides: object) -> list[str]:
    """Return the command of a training on two nodes of two processes."""
    scripts = [*([str(FAILING_MODELS)] if "MODEL.ARCH" in overrides else []), str(TRAIN_NET)]
    command = ["srun", "-N2", "--ntasks-per-node=2", "--wait=20", sys.executable, "-u", *scripts]
    return [*command, *small_options(root, out_dir, *SHARED, *overrides)]


class Job:
    """A job of a script of tools/slurm, without its lines about GPUs, and with two processes per node.

    `folder` receives the script, its log and OUT_DIR; the options are further ones of sbatch.
    """

    def __init__(self, script: str, folder: Path, overrides: list[str], *options: str):
        self.out_dir = folder / "out"
        self.log = folder / "job.log"
        text = (ROOT / "tools" / "slurm" / script).read_text()
        text = re.sub(r"#SBATCH --(gres|cpus-per-gpu|partition)=.*\n", "", text)
        path = folder / script
        path.write_text(text.replace("python ", f"{sys.executable} "))
        tasks = () if "torchrun" in script else ("--ntasks-per-node=2",)
        sbatch = ("sbatch", "--parsable", f"--output={self.log}", *tasks, *options)
        done = run(*sbatch, str(path), *overrides, PROCESSES="2")
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    def show(self) -> dict[str, str]:
        """Return the fields of `scontrol show job`; of an array, those of its first line."""
        fields = run("scontrol", "-o", "show", "job", self.id).stdout.partition("\n")[0].split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait_for(self, condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
        """Poll until a condition is true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{self.show().get('JobState')}:\n{self.text()[-4000:]}"
            time.sleep(0.1)

    def wait_for_steps(self, num_records: int = 6) -> None:
        """Wait until the training has written this number of records."""
        metrics = self.out_dir / "metrics.jsonl"
        self.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= num_records)

    def finish(self) -> None:
        """Wait until the job has ended; it must have succeeded."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for(lambda: self.show().get("JobState") in ended)
        assert self.show()["JobState"] == "COMPLETED", self.text()

    def text(self) -> str:
        """Return the log of the job."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""
