"""Watchdog monitor: a thread of rank 0 that decides, once, how all processes end; see watchdog.py.

Every process writes its state to torch's store about once a second, and the monitor writes an order back when the run
has to end. Silence is no death: a call into C may hold the interpreter lock for minutes. The store does not tell when
a connection breaks, so each process also holds one to rank 0. Nothing is sent over it: the kernel breaks it when the
process dies.
"""

import contextlib
import errno
import json
import logging
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as torch_dist

from distribuuuu.launch.detect import has_lost_launcher
from distribuuuu.launch.ports import LOOPBACK

logger = logging.getLogger(__name__)

# Seconds between two states of a process; longer for many processes, which send at most so many requests in a second.
PERIOD_S = 1.0
MAX_REQUESTS_PER_S = 4096
REQUESTS_PER_PERIOD = 2
# Seconds after which the kernel closes a connection whose other end does not respond, e.g. a node without power.
UNREACHABLE_S = 15
# Seconds to wait for the cause of an error that may be a consequence, e.g. a broken connection.
CAUSE_WAIT_S = 2.0
# Seconds that the other processes get to exit before the one that failed prints its error.
EXIT_GRACE_S = 3.0
# Placeholder for the position of the process that logs the message: the last state of a dead one is older.
LAST_STEP = "{last step}"


@dataclass
class State:
    """State of a process, which it writes to the store.

    Attributes:
        host: name of its machine.
        address: from which it reaches the machine of the store.
        sender: its end of the connection to the monitor, '' without one.
        position: its last step, e.g. 'epoch 2, step 14'.
        num_marks, num_writes: grow with each step and with each write.
        is_starting: the start-up timeout applies.
        has_left: it ends by itself, without an error.
        wrote_stacks: it has obeyed the order to write its stacks.
        failure: its exception: `status` of all processes, `is_known`: the message is complete, `is_consequence`: it
            may result from the end of another process.
    """

    host: str = field(default_factory=socket.gethostname)
    address: str = ""
    sender: str = ""
    position: str = "its start"
    num_marks: int = 0
    num_writes: int = 0
    is_starting: bool = True
    has_left: bool = False
    wrote_stacks: bool = False
    failure: dict[str, Any] | None = None

    def write(self, store: torch_dist.Store, rank: int) -> None:
        """Write this state of a process to the store."""
        self.num_writes += 1
        store.set(f"state {rank}", json.dumps(asdict(self)))


def read_states(store: torch_dist.Store, world_size: int) -> list[State]:
    """Return the states of all processes, by one request; waits until each has been written once."""
    texts = store.multi_get([f"state {rank}" for rank in range(world_size)])
    return [State(**json.loads(text)) for text in texts]


def period_s(world_size: int) -> float:
    """Return the seconds between two states of a process."""
    return max(PERIOD_S, REQUESTS_PER_PERIOD * world_size / MAX_REQUESTS_PER_S)


@dataclass(eq=False)
class _Peer:
    """A process, and the number of checks since it has written a state and made a step."""

    rank: int
    state: State
    num_silent: int = 0
    num_stalled: int = 0

    def __str__(self) -> str:
        return f"process {self.rank} on {self.state.host}"

    def update(self, state: State, is_counted: bool) -> None:
        """Take a newer state."""
        self.num_silent = self.num_silent + is_counted if state.num_writes == self.state.num_writes else 0
        self.num_stalled = self.num_stalled + is_counted if state.num_marks == self.state.num_marks else 0
        self.state = state


