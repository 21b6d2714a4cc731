"""Rendezvous of several processes: the store that all share, missing processes, and torch's process group."""

import contextlib
import datetime
import functools
import itertools
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as torch_dist

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import first_few
from distribuuuu.distributed.comm import GroupState, PeerError, is_communication_error
from distribuuuu.distributed.stall_timer import ANSWER_S, MAX_NAMED, StallTimer
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.signals import SignalState

# The stall timer ends a process first, with a report, and does not count the time in which a job is suspended.
BACKEND_TIMEOUT = datetime.timedelta(days=7)
# From this number of processes on, gloo connects two of them at their first exchange, not all with all at the start:
# the store then sends some kB to each process, not 16 N^2 bytes. See docs/launchers.md.
LAZY_FROM = 64
POLL_S = 0.05
# Queries per second that all processes together send to the store.
MAX_POLLS_PER_S = 4096
# Number of the next group of this process: the keys of an earlier one stay in the store.
_group_numbers = itertools.count()


class MissingProcessError(ConfigError):
    """A process did not join in time; the exit status is that of a lost process."""

    status = 1


def exchange(launch: Launch, value: Any, timeout_s: float, startup_timeout_s: float) -> list[Any]:
    """Return the JSON value of every process in the order of ranks, before `process_group`, on every process.

    Waits `timeout_s` seconds for the other processes to start, and `startup_timeout_s` seconds for their values.
    """
    if launch.world_size == 1:
        return [value]
    return share(launch, join(launch, timeout_s), value, datetime.timedelta(seconds=startup_timeout_s))


def share(launch: Launch, store: torch_dist.Store, value: Any, *timeout: datetime.timedelta) -> list[Any]:
    """Return the JSON value of every process in the order of ranks."""
    turn = store.add(f"turn of {launch.rank}", 1)
    store.set(f"value {turn} of {launch.rank}", json.dumps(value))
    keys = [f"value {turn} of {rank}" for rank in range(launch.world_size)]
    store.wait(keys, *timeout)
    values = [json.loads(found) for found in store.multi_get(keys)]
    store.set(f"{keys[launch.rank]} has read", "")
    if launch.rank == 0:  # with whose end the store may end
        store.wait([f"{key} has read" for key in keys], *timeout)
    return values


@functools.cache
def join(launch: Launch, timeout_s: float) -> torch_dist.PrefixStore:
    """Return a key-value store that all processes of this start share, after all of them have joined.

    It is joined once for each group: before the process group if the processes have to `exchange` values.

    Raises:
        MissingProcessError: a process did not join within `timeout_s` seconds, or process 0 has ended.
        ConfigError: process 0 cannot listen on the port.
    """
    ends, number = time.monotonic() + timeout_s, next(_group_numbers)
    try:
        server = _connect(launch, timeout_s, ends)
        name = _sign(torch_dist.PrefixStore(f"{launch.run_id}/{number}", server), launch, timeout_s, ends)
        return torch_dist.PrefixStore(name, server)
    except torch_dist.DistError as error:
        raise MissingProcessError(f"launcher: the store of process 0 is lost: {str(error).splitlines()[0]}") from error


# The server of process 0 lives as long as the process: the next group of the same processes may reach it first.
_open_store = functools.cache(torch_dist.TCPStore)


def _connect(launch: Launch, timeout_s: float, ends: float) -> torch_dist.TCPStore:
    address, port = launch.address or os.environ["MASTER_ADDR"], launch.port or int(os.environ["MASTER_PORT"])
    is_master = launch.address is not None and launch.rank == 0
    while not is_master:  # torch's own attempts print warnings
        try:
            socket.create_connection((address, port), timeout=max(1.0, min(timeout_s, 10.0))).close()
            break
        except OSError as error:
            reason = f": cannot connect to the rendezvous at {address}:{port}: {error}"
            _check_time(launch, timeout_s, ends, [0], reason)
    try:
        limit = datetime.timedelta(seconds=timeout_s)
        return _open_store(address, port, None, is_master, limit, wait_for_workers=False)
    except torch_dist.DistError as error:
        if not is_master:
            raise
        reason = str(error).splitlines()[0]
        raise ConfigError(f"MASTER_PORT {port} on {address}: {reason}; fix: set MASTER_PORT to a free port") from error


