"""Which launcher started this process, read from the environment alone; imports no torch.

In this order: explicit RANK and WORLD_SIZE (torchrun, python -m torch.distributed.launch, --nproc, your own script); a
Slurm step of more than one task (srun); else one process. So torchrun inside an sbatch allocation is torchrun.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distribuuuu.config import ConfigError

# Slurm gives no port, so one is derived from the job and step; below Linux's ephemeral range, which begins at 32768.
PORT_RANGE = (20000, 32000)
# The first steps of so many jobs in a row get ports of their own: those are the jobs that share a node.
STEPS_PER_JOB = 100
# Slurm's own steps (interactive, batch, extern, ...) have numbers from here on; what runs in them is not a rank.
FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Set by `--nproc` for the processes it starts: its process id, and a name of this start.
NPROC_MARK = "DISTRIBUUUU_NPROC"


@dataclass(frozen=True)
class Launch:
    """Where this process stands among the processes of the run.

    Attributes:
        launcher: what started it, in words.
        rank: its number, from 0.
        local_rank: its number on its node, from 0.
        world_size: the number of processes.
        address, port: where process 0 opens the store that all meet in; None: the launcher (torchrun) keeps one.
        run_id: tells the store of this run from another one's on the same port.
        local_world_size: the processes of its node that share its cores.
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


def detect_launch(env: Mapping[str, str] | None = None) -> Launch:
    """Return the launch that the environment describes.

    Raises:
        ConfigError: the variables are incomplete or contradict each other; shows them.
    """
    env = os.environ if env is None else env
    if "RANK" in env or "WORLD_SIZE" in env:
        launch = _explicit_launch(env)
    elif _slurm_num_tasks(env) > 1:
        launch = _slurm_launch(env)
    else:
        launch = Launch("plain python")
        _refuse_mpirun(env)
    if not (0 <= launch.rank < launch.world_size and launch.local_rank >= 0):
        raise ConfigError(f"launcher: rank {launch.rank} of {launch.world_size} cannot be: {_shown(env)}")
    return launch


def is_restart(env: Mapping[str, str] | None = None) -> bool:
    """Tell whether Slurm (requeue) or torchrun (--max-restarts) has started the same run again."""
    env = os.environ if env is None else env
    counts = (env.get(name, "0") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    return any(count.isdigit() and int(count) > 0 for count in counts)


def was_launched(env: Mapping[str, str] | None = None) -> bool:
    """Tell whether a launcher that waits for its processes, torchrun or --nproc, has started this one."""
    env = os.environ if env is None else env
    return "TORCHELASTIC_RUN_ID" in env or NPROC_MARK in env


def has_lost_launcher(env: Mapping[str, str] | None = None) -> bool:
    """Tell whether the launcher that started this process has died and left it to another parent."""
    env = os.environ if env is None else env
    if NPROC_MARK in env:
        return os.getppid() != int(env[NPROC_MARK].split()[0])
    # torchrun does not say who it is; in a container it may be process 1 itself.
    return os.getppid() == 1 and b"torch" not in _command_of(1)


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _explicit_launch(env: Mapping[str, str]) -> Launch:
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    world_size = _whole_number(env, "WORLD_SIZE") if not missing else 0
    if world_size > 1:
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise ConfigError(f"launcher: {' and '.join(missing)} must be set too, beside {_shown(env)}")
    rank = _whole_number(env, "RANK")
    _refuse_contradictions(env, rank, world_size)
    own_number = next((name for name in ("LOCAL_RANK", "SLURM_LOCALID") if name in env), "RANK")
    place = (rank, _whole_number(env, own_number), world_size)
    sharing = {"local_world_size": _whole_number(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else world_size}
    if sharing["local_world_size"] < 1:
        raise ConfigError(f"launcher: LOCAL_WORLD_SIZE is less than 1: {_shown(env)}")
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "--nproc" if NPROC_MARK in env else "RANK and WORLD_SIZE"
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or world_size == 1:
        return Launch(launcher, *place, **sharing)
    return Launch(launcher, *place, env["MASTER_ADDR"], _port(env), env.get(NPROC_MARK, ""), **sharing)


def _refuse_contradictions(env: Mapping[str, str], rank: int, world_size: int) -> None:
    """Raise if RANK and WORLD_SIZE cannot be meant for this task of a Slurm step, or for this node."""
    tasks = 1 if "TORCHELASTIC_RUN_ID" in env else _slurm_num_tasks(env)
    if tasks > 1 and (world_size < tasks or (world_size == tasks and rank != _whole_number(env, "SLURM_PROCID"))):
        raise ConfigError(
            f"launcher: RANK={rank} and WORLD_SIZE={world_size} contradict the Slurm step, whose task"
            f" {env['SLURM_PROCID']} of {tasks} this is; unset RANK and WORLD_SIZE: {_shown(env)}"
        )
    if {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= env.keys():
        local_rank, local_size = _whole_number(env, "LOCAL_RANK"), _whole_number(env, "LOCAL_WORLD_SIZE")
        if local_rank >= local_size or local_size > world_size:
            raise ConfigError(f"launcher: LOCAL_RANK, LOCAL_WORLD_SIZE and WORLD_SIZE cannot be: {_shown(env)}")


def _refuse_mpirun(env: Mapping[str, str]) -> None:
    if env.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"launcher: mpirun started {env['OMPI_COMM_WORLD_SIZE']} processes, but not where they meet; use torchrun,"
            f" srun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each: {_shown(env)}"
        )


def _slurm_num_tasks(env: Mapping[str, str]) -> int:
    """Return the tasks of this step; the batch shell of sbatch has ranks but no step, and is one process."""
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return 1
    if _whole_number(env, "SLURM_STEP_ID") >= FIRST_SPECIAL_STEP:
        return 1
    name = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if env.get(name)), None)
    return _whole_number(env, name) if name else 1