class Monitor(threading.Thread):
    """Thread that monitors every process and decides, once, how they end.

    Time is counted in checks, not in seconds: a job that was suspended has not missed any.

    Args:
        store: a connection of its own to the store.
        states: the first state of each process.
        limits: seconds without progress after which a process counts as stalled, and while any process is starting.
        address: of this machine, to listen on.
    """

    def __init__(
        self, store: torch_dist.Store, states: Sequence[State], limits: tuple[float, float], address: str = LOOPBACK
    ):
        super().__init__(name="watchdog monitor", daemon=True)
        self._store = store
        self._peers = [_Peer(rank, state) for rank, state in enumerate(states)]
        self._limits = (limits[0], "DIST.TIMEOUT_S"), (limits[1], "DIST.STARTUP_TIMEOUT_S")
        self.period_s = period_s(len(states))
        _raise_file_limit(3 * len(states) + 512)
        self._listener = _listen(address, len(states))
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._broken: dict[str, bool] = {}  # senders of broken connections; True: its machine does not respond
        self._cause_wait_ends = float("inf")
        self._is_over = threading.Event()
        self._is_closed = False

    def run(self) -> None:
        """Check the processes until the run is over or has to end."""
        next_check = time.monotonic()
        try:
            while not self._is_over.is_set():
                is_broken = self._collect_broken(timeout_s=min(0.2, self.period_s))
                if is_broken or time.monotonic() > min(next_check, self._cause_wait_ends):
                    is_counted = (now := time.monotonic()) > next_check
                    next_check = max(next_check + self.period_s, now) if is_counted else next_check
                    self._check(is_counted)
        except Exception as error:  # a bug of the watchdog must not end a healthy run
            self._is_closed = True
            if not has_lost_launcher():  # and with it the store; a signal ends this process
                logger.warning("watchdog disabled: %s in its monitor", repr(error), exc_info=True)
        if self._is_closed:
            with contextlib.suppress(RuntimeError):
                self._order(self._peers, {"over": True})
                self._wait_until(self._are_gone, self._peers[1:])
        self._listener.close()

    def close(self) -> None:
        """Stop without ending the processes."""
        self._is_closed = not self._is_over.is_set()
        self._is_over.set()
        self.join()

    def _collect_broken(self, timeout_s: float) -> bool:
        """Accept connections and note broken ones, for at most `timeout_s` seconds; tell whether there are new ones."""
        num_before = len(self._broken)
        for key, _ in self._selector.select(timeout_s):
            assert isinstance(key.fileobj, socket.socket)
            if key.data is None:
                self._accept()
                continue
            self._broken[key.data] = is_unreachable(key.fileobj)  # a process sends nothing
            self._selector.unregister(key.fileobj)
            key.fileobj.close()
        return len(self._broken) > num_before

    def _accept(self) -> None:
        try:
            connection, sender = self._listener.accept()
            keep_alive(connection)
            self._selector.register(connection, selectors.EVENT_READ, format_address(sender))
        except OSError:  # it is closed already, or there are too many open files
            time.sleep(0.1)

    def _read_states(self, is_counted: bool = False) -> list[_Peer]:
        """Update all processes; return those that have not left."""
        for peer, state in zip(self._peers, read_states(self._store, len(self._peers)), strict=True):
            peer.update(state, is_counted)
        return [peer for peer in self._peers if not peer.state.has_left]

    def _check(self, is_counted: bool) -> None:
        present = self._read_states(is_counted)
        died = [peer for peer in present if peer.state.sender in self._broken]
        failed = [peer for peer in present if peer.state.failure]
        causes = [peer for peer in failed if peer.state.failure and not peer.state.failure["is_consequence"]]
        if failed and not causes and self._cause_wait_ends == float("inf"):
            self._cause_wait_ends = time.monotonic() + CAUSE_WAIT_S
        if time.monotonic() > self._cause_wait_ends:
            causes = failed
        if causes or died:
            self._end_run((causes or died)[0])
        elif is_counted and present:
            self._check_progress(present)

    def _check_progress(self, present: Sequence[_Peer]) -> None:
        # The other processes wait for one that is still starting.
        limit = self._limits[any(peer.state.is_starting for peer in present)]
        late = 2 * self.period_s  # what is known of the others may be that old
        stalled = [peer for peer in present if peer.num_stalled * self.period_s > limit[0] + late]
        if stalled:
            silent = [peer for peer in stalled if peer.num_silent * self.period_s > limit[0] / 2 + late]
            self._end_run(max(silent or stalled, key=lambda peer: peer.num_stalled), limit, bool(silent))

    def _end_run(self, culprit: _Peer, limit: tuple[float, str] | None = None, is_silent: bool = False) -> None:
        """End all processes, once: rank 0 last, except for a culprit that has an error to print.

        The culprit died, failed or, with a limit (seconds and their option), stalled; a silent one writes no state.
        """
        self._is_over.set()
        present = [peer for peer in self._peers if not peer.state.has_left]
        if limit:  # while all are alive: the end of one would move the others on
            self._order(present, {"stacks": True})
            self._wait_until(lambda peers: all(peer.state.wrote_stacks for peer in peers), present)
        failure = culprit.state.failure or {"status": 1, "is_known": False}
        end = {
            "status": failure["status"],
            "message": None if failure["is_known"] else self._describe(culprit, limit, is_silent),
            "stacks": bool(limit),
            "reporter": min((peer.rank for peer in present if peer is not culprit), default=culprit.rank),
            "culprit": culprit.rank if culprit.state.failure else None,
        }
        first = [peer for peer in present if peer.rank != 0 and not (peer is culprit and culprit.state.failure)]
        self._order(first, {"end": end})
        self._wait_until(self._are_gone, first)
        if culprit.rank and culprit.state.failure:  # before the store, which rank 0 may host, ends
            self._order([culprit], {"end": end})
            self._wait_until(lambda peers: peers[0].state.has_left or self._are_gone(peers), [culprit])
        self._order(self._peers[:1], {"end": end})  # a culprit on another rank prints its error when rank 0 has exited

    def _describe(self, culprit: _Peer, limit: tuple[float, str] | None, is_silent: bool) -> str:
        position = culprit.state.position
        if limit:
            event = "has been silent and has made no step" if is_silent else "has made no step"
            return f"{culprit} {event} for {limit[0]:.0f} s ({limit[1]}) after {position}; all stop"
        if culprit.state.failure:
            return f"{culprit} failed, see below, after {position}; the others stop"
        if self._broken[culprit.state.sender]:
            return f"{culprit} could not be reached for {UNREACHABLE_S} s after {position}; the others stop"
        return f"{culprit} died after {LAST_STEP}; the others stop"

    def _order(self, peers: Sequence[_Peer], order: dict[str, Any]) -> None:
        for peer in peers:
            self._store.set(f"order {peer.rank}", json.dumps(order))

    def _are_gone(self, peers: Sequence[_Peer]) -> bool:
        return all(not peer.state.sender or peer.state.sender in self._broken for peer in peers)

    def _wait_until(self, condition: Callable[[Sequence[_Peer]], bool], peers: Sequence[_Peer]) -> None:
        """Wait until the condition holds for the peers, at most EXIT_GRACE_S seconds."""
        deadline = time.monotonic() + EXIT_GRACE_S
        while not condition(peers) and time.monotonic() < deadline:
            self._collect_broken(timeout_s=0.1)
            self._read_states()