def _sign(store: torch_dist.Store, launch: Launch, timeout_s: float, ends: float) -> str:
    """Return the name of this start, below which every process has signed.

    Process 0 draws it, and withdraws it when all have signed. torchrun keeps one store over its restarts, and its count
    of them does not grow when a node joins or leaves: a name that is left there is of a start that has not begun.
    """
    name, missing = "", [*range(1, launch.world_size)]
    if launch.rank == 0:
        name = uuid.uuid4().hex
        while missing:
            store.set("start", name)
            missing = [rank for rank in missing if not store.check([f"{name}/{rank}"])]
            _check_time(launch, timeout_s, ends, missing)
        store.set("start", "")
        store.set(f"{name}/all", "")
    while not (name and store.check([f"{name}/all"])):
        if store.check(["start"]) and (name := store.get("start").decode() or name):
            store.set(f"{name}/{launch.rank}", "")
        _check_time(launch, timeout_s, ends, [0])
    return name


def _check_time(launch: Launch, timeout_s: float, ends: float, missing: list[int], reason: str = "") -> None:
    """Raise MissingProcessError when the time is over and processes are missing; else wait for a moment.

    Rank 0 reports it or, where it is missing, one process per node.
    """
    if time.monotonic() < ends or not missing:
        time.sleep(max(POLL_S, launch.world_size / MAX_POLLS_PER_S) if missing else 0)
        return
    problem = f"the processes did not all join within {timeout_s:.0f} s (DIST.TIMEOUT_S)"
    names = first_few([str(rank) for rank in missing], num=MAX_NAMED)
    missed = f"{len(missing)} of {launch.world_size} processes are missing: rank {names}"
    error = MissingProcessError(f"launcher: {problem}; {missed}{reason}")
    error.one_process = launch.rank == 0 or missing == [0] and (launch.local_rank == 0 or launch.rank == 1)
    raise error


@contextlib.contextmanager
def watched(launch: Launch, store: torch_dist.PrefixStore, limits: tuple[float, float]) -> Iterator[None]:
    """Run the stall timer; if another process has ended, end this one with it."""
    # A connection of its own, so that its requests block no others.
    server: Any = store.underlying_store
    limit = datetime.timedelta(seconds=ANSWER_S)
    connection = torch_dist.TCPStore(server.host, server.port, None, False, limit, wait_for_workers=False)
    if launch.rank == 0:
        store.set("name of the states", uuid.uuid4().hex)
    states = torch_dist.PrefixStore(store.get("name of the states").decode(), connection)
    with StallTimer(launch.rank, launch.world_size, limits, states, SignalState.current.stacks_file) as timer:
        try:
            yield
        except Exception as error:
            if not getattr(error, "on_all_processes", False):
                SignalState.current.is_ending = True
                if isinstance(error, PeerError) or is_communication_error(error):
                    timer.end_after_others(error.status if isinstance(error, ConfigError) else 1)
                timer.announce_failure()
                if isinstance(error, ConfigError):
                    error.one_process = True
            raise


def check_gpus(launch: Launch, store: torch_dist.Store, gpu: str) -> None:
    """Raise ConfigError, on every process, if several use the same GPU, of which `gpu` is a unique name.

    nccl does not support that, and its own error names neither the cause nor an option.
    """
    names = share(launch, store, gpu)
    if shared := next((name for name in names if names.count(name) > 1), ""):
        used = f"several of the {launch.world_size} processes use GPU {shared}"
        fix = "start one process per GPU, or set DIST.BACKEND gloo"
        error = ConfigError(f"DIST.BACKEND: {used}, which nccl does not support; fix: {fix}")
        error.on_all_processes = True
        raise error


@contextlib.contextmanager
def join_group(launch: Launch, store: torch_dist.Store, backend: str, device: torch.device) -> Iterator[None]:
    """Initialize torch's process group for the length of the block."""
    if backend == "nccl":
        check_gpus(launch, store, str(torch.cuda.get_device_properties(device).uuid))
    is_tcp = sys.platform == "linux" and os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP") == "TCP"
    if launch.world_size >= LAZY_FROM and is_tcp:  # torch raises an error for other transports
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    torch_dist.init_process_group(
        backend=backend,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=BACKEND_TIMEOUT,
        store=store,
        device_id=device if backend == "nccl" else None,  # connects now, so that errors occur here, not in a step
    )
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
