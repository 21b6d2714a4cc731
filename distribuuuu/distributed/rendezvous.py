"""Rendezvous of several processes: the store that all share, missing processes, and the watch over the run."""

import contextlib
import datetime
import functools
import importlib
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as torch_dist

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import first_few
from distribuuuu.distributed.comm import GroupState, PeerError, is_communication_error
from distribuuuu.distributed.stall_timer import StallTimer
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.ports import find_port_problem
from distribuuuu.launch.signals import SignalState

# The stall timer ends a process first, with a report, and does not count the time in which a job is suspended.
BACKEND_TIMEOUT = datetime.timedelta(days=7)

# From this number of processes on, gloo connects two of them at their first exchange, not all with all at the start:
# the store then sends some kB to each process, not 16 N^2 bytes. See docs/launchers.md.
LAZY_FROM = 64
_WATCHDOG = "distribuuuu.distributed.watchdog"
POLL_S = 0.05
# The number of ranks in a report.
MAX_RANKS_NAMED = 10
# Queries per second that all processes together send to the store.
MAX_POLLS_PER_S = 4096


def exchange(launch: Launch, value: Any, timeout_s: float, startup_timeout_s: float) -> list[Any]:
    """Return the JSON value of every process in the order of ranks, before `process_group`, on every process.

    Waits `timeout_s` seconds for the other processes to start, and `startup_timeout_s` seconds for their values.
    """
    if launch.world_size == 1:
        return [value]
    store = join(launch, timeout_s)
    turn = store.add(f"turn of {launch.rank}", 1)
    store.set(f"value {turn} of {launch.rank}", json.dumps(value))
    keys = [f"value {turn} of {rank}" for rank in range(launch.world_size)]
    store.wait(keys, datetime.timedelta(seconds=startup_timeout_s))
    return [json.loads(store.get(key)) for key in keys]


@contextlib.contextmanager
def watched(launch: Launch, store: torch_dist.PrefixStore, limits: tuple[float, float]) -> Iterator[None]:
    """Run the stall timer and, if the package is there, the watchdog, which learns of an exception in the block."""
    watchdog = None
    with StallTimer(launch.rank, limits, SignalState.current.stacks_file) as timer:
        try:
            if find_spec(_WATCHDOG):
                shared = store.underlying_store
                assert isinstance(shared, torch_dist.TCPStore), "as create_store returns it"
                package = importlib.import_module(f"{_WATCHDOG}.process")
                watchdog = package.start_watchdog(launch, store, timer, shared.host)
            yield
        except Exception as error:
            if not getattr(error, "on_all_processes", False):
                SignalState.current.is_ending = True
                if watchdog:
                    status = error.status if isinstance(error, ConfigError) else None
                    watchdog.fail(status, isinstance(error, PeerError) or is_communication_error(error))
                if isinstance(error, ConfigError):
                    error.one_process = True
            raise
        finally:
            if watchdog:
                watchdog.close()


class MissingProcessError(ConfigError):
    """A process did not join in time; the exit status is that of a lost process."""

    status = 1


