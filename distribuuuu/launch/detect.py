"""Detection of the launcher from the environment variables.

In this order: explicit RANK and WORLD_SIZE (torchrun, torch's older launcher, --nproc, a script of the user); a Slurm
step of several tasks (srun); else one process. So torchrun inside an sbatch allocation is torchrun.
"""

import importlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from distribuuuu.files.locks import read_stat

_LAUNCHERS = "distribuuuu.launch.launchers"
# Set by `--nproc` for the processes it starts: its process id and a random id of the run.
NPROC_MARK = "DISTRIBUUUU_NPROC"


@dataclass(frozen=True)
class Launch:
    """The place of this process among the processes of the run.

    Attributes:
        address, port: where process 0 opens the store; None: the launcher (torchrun) provides one.
        run_id: distinguishes the store from that of another run on the same port.
        local_world_size: number of processes on its node that share its cores.
    """

    launcher: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    address: str | None = None
    port: int | None = None
    run_id: str = ""
    local_world_size: int = 1

    def __str__(self) -> str:
        if self.world_size == 1:
            return f"{self.launcher}, one process"
        return f"{self.launcher}, process {self.rank} of {self.world_size}"


def detect_launch(env: Mapping[str, str] = os.environ) -> Launch:
    """Return the launch that the environment describes; raise ConfigError if variables are missing or conflict."""
    if env.keys() & {"RANK", "WORLD_SIZE", "SLURM_STEP_ID"}:
        return importlib.import_module(_LAUNCHERS).read_launch(env)
    return Launch("plain python")


def list_jobs(env: Mapping[str, str] = os.environ, only_restarted: bool = False) -> list[str]:
    """Return the job of Slurm, and the run and the agent of torchrun, that this process belongs to.

    They are the same after a restart. With `only_restarted`, without a job or a run that this is the first start of,
    which may follow others of the same name. An agent has one run; it starts its processes anew when nodes come or go.
    """
    jobs = []
    for name, title, key in (("SLURM", "Slurm job", "JOB_ID"), ("TORCHELASTIC", "torchrun", "RUN_ID")):
        job, is_first = env.get(f"{name}_{key}", "none"), env.get(f"{name}_RESTART_COUNT", "") in ("", "0")
        if job != "none" and not (only_restarted and is_first):
            jobs.append(f"{title} {job}")
    if "TORCHELASTIC_RUN_ID" in env:  # "none" by default; the agent is the parent
        jobs.append(f"torchrun {socket.gethostname()}, pid {os.getppid()}, start {read_stat(os.getppid(), 19)}")
    return jobs


def was_launched() -> bool:
    """Tell whether torchrun or --nproc, which wait for their processes, has started this one."""
    return "TORCHELASTIC_RUN_ID" in os.environ or NPROC_MARK in os.environ
