"""Launchers by their environment variables, the end of a process, and the files for Kubernetes and SkyPilot."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from support.processes import free_port, on_processes
from support.runs import run_tool, small_options

from distribuuuu.config import ConfigError
from distribuuuu.config.run_files import TRAIN_LOG
from distribuuuu.engine.build import set_backends
from distribuuuu.engine.feature_preflight import gather_jobs
from distribuuuu.launch import host
from distribuuuu.launch.detect import NPROC_MARK, detect_launch, list_jobs
from distribuuuu.launch.launchers import PORT_RANGE, first_host
from distribuuuu.launch.signals import ECHO_S, SignalState

BY_HAND = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
# As torchrun and python -m torch.distributed.launch set them.
TORCHRUN = {
    **BY_HAND, "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip
NPROC = {**BY_HAND, "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3", NPROC_MARK: "f00"}
# As Slurm 22.05 sets them in the shell of salloc, in the batch shell of sbatch, and in a task of srun.
SALLOC_SHELL = {
    "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODELIST": "node[1-2]",
    "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
SBATCH_SHELL = {**SALLOC_SHELL, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_TASK_PID": "9"}
SRUN = {
    **SBATCH_SHELL, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "2",
    "SLURM_STEPID": "2", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4",
}  # fmt: skip
SRUN_ONE_TASK = {
    **SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "node1",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1",
}  # fmt: skip
SRUN_PER_NODE = {**SRUN, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
# A shell on a node through salloc's interactive step: the job's tasks, and a step that holds none of them.
INTERACTIVE = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": ""}


def test_what_is_detected():
    for env, launcher, rank, local_rank, world_size in [
        ({}, "plain python", 0, 0, 1),
        (BY_HAND, "RANK and WORLD_SIZE", 3, 1, 4),
        (TORCHRUN, "torchrun", 3, 1, 4),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}, "torchrun", 3, 1, 4),
        (NPROC, "--nproc", 3, 3, 4),
        ({**SRUN_ONE_TASK, **NPROC}, "--nproc", 3, 3, 4),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK and WORLD_SIZE", 0, 0, 1),
        (SALLOC_SHELL, "plain python", 0, 0, 1),
        (SBATCH_SHELL, "plain python", 0, 0, 1),
        (INTERACTIVE, "plain python", 0, 0, 1),
        ({**SBATCH_SHELL, **TORCHRUN}, "torchrun", 3, 1, 4),
        ({**SRUN_PER_NODE, **TORCHRUN}, "torchrun", 3, 1, 4),
        (SRUN, "srun", 3, 1, 4),
        (SRUN_ONE_TASK, "plain python", 0, 0, 1),
        # a wrapper in the step that exports RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS and where to meet
        ({**SRUN, **{key: BY_HAND[key] for key in BY_HAND if key != "LOCAL_RANK"}}, "RANK and WORLD_SIZE", 3, 1, 4),
        # a wrapper in one task a node that starts two processes there
        ({**SRUN_PER_NODE, **BY_HAND}, "RANK and WORLD_SIZE", 3, 1, 4),
    ]:  # fmt: skip
        launch = detect_launch(env)
        found = launch.launcher, launch.rank, launch.local_rank, launch.world_size
        assert found == (launcher, rank, local_rank, world_size)
        assert str(launch) == f"{launcher}, {'one process' if world_size == 1 else f'process {rank} of {world_size}'}"


def test_slurm_processes_meet_at_the_first_node_on_a_port_of_the_job():
    launch = detect_launch(SRUN)
    assert launch.address == "node1" and PORT_RANGE[0] <= launch.port < PORT_RANGE[1]
    given = detect_launch({**SRUN, "MASTER_ADDR": "here", "MASTER_PORT": "5"})
    assert (given.address, given.port) == ("here", 5)
    assert detect_launch(TORCHRUN).address is None, "torchrun keeps the store"
    assert (detect_launch(BY_HAND).address, detect_launch(BY_HAND).port) == ("a", 1)


def test_jobs_and_steps_that_may_share_a_node_have_ports_and_stores_of_their_own():
    numbers = itertools.product(range(500, 620), range(0, 100, 9))
    near = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job, step in numbers]
    launches = [detect_launch({**SRUN, **step}) for step in near]
    assert len({launch.port for launch in launches}) == len({launch.run_id for launch in launches}) == len(near)
    assert detect_launch({**SRUN, "SLURM_RESTART_COUNT": "1"}).run_id != detect_launch(SRUN).run_id


def test_a_start_by_the_launcher_itself_is_known():
    """An agent of torchrun starts its processes again with a RESTART_COUNT of 0 when nodes come or go."""
    (agent,) = list_jobs({"TORCHELASTIC_RUN_ID": "none"})
    assert f"pid {os.getppid()}" in agent
    for env, jobs in [
        ({}, []), (TORCHRUN, [agent]), (SRUN, []), ({**SRUN, "SLURM_RESTART_COUNT": "1"}, ["Slurm job 7"]),
        ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "9"}, ["torchrun 9", agent]),
    ]:  # fmt: skip
        assert list_jobs(env, only_restarted=True) == jobs
    assert list_jobs({"SLURM_JOB_ID": "5"}) == ["Slurm job 5"]


def gather_jobs_of_a_joined_node(cfg) -> list[str]:
    count = "1" if os.environ["RANK"] == "0" else "0"
    os.environ.update(TORCHELASTIC_RUN_ID="9", TORCHELASTIC_RESTART_COUNT=count)
    return gather_jobs(cfg)


def test_a_node_that_joins_an_elastic_run_asks_for_the_checkpoints_of_the_others(small_cfg):
    first, joined = on_processes(2, gather_jobs_of_a_joined_node, small_cfg())
    assert first == joined and "torchrun 9" in joined


def test_contradictions_are_errors_that_show_the_variables():
    for env, said in [
        ({"RANK": "0"}, "WORLD_SIZE must be set"),
        # typed in the shell of srun -n 4 --pty
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_PTY_PORT": "40123"}, "interactive shell.*srun -n 1 --pty"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
        ({**BY_HAND, "RANK": "4"}, "rank 4 of 4 is out of range"),
        ({**BY_HAND, "RANK": "x"}, "RANK='x'"),
        ({**SRUN, "MASTER_PORT": "no"}, "MASTER_PORT='no'"),
        ({**SRUN, "SLURM_PROCID": "4"}, "rank 4 of 4 is out of range"),
        ({key: SRUN[key] for key in SRUN if key != "SLURM_LOCALID"}, "SLURM_LOCALID"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            detect_launch(env)


@pytest.mark.slow
def test_an_error_of_a_process_before_the_group_exists_is_printed(tmp_path):
    """E.g. the data are missing on one node."""
    env = {**SRUN, "SLURM_LOCALID": "0"}
    done = run_tool("train_net.py", *small_options(tmp_path / "missing", tmp_path / "out"), **env)
    assert done.returncode == 2 and "process 3 on " in done.stderr and "missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_cores_and_threads_are_those_of_the_set_and_no_more_than_the_quotas(small_cfg, monkeypatch, tmp_path):
    v1, own = "4:memory:/a\n2:cpu,cpuacct:/a/b\n", "cpu,cpuacct/a/b/cpu.cfs_"
    for number, (cores, groups, files, expected) in enumerate([
        (16, "", {}, 16), (16, "0::/", {"cpu.max": "max 100000\n"}, 16),
        (16, "0::/", {"cpu.max": "400000 100000\n"}, 4),
        (2, "0::/", {"cpu.max": "400000 100000\n"}, 2), (16, "0::/", {"cpu.max": "10000 100000\n"}, 1),
        (16, "0::/", {"cpu.max": "nonsense"}, 16), (16, "0::/../x", {"cpu.max": "300000 100000\n"}, 3),
        (16, "0::/a/b\n", {"a/cpu.max": "500000 100000\n", "a/b/cpu.max": "max 100000\n"}, 5),
        (16, v1, {f"{own}quota_us": "250000\n", f"{own}period_us": "50000\n"}, 5),
        (16, v1, {f"{own}quota_us": "-1\n", f"{own}period_us": "50000\n"}, 16),
        (16, v1, {"cpu,cpuacct/cpu.cfs_quota_us": "200000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 2),
    ]):  # fmt: skip
        root = tmp_path / str(number)
        for name, text in {**files, "own": groups}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        monkeypatch.setattr(host, "_GROUPS", root)
        monkeypatch.setattr(host, "_OWN_GROUPS", root / "own")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False)
        assert host.count_cores() == expected, (cores, groups, files)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    chosen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    set_backends(small_cfg(), torch.device("cpu"))
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    set_backends(small_cfg(), torch.device("cpu"))
    assert chosen == [2]


def test_node_lists():
    for node_list, first in [("login", "login"), ("a,b", "a"), ("node[1-3,07],login", "node1"),
                             ("r[1-2]n[08-10]-ib", "r1n08-ib"), ("gpu-a[3]", "gpu-a3")]:  # fmt: skip
        assert first_host(node_list) == first


def test_a_step_that_is_started_in_an_interactive_shell_is_a_launch(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda path: "slurmstepd\n")
    assert detect_launch({**SRUN, "SLURM_PTY_PORT": "40123"}).world_size == 4


@pytest.mark.parametrize(("received", "num"), [
    ([(0.0, 100), (ECHO_S / 2, 100), (3.0, 1)], 0), ([(0.0, 100), (3.0, 1), (3.0 + ECHO_S, 1)], 1),
    ([(0.0, 100), (30.0, 1)], 1), ([(0.0, 100), (2 * ECHO_S, 100)], 1),
])  # fmt: skip
def test_the_signal_of_a_parent_that_takes_seconds_to_exit_is_not_a_second_one(monkeypatch, received, num):
    second: list[int] = []
    state = SignalState(second.append)
    for seconds, parent in received:
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: 50 + seconds)
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        assert second == []
        state.receive(signal.SIGTERM)
    assert second == [signal.SIGTERM] * num


TOOLS = Path(__file__).parents[2] / "tools"
OPTIONS = ["--cfg", "shapes/resnet14", "MODEL.DUMMY_INPUT", "True", "OPTIM.MAX_EPOCH", "1", "OPTIM.WARMUP_EPOCHS", "0",
           "MODEL.ARCH", "resnet8", "TRAIN.IM_SIZE", "16", "TEST.IM_SIZE", "16", "TRAIN.WORKERS", "0"]  # fmt: skip


def read_kubernetes() -> list[dict]:
    return list(yaml.safe_load_all((TOOLS / "kubernetes" / "train.yaml").read_text()))


def kubernetes_command(rank: int, port: int, out: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command of the pod with this index, and its environment."""
    container = read_kubernetes()[1]["spec"]["template"]["spec"]["containers"][0]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert env["MASTER_ADDR"] == "distribuuuu-0.distribuuuu"  # JOB-INDEX.SUBDOMAIN
    env |= {"JOB_COMPLETION_INDEX": str(rank), "GPUS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [*container["command"], *OPTIONS, "OUT_DIR", str(out)], env


def skypilot_command(rank: int, port: int, out: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command of a node, and the environment that SkyPilot sets."""
    run = yaml.safe_load((TOOLS / "skypilot" / "train.yaml").read_text())["run"]
    start = run.partition(" --cfg ")[0].replace("--master-port=29500", f"--master-port={port}")
    env = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_GPUS_PER_NODE": "1",
           "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}  # fmt: skip
    return ["bash", "-c", f'{start} "$@"', "run", *OPTIONS, "OUT_DIR", str(out)], env


@pytest.mark.slow
@pytest.mark.parametrize("build", [kubernetes_command, skypilot_command])
def test_two_nodes_train_together(build, tmp_path):
    started, port = [], free_port()
    for rank in (0, 1):
        command, env = build(rank, port, tmp_path / "out")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **env}
        started.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    assert "process 0 of 2" in (tmp_path / "out" / TRAIN_LOG).read_text()