class _JoinTimeout:
    """Timeout for the processes to join."""

    def __init__(self, launch: Launch, timeout_s: float):
        self.launch, self.timeout_s, self._ends = launch, timeout_s, time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the seconds left."""
        return self._ends - time.monotonic()

    def check(self, find_missing: Callable[[], Sequence[int]], reason: str = "") -> None:
        """Raise MissingProcessError with the missing ranks and the reason when the time is over.

        Rank 0 reports it or, where it is missing, one process per node.
        """
        if self.left_s() > 0 or not (missing := find_missing()):  # none: the last one has just joined
            return
        launch, names = self.launch, first_few([str(rank) for rank in missing], num=MAX_RANKS_NAMED)
        problem = f"the processes did not all join within {self.timeout_s:.0f} s (DIST.TIMEOUT_S)"
        missed = f"{len(missing)} of {launch.world_size} processes are missing: rank {names}"
        error = MissingProcessError(f"launcher: {problem}; {missed}{reason}")
        error.one_process = launch.rank == 0 or missing == [0] and (launch.local_rank == 0 or launch.rank == 1)
        raise error


def create_store(launch: Launch, timeout_s: float) -> torch_dist.PrefixStore:
    """Return a key-value store that all processes of this start share, after all of them have joined.

    Raises:
        MissingProcessError: a process did not join within `timeout_s` seconds.
        ConfigError: the port is taken by another process or another run.
    """
    timeout = _JoinTimeout(launch, timeout_s)
    if launch.address is None:
        shared = _connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout, is_master=False)
        store = torch_dist.PrefixStore(_agree_on_start(shared, launch, timeout_s), shared)
    else:
        assert launch.port is not None, "an address comes with a port"
        shared = _connect(launch.address, launch.port, timeout, is_master=launch.rank == 0)
        store = torch_dist.PrefixStore(launch.run_id, shared)
    _wait_for_all(store, timeout)
    return store


# The store of this start, which a process joins once: before the process group if it has to `exchange`.
join = functools.cache(create_store)


def _connect(address: str, port: int, timeout: _JoinTimeout, is_master: bool) -> torch_dist.TCPStore:
    problem = f"cannot connect to the rendezvous at {address}:{port}"
    while not is_master:  # torch's own attempts print warnings
        try:
            socket.create_connection((address, port), timeout=max(1.0, min(timeout.left_s(), 10.0))).close()
            break
        except OSError as error:
            timeout.check(lambda: [0], f": {problem}: {error}")  # noqa: B023
            time.sleep(4 * POLL_S)
    try:
        limit, world_size = datetime.timedelta(seconds=timeout.timeout_s), timeout.launch.world_size
        return torch_dist.TCPStore(
            address, port, world_size, is_master=is_master, timeout=limit, wait_for_workers=False
        )
    except torch_dist.DistError as error:
        taken = find_port_problem(address, port) if is_master else None
        raise ConfigError(taken or f"{problem}: {str(error).splitlines()[0]}") from error


def _wait_for_all(store: torch_dist.Store, timeout: _JoinTimeout) -> None:
    """Return when every process has called this."""
    launch = timeout.launch
    if launch.rank == 0:
        store.set("here", "yes")
    store.set(f"here/{launch.rank}", "yes")
    store.add("number here", 1)

    def find_missing() -> list[int]:
        return [rank for rank in range(launch.world_size) if not store.check([f"here/{rank}"])]

    while launch.rank == 0 and store.add("number here", 0) < launch.world_size:
        timeout.check(find_missing)
        time.sleep(POLL_S)
    if launch.rank == 0:
        store.set("all here", "yes")
    while not store.check(["all here"]):  # store.wait would print a warning on its timeout
        if launch.address and timeout.left_s() <= 0 and not store.check(["here"]):
            raise ConfigError(f"MASTER_PORT {launch.port} on {launch.address} is used by another run; set a free one")
        timeout.check(find_missing)
        time.sleep(max(POLL_S, launch.world_size / MAX_POLLS_PER_S))


def _agree_on_start(store: torch_dist.Store, launch: Launch, timeout_s: float) -> str:
    """Return a name for this start of the processes that no earlier start had.

    torchrun keeps one store over all its restarts, so the keys of a killed process look like those of a living one. Its
    count of restarts does not tell them apart: it does not grow when a node joins or leaves. Therefore each process
    publishes a random name, rank 0 replies with the names it has read and that of this start, and a process accepts a
    reply that lists its own name.
    """
    own, start = uuid.uuid4().hex, uuid.uuid4().hex
    name_keys = [f"shown by {rank}" for rank in range(launch.world_size)]
    store.set(name_keys[launch.rank], own)
    timeout = _JoinTimeout(launch, timeout_s)
    while True:
        missing = [0]
        if launch.rank == 0:
            names = [store.get(key).decode() for key in name_keys if store.check([key])]
            store.set("answer", " ".join([*names, start]))
            missing = [rank for rank in range(1, launch.world_size) if not store.check([f"{start}/{rank}"])]
            if not missing:
                return start
        elif store.check(["answer"]):
            *names, start = store.get("answer").decode().split()
            if own in names:
                store.set(f"{start}/{launch.rank}", "taken")
                return start
        timeout.check(functools.partial(list, missing))
        time.sleep(POLL_S)


def check_gpus(launch: Launch, store: torch_dist.Store, gpu: str) -> None:
    """Raise ConfigError, on every process, if several use the same GPU, of which `gpu` is a unique name.

    nccl does not support that, and its own error names neither the cause nor an option.
    """
    if store.add(f"GPU {gpu}", 1) > 1:
        store.set("shared GPU", gpu)
    if store.add("number of GPUs", 1) == launch.world_size:
        store.set("all GPUs", "named")
    store.wait(["all GPUs"])
    if store.check(["shared GPU"]):
        shared = f"several of the {launch.world_size} processes use GPU {store.get('shared GPU').decode()}"
        fix = "start one process per GPU, or set DIST.BACKEND gloo"
        error = ConfigError(f"DIST.BACKEND: {shared}, which nccl does not support; fix: {fix}")
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