# ------------------------------------------------------------------------------------------ connections


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel close a connection whose other end does not respond for UNREACHABLE_S seconds."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {"TCP_KEEPIDLE": UNREACHABLE_S // 3, "TCP_KEEPINTVL": UNREACHABLE_S // 3, "TCP_KEEPCNT": 2,
              "TCP_USER_TIMEOUT": UNREACHABLE_S * 1000}  # fmt: skip
    for name, value in limits.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(1, value))


def is_unreachable(connection: socket.socket) -> bool:
    """Tell whether a broken connection broke because the machine of its other end does not respond."""
    try:
        connection.recv(1)
    except OSError as error:
        return error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
    return False


def format_address(address: Sequence[Any]) -> str:
    """Return 'HOST:PORT' of one end of a connection, the same on both machines."""
    return f"{address[0].partition('%')[0].removeprefix('::ffff:')}:{address[1]}"


def _listen(address: str, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    target = socket.getaddrinfo(address, 0, family, socket.SOCK_STREAM)[0][4]  # with the scope of an IPv6 address
    listener = socket.create_server(target, family=family, backlog=max(128, backlog))
    listener.setblocking(False)
    return listener


def _raise_file_limit(num_files: int) -> None:
    """Raise the soft limit of open files as far as the hard limit allows."""
    if sys.platform == "linux":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < num_files:  # -1: no limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(num_files, hard) if hard >= 0 else num_files, hard))
