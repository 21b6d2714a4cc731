"""Which launcher started this process, read from the environment alone; imports no torch.

In this order: explicit RANK and WORLD_SIZE (torchrun, python -m torch.distributed.launch, your own script); a Slurm
step of more than one task (srun); else one process. So torchrun inside an sbatch allocation is torchrun.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from distribuuuu.config import ConfigError

# Slurm gives no port, so one is derived from the job and step; below Linux's ephemeral range, which begins at 32768.
PORT_RANGE = (20000, 32000)


@dataclass(frozen=True)
class Launch:
    """Where this process stands among the processes of the run."""

    launcher: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    # Where the processes meet; None: from MASTER_ADDR and MASTER_PORT, which the launcher has set.
    init_method: str | None = None

    def __str__(self) -> str:
        if self.world_size == 1:
            return f"{self.launcher}, one process"
        return f"{self.launcher}, process {self.rank} of {self.world_size}"


def detect_launch(env: Mapping[str, str] | None = None) -> Launch:
    """Return the launch that the environment describes.

    Raises:
        ConfigError: the variables are incomplete or contradict each other; shows them.
    """
    env = os.environ if env is None else env
    if "RANK" in env or "WORLD_SIZE" in env:
        launch = _explicit_launch(env)
    elif int(_slurm_num_tasks(env)) > 1:
        launch = _slurm_launch(env)
    else:
        launch = Launch("plain python")
    if not (0 <= launch.rank < launch.world_size and launch.local_rank >= 0):
        raise ConfigError(f"launcher: rank {launch.rank} of {launch.world_size} processes cannot be: {_shown(env)}")
    return launch


def _explicit_launch(env: Mapping[str, str]) -> Launch:
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    world_size = _whole_number(env, "WORLD_SIZE") if not missing else 0
    if world_size > 1:
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise ConfigError(f"launcher: {' and '.join(missing)} must be set too, beside {_shown(env)}")
    rank = _whole_number(env, "RANK")
    local_rank = _whole_number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else rank
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "RANK and WORLD_SIZE"
    return Launch(launcher, rank, local_rank, world_size)


def _slurm_num_tasks(env: Mapping[str, str]) -> str:
    """Return the tasks of this step; the batch shell of sbatch has ranks but no step, and is one process."""
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return "1"
    tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or "1"
    if not tasks.isdigit():
        raise ConfigError(f"launcher: the number of Slurm tasks {tasks!r} is not a number: {_shown(env)}")
    return tasks


def _slurm_launch(env: Mapping[str, str]) -> Launch:
    missing = [name for name in ("SLURM_LOCALID", "SLURM_JOB_ID") if name not in env]
    node_list = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if missing or not node_list:
        raise ConfigError(f"launcher: a Slurm step without {', '.join(missing) or 'SLURM_NODELIST'}: {_shown(env)}")
    least, most = PORT_RANGE
    job_and_step = _whole_number(env, "SLURM_JOB_ID") * 7 + _whole_number(env, "SLURM_STEP_ID")
    address = env.get("MASTER_ADDR") or expand_hosts(node_list)[0]
    port = env.get("MASTER_PORT") or least + job_and_step % (most - least)
    return Launch(
        "srun",
        _whole_number(env, "SLURM_PROCID"),
        _whole_number(env, "SLURM_LOCALID"),
        int(_slurm_num_tasks(env)),
        f"tcp://{address}:{port}",
    )


def expand_hosts(node_list: str) -> list[str]:
    """Return the host names of a Slurm node list, e.g. `node[1-3,07],login` gives node1 node2 node3 node07 login."""
    hosts = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", node_list):
        hosts += _expand_brackets(part)
    return hosts


def _expand_brackets(name: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", name)
    if not match:
        return [name]
    before, after = name[: match.start()], _expand_brackets(name[match.end() :])
    numbers = []
    for item in match.group(1).split(","):
        first, _, last = item.partition("-")
        numbers += [str(i).zfill(len(first)) for i in range(int(first), int(last or first) + 1)]
    return [f"{before}{number}{rest}" for number in numbers for rest in after]


def _whole_number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(f"launcher: {name}={env[name]!r} is not a whole number: {_shown(env)}") from None


def _shown(env: Mapping[str, str]) -> str:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    names += tuple(sorted(name for name in env if name.startswith("SLURM_") and "STEP" in name))
    names += ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
    return " ".join(f"{name}={env[name]}" for name in names if name in env)
