"""Where the processes of a run meet: a key-value store that is theirs alone, and of this start alone."""

import datetime
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence

import torch.distributed as torch_dist

from distribuuuu.config import ConfigError
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.ports import choose_addresses, find_own_address, find_port_problem

logger = logging.getLogger(__name__)

POLL_S = 0.05
# Seconds before the processes that are missing are named, between two such lines, and how many are named in one.
FIRST_WORD_S, NEXT_WORD_S = 20.0, 60.0
MOST_NAMED = 10
# Times a second that all processes together ask the store for a key, at most.
MOST_POLLS = 4096


class MissingProcess(ConfigError):
    """A process has not come in time; exits like a lost one."""

    status = 1


class _Wait:
    """The time that the processes have to come, and what is said meanwhile.

    Args:
        launch: where this process stands.
        timeout_s: seconds until `check` raises.
    """

    def __init__(self, launch: Launch, timeout_s: float):
        self.launch, self.timeout_s = launch, timeout_s
        self._began = time.monotonic()
        self._next_word_s = FIRST_WORD_S

    @property
    def left_s(self) -> float:
        """The seconds until the time is over."""
        return self._began + self.timeout_s - time.monotonic()

    def check(self, find_missing: Callable[[], Sequence[int]], why: str = "") -> None:
        """Say now and then which processes are missing: process 0 does, or where it is missing, one on each node.

        Args:
            find_missing: is called then only; returns their ranks.
            why: is added.

        Raises:
            MissingProcess: the time is over.
        """
        waited_s = time.monotonic() - self._began
        if waited_s < min(self._next_word_s, self.timeout_s):
            return
        self._next_word_s = waited_s + NEXT_WORD_S
        missing = find_missing()
        speaks = self.launch.rank == 0 or missing == [0] and (self.launch.local_rank == 0 or self.launch.rank == 1)
        words = f"waiting for {len(missing)} of {self.launch.world_size} processes: {_name_ranks(missing)}{why}"
        if waited_s >= self.timeout_s:
            limit = f"did not all come within {self.timeout_s:.0f} s (DIST.TIMEOUT_S)"
            error = MissingProcess(f"launcher: the processes {limit}: {words}")
            error.one_process = speaks
            raise error
        if speaks:
            logger.warning("%s", words)


def _name_ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(str(rank) for rank in ranks[:MOST_NAMED])
    return f"rank{'s' * (len(ranks) > 1)} {named}{', ...' if len(ranks) > MOST_NAMED else ''}"


def create_store(launch: Launch, timeout_s: float) -> torch_dist.Store:
    """Return a store that all processes of this start share, once all of them are there.

    Raises:
        MissingProcess: a process did not come for `timeout_s` seconds; process 0 says which.
        ConfigError: the port is taken, or another run answers there.
    """
    wait = _Wait(launch, timeout_s)
    if launch.address is None:
        store = _connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait, is_master=False)
        store = torch_dist.PrefixStore(_agree_on_start(store, launch, timeout_s), store)
    else:
        store = _connect(launch.address, launch.port, wait, is_master=launch.rank == 0)
        store = torch_dist.PrefixStore(launch.run_id, store)
    _await_all(store, wait)
    return store


def _connect(address: str, port: int, wait: _Wait, is_master: bool) -> torch_dist.TCPStore:
    where = f"{address}:{port}, where the processes meet, cannot be reached"
    while not is_master:  # torch's own attempts print warnings
        try:
            socket.create_connection((address, port), timeout=max(1.0, min(wait.left_s, 10.0))).close()
            break
        except OSError as error:
            wait.check(lambda: [0], f": {where}: {error}")  # noqa: B023
            time.sleep(4 * POLL_S)
    try:
        patience = datetime.timedelta(seconds=wait.timeout_s)
        return torch_dist.TCPStore(
            address, port, wait.launch.world_size, is_master=is_master, timeout=patience, wait_for_workers=False
        )
    except torch_dist.DistError as error:
        problem = find_port_problem(address, port) if is_master else None
        raise ConfigError(problem or f"{where}: {str(error).splitlines()[0]}") from error


