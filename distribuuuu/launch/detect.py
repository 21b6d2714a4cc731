"""Detection of the launcher from the environment variables.

In this order: explicit RANK and WORLD_SIZE (torchrun, torch's older launcher, --nproc, a script of the user); a Slurm
step of several tasks (srun); else one process. So torchrun inside an sbatch allocation is torchrun.
"""

import importlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distribuuuu.config import ConfigError, Problem
from distribuuuu.files.locks import read_stat

_SLURM = "distribuuuu.launch.slurm"
# Set by `--nproc` for the processes it starts: its process id and a random id of the run.
NPROC_MARK = "DISTRIBUUUU_NPROC"


@dataclass(frozen=True)
class Launch:
    """The place of this process among the processes of the run.

    Attributes:
        launcher: name of the launcher.
        rank: number of the process, from 0.
        local_rank: its number on its node, from 0.
        world_size: number of processes.
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
    """Return the launch that the environment describes.

    Raises:
        ConfigError: the variables are incomplete or conflict with each other; the message shows them.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        launch = _explicit_launch(env)
    elif "SLURM_STEP_ID" in env and (slurm := importlib.import_module(_SLURM)).slurm_num_tasks(env) > 1:
        launch = slurm.slurm_launch(env)
    else:
        launch = Launch("plain python")
    if not (0 <= launch.rank < launch.world_size and launch.local_rank >= 0):
        raise launch_error(f"rank {launch.rank} of {launch.world_size} is out of range", env)
    return launch


def list_jobs(env: Mapping[str, str] = os.environ, only_restarted: bool = False) -> list[str]:
    """Return the job of Slurm and the run of torchrun that this process belongs to; the same after a restart.

    With `only_restarted`, without those that this is the first start of.
    """
    jobs = {}
    if "SLURM_JOB_ID" in env:
        jobs["SLURM"] = f"Slurm job {env['SLURM_JOB_ID']}"
    if "TORCHELASTIC_RUN_ID" in env:  # "none" by default; the agent that restarts processes is their parent
        agent = f"{socket.gethostname()}, pid {os.getppid()}, start {read_stat(os.getppid(), 19)}"
        run_id = env["TORCHELASTIC_RUN_ID"]
        jobs["TORCHELASTIC"] = f"torchrun {agent if run_id == 'none' else run_id}"
    first = ("", "0") if only_restarted else ()
    return [job for name, job in jobs.items() if env.get(f"{name}_RESTART_COUNT", "") not in first]


def was_launched(env: Mapping[str, str] = os.environ) -> bool:
    """Tell whether torchrun or --nproc, which wait for their processes, has started this one."""
    return "TORCHELASTIC_RUN_ID" in env or NPROC_MARK in env


def has_lost_launcher(env: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the launcher of this process has exited, so that the process has another parent."""
    if NPROC_MARK in env:
        return os.getppid() != int(env[NPROC_MARK].split()[0])
    if os.getppid() != 1:
        return False
    try:  # torchrun does not pass its process id; in a container it may be process 1 itself
        return b"torch" not in Path("/proc/1/cmdline").read_bytes()
    except OSError:
        return True


def _explicit_launch(env: Mapping[str, str]) -> Launch:
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    world_size = read_int(env, "WORLD_SIZE") if not missing else 0
    if world_size > 1:
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise launch_error(f"{' and '.join(missing)} must be set too", env)
    rank = read_int(env, "RANK")
    if "SLURM_STEP_ID" in env and "TORCHELASTIC_RUN_ID" not in env:
        importlib.import_module(_SLURM).check_consistency(env, rank, world_size)
    local_rank = read_int(env, next((name for name in ("LOCAL_RANK", "SLURM_LOCALID") if name in env), "RANK"))
    local_world_size = read_int(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else world_size
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "--nproc" if NPROC_MARK in env else "RANK and WORLD_SIZE"
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or world_size == 1:
        return Launch(launcher, rank, local_rank, world_size, local_world_size=local_world_size)
    address, port, run_id = env["MASTER_ADDR"], read_int(env, "MASTER_PORT"), env.get(NPROC_MARK, "")
    return Launch(launcher, rank, local_rank, world_size, address, port, run_id, local_world_size)


def read_int(env: Mapping[str, str], name: str) -> int:
    """Return the number in a variable; raise ConfigError if it is none."""
    try:
        return int(env[name])
    except ValueError:
        raise launch_error(f"got {name}={env[name]!r}; expected an integer", env) from None


def launch_error(message: str, env: Mapping[str, str]) -> ConfigError:
    """Return an error of the launcher's variables, which the message shows."""
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    names += sorted(name for name in env if name.startswith("SLURM_") and "STEP" in name)
    names += ["SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"]
    shown = " ".join(f"{name}={env[name]}" for name in names if name in env)
    return ConfigError(Problem("launcher", f"{message}; environment: {shown}"))
