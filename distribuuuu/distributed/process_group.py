"""Process group: choosing the device, joining and leaving the group."""

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from distribuuuu.config import ConfigError
from distribuuuu.config.run_files import STACKS
from distribuuuu.distributed.comm import GroupState
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.signals import SignalState


def pick_device(local_rank: int) -> torch.device:
    """Return this process's device and make it current: one CUDA GPU per process, else MPS, else the CPU.

    Raises:
        ConfigError: the node has fewer GPUs than processes.
    """
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        if local_rank >= num_gpus > 1:
            error = ConfigError(f"launcher: process {local_rank + 1} of this node has no GPU: {num_gpus} are visible")
            error.one_process = local_rank == num_gpus
            raise error
        device = torch.device("cuda", local_rank % num_gpus)  # with one visible GPU, each process was given its own
        torch.cuda.set_device(device)
        return device
    if torch.backends.mps.is_available() and os.environ.get("WORLD_SIZE", "1") == "1":
        return torch.device("mps")
    return torch.device("cpu")


@contextlib.contextmanager
def process_group(
    launch: Launch,
    device: torch.device,
    timeout_s: float,
    backend: str = "auto",
    report_dir: str = ".",
    startup_timeout_s: float = 0.0,
) -> Iterator[None]:
    """Join the process group and run the stall timer for the length of the block.

    A single process joins nothing if `backend` is 'auto', else a group of one, without a stall timer: the way to run
    DDP, sharding and nccl on one GPU.

    The group starts threads. Fork data loader workers before: a fork while such a thread holds a lock of the
    interpreter deadlocks the child.

    Args:
        timeout_s: seconds to wait for the other processes.
        backend: 'nccl', 'gloo', or 'auto': nccl on CUDA, else gloo.
        report_dir: receives the stacks of all processes on a time-out.
        startup_timeout_s: seconds to wait in the first step and the first evaluation, if greater.

    Raises:
        ConfigError: the backend does not support the device, or the port is taken.
    """
    GroupState.local_rank = launch.local_rank
    SignalState.current.stacks_file = Path(report_dir) / STACKS / f"rank_{launch.rank}.txt"
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError(f"DIST.BACKEND: nccl needs CUDA, but the device is {device.type}; use gloo or auto")
    if launch.world_size == 1 and backend == "auto":
        yield
        return
    rendezvous = importlib.import_module("distribuuuu.distributed.rendezvous")  # one process needs none of it
    if launch.world_size == 1:
        with rendezvous.join_group(launch, rendezvous.torch_dist.HashStore(), backend, device):
            yield
        return
    backend = ("nccl" if device.type == "cuda" else "gloo") if backend == "auto" else backend
    store = rendezvous.join(launch, timeout_s)
    rendezvous.join.cache_clear()
    limits = (timeout_s, max(timeout_s, startup_timeout_s))
    timer = importlib.import_module("distribuuuu.distributed.stall_timer").open_timer(launch, store, limits)
    with timer, rendezvous.join_group(launch, store, backend, device):
        yield