def _await_all(store: torch_dist.Store, wait: _Wait) -> None:
    """Return when every process has called this."""
    launch = wait.launch
    if launch.rank == 0:
        store.set("here", "yes")
    store.set(f"here/{launch.rank}", "yes")
    store.add("number here", 1)

    def find_missing() -> list[int]:
        return [rank for rank in range(launch.world_size) if not store.check([f"here/{rank}"])]

    while launch.rank == 0 and store.add("number here", 0) < launch.world_size:
        wait.check(find_missing)
        time.sleep(POLL_S)
    if launch.rank == 0:
        store.set("all here", "yes")
    while not store.check(["all here"]):  # store.wait would print a warning when its time is over
        if launch.address and wait.left_s <= 0 and not store.check(["here"]):
            raise ConfigError(f"MASTER_PORT {launch.port} on {launch.address} is answered by another run")
        wait.check(find_missing)
        time.sleep(max(POLL_S, launch.world_size / MOST_POLLS))


def _agree_on_start(store: torch_dist.Store, launch: Launch, timeout_s: float) -> str:
    """Return a name for this start of the processes that no earlier one had.

    torchrun keeps one store over all its restarts, and what a killed process has left there looks like a living one. So
    every process shows a name of its own, process 0 answers with a list of those it has seen, and a process takes the
    answer once its own name is on it.
    """
    own, start = uuid.uuid4().hex, uuid.uuid4().hex
    shown = [f"shown by {rank}" for rank in range(launch.world_size)]
    store.set(shown[launch.rank], own)
    wait = _Wait(launch, timeout_s)
    while True:
        missing = [0]
        if launch.rank == 0:
            names = [store.get(key).decode() for key in shown if store.check([key])]
            store.set("answer", " ".join([*names, start]))
            missing = [rank for rank in range(1, launch.world_size) if not store.check([f"{start}/{rank}"])]
            if not missing:
                return start
        elif store.check(["answer"]):
            *names, start = store.get("answer").decode().split()
            if own in names:
                store.set(f"{start}/{launch.rank}", "taken")
                return start
        wait.check(lambda missing=missing: missing)
        time.sleep(POLL_S)


def exchange_addresses(store: torch_dist.Store, launch: Launch) -> dict[str, str] | None:
    """Tell process 0 where this process is; return there at which of its addresses each of the others reaches it."""
    own = find_own_address(launch.address or os.environ["MASTER_ADDR"])
    store.set(f"address of {launch.rank}", own)
    if launch.rank != 0:
        return None
    return choose_addresses(own, {store.get(f"address of {rank}").decode() for rank in range(launch.world_size)})


def announce_hub(store: torch_dist.Store, token: str, ports: dict[str, tuple[str, int]]) -> None:
    """Tell the other processes where the hub listens, by their addresses."""
    store.set("hub", json.dumps([token, ports]))


def find_hub(store: torch_dist.Store, launch: Launch) -> tuple[str, tuple[str, int]] | None:
    """Return the token, address and port of the hub; None: there is no hub."""
    token, ports = json.loads(store.get("hub"))
    return (token, tuple(ports[store.get(f"address of {launch.rank}").decode()])) if ports else None


def refuse_shared_device(store: torch_dist.Store, launch: Launch, device: str) -> None:
    """Raise on every process if two of them have the same GPU: nccl needs one for each.

    Args:
        store: of this start.
        launch: where this process stands.
        device: what no other GPU is called.
    """
    if store.add(f"device {device}", 1) > 1:
        store.set("shared device", device)
    if store.add("devices seen", 1) == launch.world_size:
        store.set("all devices seen", "yes")
    store.wait(["all devices seen"])
    if store.check(["shared device"]):
        raise ConfigError(
            f"DIST.BACKEND: nccl needs one GPU per process, but several of {launch.world_size} processes share one"
            f" ({store.get('shared device').decode()}); start fewer processes, or set DIST.BACKEND gloo"
        )
