"""Where the processes of a run meet: a key-value store that is theirs alone, and of this start alone."""

import datetime
import os
import time
import uuid

import torch.distributed as torch_dist

from distribuuuu.config import ConfigError
from distribuuuu.launch import Launch
from distribuuuu.ports import find_port_problem

POLL_S = 0.05


def meet(launch: Launch, timeout_s: float) -> torch_dist.Store:
    """Return a store that all processes of this start share.

    Raises:
        ConfigError: the port is taken, or nobody or another run answers there, for `timeout_s` seconds.
    """
    patience = datetime.timedelta(seconds=timeout_s)
    if launch.address is None:
        store = _connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), launch, patience, is_master=False)
        return torch_dist.PrefixStore(_agree_on_start(store, launch, timeout_s), store)
    store = _connect(launch.address, launch.port, launch, patience, is_master=launch.rank == 0)
    store = torch_dist.PrefixStore(launch.run_id, store)
    if launch.rank == 0:
        store.set("here", "yes")
    try:
        store.wait(["here"])
    except torch_dist.DistError as error:
        raise ConfigError(f"MASTER_PORT {launch.port} on {launch.address} is answered by another run") from error
    return store


def _connect(
    address: str, port: int, launch: Launch, patience: datetime.timedelta, is_master: bool
) -> torch_dist.TCPStore:
    try:
        return torch_dist.TCPStore(
            address, port, launch.world_size, is_master=is_master, timeout=patience, wait_for_workers=False
        )
    except torch_dist.DistError as error:
        problem = find_port_problem(address, port) if is_master else None
        where = f"{address}:{port}, where the processes meet, cannot be reached"
        raise ConfigError(problem or f"{where}: {str(error).splitlines()[0]}") from error


def _agree_on_start(store: torch_dist.Store, launch: Launch, timeout_s: float) -> str:
    """Return a name for this start of the processes that no earlier one had.

    torchrun keeps one store over all its restarts, and what a killed process has left there looks like a living one. So
    every process shows a name of its own, process 0 answers with a list of those it has seen, and a process takes the
    answer once its own name is on it.
    """
    own, start = uuid.uuid4().hex, uuid.uuid4().hex
    shown = [f"shown by {rank}" for rank in range(launch.world_size)]
    store.set(shown[launch.rank], own)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if launch.rank == 0:
            names = [store.get(key).decode() for key in shown if store.check([key])]
            store.set("answer", " ".join([*names, start]))
            if all(store.check([f"{start}/{rank}"]) for rank in range(1, launch.world_size)):
                return start
        elif store.check(["answer"]):
            *names, start = store.get("answer").decode().split()
            if own in names:
                store.set(f"{start}/{launch.rank}", "taken")
                return start
        time.sleep(POLL_S)
    raise ConfigError(f"launcher: the processes did not all come within {timeout_s:.0f} s (DIST.TIMEOUT_S)")
