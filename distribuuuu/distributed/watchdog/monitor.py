"""Monitor of the watchdog: a thread of rank 0 that decides, once, how all processes end; and the connections to it.

Each process sends its state about once a second, as a line of JSON. Silence is no death: a call into C may hold the
interpreter lock for minutes. The kernel breaks a connection when a process dies. A process that leaves says so before:
what was sent arrives before the end of a connection.
"""

import contextlib
import errno
import json
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distribuuuu.distributed.stall_timer import PERIOD_S, StallTimer
from distribuuuu.launch.ports import LOOPBACK
from distribuuuu.launch.signals import end_process

logger = logging.getLogger(__name__)

# Seconds after which the kernel closes a connection whose other end does not respond, e.g. a node without power.
UNREACHABLE_S = 15
# Bytes of a line, at most.
_MAX_LINE = 1 << 16
# Seconds to wait for the cause of an error that may be a consequence, e.g. a broken connection.
CAUSE_WAIT_S = 2.0
# Seconds that the other processes get to exit before the one that failed prints its error.
EXIT_GRACE_S = 3.0


class Channel:
    """A connection that sends and receives JSON objects as lines.

    Attributes:
        broken: why it has ended, e.g. 'died'; '' while it is open.
    """

    def __init__(self, connection: socket.socket):
        self.socket, self.broken = connection, ""
        self._buffer = b""
        keep_alive(connection)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, **message: Any) -> None:
        """Send an object; ignore a broken connection, which the reader notices."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the objects that a selector has found; raise ValueError if the other end is no process of the run."""
        try:
            data = self.socket.recv(_MAX_LINE)
        except OSError as error:
            is_unreachable = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
            self.broken = f"could not be reached for {UNREACHABLE_S} s" if is_unreachable else "died"
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > _MAX_LINE:
            raise ValueError("a line is too long")
        self.broken = "" if data else "died"
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("expected an object")
            yield message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
        self.socket.close()


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel close a connection whose other end does not respond for UNREACHABLE_S seconds."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {"TCP_KEEPIDLE": UNREACHABLE_S // 3, "TCP_KEEPINTVL": UNREACHABLE_S // 3, "TCP_KEEPCNT": 2,
              "TCP_USER_TIMEOUT": UNREACHABLE_S * 1000}  # fmt: skip
    for name, value in limits.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(1, value))


def kill_here(host: str, pid: int) -> None:
    """Let a silent process of this machine print its stacks, and kill it: its interpreter lock may be held for ever."""
    if host == socket.gethostname() and pid != os.getpid():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGQUIT)  # faulthandler prints the stacks without the lock
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)


@dataclass(eq=False)
class Peer:
    """A process of the run, with its last state.

    Attributes:
        position: its last step, e.g. 'epoch 2, step 14'.
        marks: grows with each step.
        slow: the limit of slow phases applies.
        left: it ends by itself, without an error.
        stacks: it has written its stacks.
        status, is_consequence: of its exception: the exit status of all processes, None if its text is not complete;
            and whether it may result from the end of another process.
        num_silent, num_stalled: periods since it has sent a state and made a step.
    """

    rank: int
    host: str
    pid: int
    channel: Channel
    position: str = "its start"
    marks: int = 0
    slow: bool = True
    left: bool = False
    stacks: bool = False
    failed: bool = False
    status: int | None = None
    is_consequence: bool = False
    num_silent: int = 0
    num_stalled: int = 0

    def update(self, **message: Any) -> None:
        """Take a message of the process."""
        self.num_silent = 0
        if message.get("marks", self.marks) != self.marks:
            self.num_stalled = 0
        for name, value in message.items():
            setattr(self, name, value)


