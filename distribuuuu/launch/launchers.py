"""The launch that the variables of torchrun, --nproc or a Slurm step describe."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from distribuuuu.config import ConfigError, Problem
from distribuuuu.launch.detect import NPROC_MARK, Launch

# Slurm numbers its own steps (interactive, batch, extern, ...) from here; their processes are not ranks.
FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Slurm provides no port, so it is derived from the job and step; Linux's ephemeral ports begin at 32768.
PORT_RANGE = (20000, 32000)
# The first steps of this many consecutive jobs get different ports: such jobs may share a node.
STEPS_PER_JOB = 100


def read_launch(env: Mapping[str, str]) -> Launch:
    """Return the launch that the variables describe; one process in the batch shell of sbatch."""
    if "RANK" in env or "WORLD_SIZE" in env:
        launch = _explicit_launch(env)
    else:
        launch = slurm_launch(env) if slurm_num_tasks(env) > 1 else Launch("plain python")
    if not (0 <= launch.rank < launch.world_size and launch.local_rank >= 0):
        raise launch_error(f"rank {launch.rank} of {launch.world_size} is out of range", env)
    return launch


def _explicit_launch(env: Mapping[str, str]) -> Launch:
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    world_size = read_int(env, "WORLD_SIZE") if not missing else 0
    if world_size > 1:
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise launch_error(f"{' and '.join(missing)} must be set too", env)
    rank = read_int(env, "RANK")
    local_rank = read_int(env, next((name for name in ("LOCAL_RANK", "SLURM_LOCALID") if name in env), "RANK"))
    local_world_size = read_int(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else world_size
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "--nproc" if NPROC_MARK in env else "RANK and WORLD_SIZE"
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or world_size == 1:
        return Launch(launcher, rank, local_rank, world_size, local_world_size=local_world_size)
    address, port, run_id = env["MASTER_ADDR"], read_int(env, "MASTER_PORT"), env.get(NPROC_MARK, "")
    return Launch(launcher, rank, local_rank, world_size, address, port, run_id, local_world_size)


def slurm_num_tasks(env: Mapping[str, str]) -> int:
    """Return the number of tasks of this step; the batch shell of sbatch has ranks but no step, and is one process."""
    if "SLURM_PROCID" not in env or read_int(env, "SLURM_STEP_ID") >= FIRST_SPECIAL_STEP:
        return 1
    name = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if env.get(name)), None)
    return read_int(env, name) if name else 1


def slurm_launch(env: Mapping[str, str]) -> Launch:
    """Return the launch of a task of a Slurm step."""
    missing = [name for name in ("SLURM_LOCALID", "SLURM_JOB_ID") if name not in env]
    node_list = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if missing or not node_list:
        raise launch_error(f"{', '.join(missing) or 'SLURM_NODELIST'} must be set in a Slurm step", env)
    if _is_shell(env):
        what = f"this is an interactive shell in a Slurm step of {slurm_num_tasks(env)} tasks, which start no training"
        raise launch_error(f"{what}; fix: start the shell with srun -n 1 --pty, or put srun before the command", env)
    first, last = PORT_RANGE
    tasks, num_nodes = slurm_num_tasks(env), int(env.get("SLURM_STEP_NUM_NODES", 1))
    shares_cores = "none" in env.get("SLURM_CPU_BIND", "" if "SLURM_CPUS_PER_TASK" in env else "none")
    job, step = read_int(env, "SLURM_JOB_ID"), read_int(env, "SLURM_STEP_ID")
    port = first + (job * STEPS_PER_JOB + step) % (last - first)
    port = read_int(env, "MASTER_PORT") if "MASTER_PORT" in env else port
    return Launch(
        "srun",
        read_int(env, "SLURM_PROCID"),
        read_int(env, "SLURM_LOCALID"),
        tasks,
        env.get("MASTER_ADDR") or first_host(node_list),
        port,
        f"slurm job {job}, step {step}, start {env.get('SLURM_RESTART_COUNT', '0')}",
        -(-tasks // num_nodes) if shares_cores else 1,  # Slurm binds a task to its own cores
    )


def _is_shell(env: Mapping[str, str]) -> bool:
    """Tell whether a user has typed the command in the shell of `srun --pty`: the tasks of a step are no shells."""
    try:
        parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    except OSError:
        return False
    return "SLURM_PTY_PORT" in env and parent != "slurmstepd"


def first_host(node_list: str) -> str:
    """Return the first host name of a Slurm node list, e.g. node08-ib of `node[08-10,12]-ib,login`."""
    name = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)[0]  # type: ignore[index]  # it matches any text
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", name)


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
