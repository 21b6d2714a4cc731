"""The environments that launchers really set, and what is made of them."""

import pytest

from distribuuuu.config import ConfigError
from distribuuuu.launch import PORT_RANGE, detect_launch, expand_hosts

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
ELASTIC = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}
SBATCH_SHELL = {
    "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "node[1-2]",
}  # fmt: skip
SRUN = {**SBATCH_SHELL, "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    "env, launcher, rank, local_rank, world_size",
    [
        ({}, "plain python", 0, 0, 1),
        ({"LOCAL_RANK": "3"}, "plain python", 0, 0, 1),
        (TORCHRUN, "RANK and WORLD_SIZE", 3, 1, 4),
        (ELASTIC, "torchrun", 3, 1, 4),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK and WORLD_SIZE", 0, 0, 1),
        (SBATCH_SHELL, "plain python", 0, 0, 1),
        ({**SBATCH_SHELL, **ELASTIC}, "torchrun", 3, 1, 4),
        ({**SRUN, **ELASTIC}, "torchrun", 3, 1, 4),
        (SRUN, "srun", 3, 1, 4),
        ({**SRUN, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, "plain python", 0, 0, 1),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "1"}, "srun", 3, 1, 8),
    ],
)
def test_what_is_detected(env, launcher, rank, local_rank, world_size):
    launch = detect_launch(env)
    assert (launch.launcher, launch.rank, launch.local_rank, launch.world_size) == (
        launcher, rank, local_rank, world_size,
    )  # fmt: skip


def test_slurm_processes_meet_at_the_first_node_on_a_port_of_the_job():
    method = detect_launch(SRUN).init_method
    assert method.startswith("tcp://node1:")
    assert PORT_RANGE[0] <= int(method.rpartition(":")[2]) < PORT_RANGE[1]
    assert detect_launch({**SRUN, "SLURM_STEP_ID": "3"}).init_method != method
    given = {"MASTER_ADDR": "here", "MASTER_PORT": "5"}
    assert detect_launch({**SRUN, **given}).init_method == "tcp://here:5"


@pytest.mark.parametrize(
    "env, said",
    [
        ({"RANK": "0"}, "WORLD_SIZE must be set"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
        ({**TORCHRUN, "RANK": "4"}, "rank 4 of 4"),
        ({**TORCHRUN, "RANK": "x"}, "RANK='x'"),
        ({key: SRUN[key] for key in SRUN if key != "SLURM_LOCALID"}, "SLURM_LOCALID"),
    ],
)
def test_contradictions_are_errors_that_show_the_variables(env, said):
    with pytest.raises(ConfigError, match=said):
        detect_launch(env)


@pytest.mark.parametrize(
    "node_list, hosts",
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("node[1-3,07],login", ["node1", "node2", "node3", "node07", "login"]),
        ("r[1-2]n[08-10]-ib", [f"r{r}n{n}-ib" for r in (1, 2) for n in ("08", "09", "10")]),
        ("gpu-a[3]", ["gpu-a3"]),
    ],
)
def test_node_lists(node_list, hosts):
    assert expand_hosts(node_list) == hosts
