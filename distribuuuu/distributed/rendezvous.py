"""Rendezvous of several processes: the store that all share, missing processes, and torch's process group."""

import contextlib
import functools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed.elastic.utils.store import synchronize

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import first_few
from distribuuuu.distributed.comm import GroupState
from distribuuuu.launch.detect import Launch

# The stall timer ends a process first, with a report, and does not count the time in which a job is suspended.
BACKEND_TIMEOUT = timedelta(days=7)
# The server of process 0 lives as long as the process: the next group, with any time-out, may reach it first.
_open_store = functools.cache(functools.partial(torch_dist.TCPStore, wait_for_workers=False))


def exchange(launch: Launch, value: Any, timeout_s: float, startup_timeout_s: float) -> list[Any]:
    """Return the JSON value of every process in the order of ranks, before `process_group`, on every process."""
    return share(launch, join(launch, timeout_s), value, startup_timeout_s) if launch.world_size > 1 else [value]


def share(launch: Launch, store: torch_dist.Store, value: Any, timeout_s: float = 300.0) -> list[Any]:
    """Return the JSON value of every process in the order of ranks."""
    turn, own = f"turn {store.add(f'turn of {launch.rank}', 1)}, rank ", json.dumps(value).encode()
    return [*map(json.loads, synchronize(store, own, launch.rank, launch.world_size, turn, timeout_s))]


@functools.cache
def join(launch: Launch, timeout_s: float) -> torch_dist.PrefixStore:
    """Return a key-value store that all processes of this start share, after all have joined; once for each group.

    ConfigError: a process did not join within `timeout_s` seconds, process 0 has ended, or its port is taken.
    """
    wait = functools.partial(_wait, launch, timeout_s, time.monotonic() + timeout_s)
    address, port = launch.address or os.environ["MASTER_ADDR"], launch.port or int(os.environ["MASTER_PORT"])
    is_server = launch.address is not None and launch.rank == 0
    while not is_server:  # torch's own attempts print warnings
        try:
            socket.create_connection((address, port), timeout=10.0).close()
            break
        except OSError as error:
            wait([0], f": cannot connect to the rendezvous at {address}:{port}: {error}")
    try:
        server = _open_store(address, port, is_master=is_server)
        return torch_dist.PrefixStore(_sign(torch_dist.PrefixStore(launch.run_id, server), launch, wait), server)
    except torch_dist.DistError as error:
        fix = "set MASTER_PORT to a free port, or see the error of process 0"
        raise ConfigError(f"MASTER_PORT {port} on {address}: {str(error).splitlines()[0]}; fix: {fix}") from error


def _sign(store: torch_dist.Store, launch: Launch, wait: Callable[[list[int]], None]) -> str:
    """Return the name of this start, below which every process has signed.

    Process 0 draws it, and withdraws it when all have signed: torchrun keeps one store over its restarts, whose number
    does not grow when a node joins or leaves.
    """
    name = os.urandom(16).hex() if launch.rank == 0 else ""
    while not (name and store.check([f"{name}/all"])):
        missing = [0]
        if launch.rank == 0:
            missing = [rank for rank in range(1, launch.world_size) if not store.check([f"{name}/{rank}"])]
            store.set("start", name if missing else "")
            if not missing:
                store.set(f"{name}/all", "")
        elif store.check(["start"]) and (name := store.get("start").decode() or name):
            store.set(f"{name}/{launch.rank}", "")
        wait(missing)
    return name


def _wait(launch: Launch, timeout_s: float, ends: float, missing: list[int], reason: str = "") -> None:
    """Wait for a moment, or raise an error that names the missing ones: on rank 0, else on one process per node."""
    if missing and time.monotonic() >= ends:
        missed = f"{len(missing)} of {launch.world_size} processes are missing: rank {first_few([*map(str, missing)])}"
        problem = f"launcher: processes did not all join within {timeout_s:.0f} s (DIST.TIMEOUT_S)"
        error = ConfigError(f"{problem}; {missed}{reason}")
        error.one_process = launch.local_rank == 0 or launch.rank == 1  # if rank 0 is missing, on its node
        error.status = 1  # that of a lost process
        raise error
    time.sleep(0.05 if missing else 0)


@contextlib.contextmanager
def join_group(launch: Launch, store: torch_dist.Store, backend: str, device: torch.device) -> Iterator[None]:
    """Initialize torch's process group for the length of the block.

    ConfigError, on every process: several use the same GPU. The error of nccl names neither the cause nor an option.
    """
    names = share(launch, store, str(torch.cuda.get_device_properties(device).uuid)) if backend == "nccl" else []
    if len({*names}) < len(names):
        used = f"several processes use GPU {max(names, key=names.count)}"
        error = ConfigError(f"DIST.BACKEND: {used}, which nccl refuses; fix: start one per GPU, or set it to gloo")
        error.on_all_processes = True
        raise error
    card = device if backend == "nccl" else None  # connects now, so that errors occur here, not in a step
    torch_dist.init_process_group(backend, None, BACKEND_TIMEOUT, launch.world_size, launch.rank, store, device_id=card)
    GroupState.rank = launch.rank
    GroupState.host_group = torch_dist.new_group(backend="gloo", timeout=BACKEND_TIMEOUT)  # type: ignore[assignment]  # a member
    torch_dist.barrier(group=GroupState.host_group)  # a process that ended earlier would break the others' connecting
    is_abandoned = False
    try:
        yield
    except Exception as error:
        is_abandoned = launch.world_size > 1 and not getattr(error, "on_all_processes", False)
        raise
    finally:
        GroupState.rank, GroupState.host_group = 0, None
        if not is_abandoned:  # else it could wait for the other processes forever
            torch_dist.destroy_process_group()