def _slurm_launch(env: Mapping[str, str]) -> Launch:
    missing = [name for name in ("SLURM_LOCALID", "SLURM_JOB_ID") if name not in env]
    node_list = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if missing or not node_list:
        raise ConfigError(f"launcher: a Slurm step without {', '.join(missing) or 'SLURM_NODELIST'}: {_shown(env)}")
    least, most = PORT_RANGE
    job, step = _whole_number(env, "SLURM_JOB_ID"), _whole_number(env, "SLURM_STEP_ID")
    return Launch(
        "srun",
        _whole_number(env, "SLURM_PROCID"),
        _whole_number(env, "SLURM_LOCALID"),
        _slurm_num_tasks(env),
        env.get("MASTER_ADDR") or expand_hosts(node_list)[0],
        _port(env) if "MASTER_PORT" in env else least + (job * STEPS_PER_JOB + step) % (most - least),
        f"slurm job {job}, step {step}, start {env.get('SLURM_RESTART_COUNT', '0')}",
        _slurm_tasks_sharing(env),
    )


def _slurm_tasks_sharing(env: Mapping[str, str]) -> int:
    """Return the tasks that share this one's cores: those of its node, or itself alone if Slurm binds it to its own."""
    if "none" not in env.get("SLURM_CPU_BIND", "" if "SLURM_CPUS_PER_TASK" in env else "none"):
        return 1
    local = _whole_number(env, "SLURM_LOCALID")
    # 2(x3),1: two tasks on each of three nodes, one on the fourth.
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    per_node = [int(count) for count, times in counts for _ in range(int(times or 1))]
    node = _whole_number(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
    return per_node[node] if node < len(per_node) else local + 1


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


def _port(env: Mapping[str, str]) -> int:
    port = _whole_number(env, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ConfigError(f"launcher: MASTER_PORT={port} is not a port, 1 to 65535: {_shown(env)}")
    return port


def _shown(env: Mapping[str, str]) -> str:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    names += tuple(sorted(name for name in env if name.startswith("SLURM_") and "STEP" in name))
    names += ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
    return " ".join(f"{name}={env[name]}" for name in names if name in env)