class Monitor(threading.Thread):
    """Thread that monitors every process and decides, once, how they end.

    Time is counted in periods, not in seconds: a job that was suspended has not missed any.

    Args:
        token: a secret of the run, which each process sends first.
        timer: the stall timer of rank 0.
        is_local: all processes are on this machine.
    """

    def __init__(self, token: str, num_processes: int, timer: StallTimer, is_local: bool):
        super().__init__(name="watchdog monitor", daemon=True)
        self._token, self._num_processes, self._timer = token, num_processes, timer
        self._peers: dict[int, Peer] = {}
        has_both = socket.has_dualstack_ipv6() and not is_local
        family = socket.AF_INET6 if has_both else socket.AF_INET
        self._listener = socket.create_server((LOOPBACK if is_local else "", 0), family=family, dualstack_ipv6=has_both,
                                              backlog=max(128, num_processes))  # fmt: skip
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._cause_wait_ends = float("inf")
        self._is_over = threading.Event()

    def run(self) -> None:
        """Check the processes until the run is over or has to end."""
        next_period = time.monotonic() + PERIOD_S
        try:
            while not self._is_over.is_set():
                self._receive(min(0.2, PERIOD_S))
                if is_counted := time.monotonic() > next_period:
                    next_period = max(next_period + PERIOD_S, time.monotonic())
                    self._send(self._peers.values())  # this process is alive
                self._check(is_counted)
        except Exception as error:  # a bug of the watchdog must not end a healthy run
            logger.warning("watchdog disabled: %s in its monitor", repr(error), exc_info=True)
        self._greet_all()
        self._send(self._peers.values(), over=True)
        self._listener.close()

    def close(self) -> None:
        """Stop without ending the processes, to which it says so."""
        self._is_over.set()
        self.join()
        for peer in self._peers.values():
            peer.channel.close()

    # ------------------------------------------------------------------------------------ messages

    def _send(self, peers: Iterable[Peer], **message: Any) -> None:
        for peer in peers:
            if not peer.left and not peer.channel.broken:
                peer.channel.send(**message)

    def _receive(self, timeout_s: float) -> None:
        """Take the messages that arrive within some seconds."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                channel = Channel(self._listener.accept()[0])
                self._selector.register(channel, selectors.EVENT_READ, (channel, None))
                continue
            channel, peer = key.data
            try:
                for message in channel.receive():
                    if peer:
                        peer.update(**message)
                    else:
                        peer = self._greet(channel, **message)
            except (ValueError, TypeError):  # not a process of this run
                channel.broken = "died"
            if channel.broken:
                self._selector.unregister(channel)
                channel.close()

    def _greet_all(self) -> None:
        """Accept the connections that wait, e.g. in a short run: one that is closed unanswered looks like a death."""
        deadline = time.monotonic() + EXIT_GRACE_S
        while len(self._peers) < self._num_processes and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self._receive(0.1)

    def _greet(self, channel: Channel, token: str, rank: int, host: str, pid: int) -> Peer:
        if token != self._token:
            raise ValueError("it does not know the token")
        peer = self._peers[rank] = Peer(rank, host, pid, channel)
        self._selector.modify(channel, selectors.EVENT_READ, (channel, peer))
        return peer

    # ------------------------------------------------------------------------------------ decisions

    def _check(self, is_counted: bool) -> None:
        present = [peer for peer in self._peers.values() if not peer.left]
        for peer in present if is_counted else ():
            peer.num_silent += 1
            peer.num_stalled += 1
        failed = [peer for peer in present if peer.failed]
        causes = [peer for peer in failed if not peer.is_consequence]
        died = [peer for peer in present if peer.channel.broken and not peer.failed]
        if failed and not causes and self._cause_wait_ends == float("inf"):
            self._cause_wait_ends = time.monotonic() + CAUSE_WAIT_S
        if time.monotonic() > self._cause_wait_ends:
            causes = failed
        if causes or died:
            self._end_run((causes or died)[0])
        elif present:
            self._check_progress(present)

    def _check_progress(self, present: Sequence[Peer]) -> None:
        limit_s = self._timer.limits[any(peer.slow for peer in present)]  # the others wait for one that is slow
        late_s = 2 * PERIOD_S  # what is known of the others may be that old
        stalled = [peer for peer in present if peer.num_stalled * PERIOD_S > limit_s + late_s]
        if not stalled:
            return
        silent = [peer for peer in stalled if peer.num_silent * PERIOD_S > limit_s / 2 + late_s]
        culprit = max(silent or stalled, key=lambda peer: peer.num_stalled)
        event = "has been silent and has made no step" if silent else "has made no step"
        name = "DIST.STARTUP_TIMEOUT_S" if limit_s != self._timer.limits[0] else "DIST.TIMEOUT_S"
        # Before one of them ends: that would move the others on.
        self._send(present, write_stacks=True)
        self._wait_until(lambda peer: peer.stacks or bool(peer.channel.broken), present)
        self._end_run(culprit, f"{event} for {limit_s:.0f} s ({name}) after {culprit.position}; all stop and have "
                      "written their stacks to OUT_DIR/stacks", bool(silent))  # fmt: skip

    def _end_run(self, culprit: Peer, event: str = "", is_silent: bool = False) -> None:
        """End all processes, once; one that has failed prints its error when the others have exited."""
        self._is_over.set()
        status = 1 if culprit.status is None else culprit.status
        if not event:
            broken = f"{culprit.channel.broken} after {self._timer.position}"
            event = f"failed, see below, after {culprit.position}" if culprit.failed else broken
            event += "; the others stop"
        if culprit.status is None:  # else its message is complete
            logger.error("process %d on %s %s", culprit.rank, culprit.host, event)
        others = [peer for peer in self._peers.values()
                  if not peer.left and peer.rank and not (peer is culprit and culprit.failed)]  # fmt: skip
        self._send(others, end=status, kill=[culprit.host, culprit.pid] if is_silent else None)
        if is_silent:
            kill_here(culprit.host, culprit.pid)
        self._wait_until(lambda peer: bool(peer.channel.broken), others)
        if culprit.failed:
            self._send([culprit], may_raise=True)
        if not (culprit.failed and culprit.rank == 0):
            end_process(status)

    def _wait_until(self, condition: Callable[[Peer], bool], peers: Sequence[Peer]) -> None:
        """Wait until the condition holds for the peers, at most EXIT_GRACE_S seconds."""
        deadline = time.monotonic() + EXIT_GRACE_S
        while not all(map(condition, peers)) and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self._receive(0.1)
