"""Watchdog server: a thread of rank 0 that monitors every process and decides how they end; see watchdog.py.

It listens on the network, so nothing that a connection sends is parsed before the token.
"""

import contextlib
import errno
import hmac
import json
import logging
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

# Seconds between two heartbeats of a process; longer for many processes, which send at most so many in a second.
HEARTBEAT_S = 1.0
MAX_HEARTBEATS_PER_S = 256
# Seconds after which the kernel closes a connection whose other end does not respond, e.g. a node without power.
UNREACHABLE_S = 15
# Seconds to wait for the cause of an error that may be a consequence, e.g. a broken connection.
CAUSE_WAIT_S = 2.0
# Seconds that the other processes get to exit before the one that failed prints its error.
EXIT_GRACE_S = 3.0
# Placeholder for the position of the process that logs the message: the last heartbeat of a dead one is older.
LAST_STEP = "{last step}"
# Seconds to authenticate, and unauthenticated connections allowed beside one for each process.
AUTH_TIMEOUT_S = 10.0
MAX_PENDING = 64
# Longer lines, in bytes, and longer texts in them, in characters, are cut.
MAX_LINE, MAX_TEXT = 1 << 14, 200
# Errors of accept() that last as long as there is no room for another connection.
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class JsonLines:
    """JSON objects, one per line, over a non-blocking socket."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        limits = {"TCP_KEEPIDLE": UNREACHABLE_S // 3, "TCP_KEEPINTVL": UNREACHABLE_S // 3, "TCP_KEEPCNT": 2,
                  "TCP_USER_TIMEOUT": UNREACHABLE_S * 1000}  # fmt: skip
        for name, value in limits.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(1, value))
        self.connection = connection
        self.is_unreachable = False
        self.partial = bytearray()  # an incomplete line
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message without waiting; the reader notices a closed connection.

        Messages are few and short: one that finds no room goes to a process that has long stopped reading.
        """
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError), self._lock:
            if self.connection.send(data) < len(data):
                self.connection.shutdown(socket.SHUT_RDWR)  # an incomplete line cannot be repaired

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages received, without invalid ones; None: the connection is closed."""
        lines = self.receive_lines()
        return None if lines is None else [message for line in lines for message in _parse(line)]

    def receive_lines(self) -> list[bytes] | None:
        """Return the complete lines received; None: the connection is closed."""
        try:
            data = self.connection.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            self.is_unreachable = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
            return None
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self.partial) + lines[0]
            self.partial.clear()
        self.partial += rest
        del self.partial[MAX_LINE:]
        return lines if data else None


def _parse(line: bytes) -> list[dict[str, Any]]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return [message] if isinstance(message, dict) else []


@dataclass(eq=False)
class _Peer:
    """A connection: unauthenticated, then with a token, then a process with a rank."""

    lines: JsonLines
    since: float
    is_open: bool = True
    is_authenticated: bool = False
    rank: int = -1
    host: str = "?"
    position: str = "its start"
    num_marks: int = 0
    is_starting: bool = True
    progress_at: float = 0.0
    message_at: float = 0.0
    failed: dict[str, Any] | None = None

    def __str__(self) -> str:
        return f"process {self.rank} on {self.host}"


class WatchdogServer(threading.Thread):
    """Thread that monitors every process and decides, once, how they end.

    A broken connection is a death. Silence is not: a call into C may hold the interpreter lock for minutes. A process
    that is silent makes no progress either, which counts as a stall in the end.

    Args:
        world_size: the number of processes.
        token: authenticates connections.
        timeout_s: seconds without progress after which a process counts as stalled.
        startup_timeout_s: the same while any process is in its first step or first evaluation; None: timeout_s.
        addresses: of this machine, to listen on.
    """

    def __init__(
        self,
        world_size: int,
        token: str,
        timeout_s: float,
        startup_timeout_s: float | None = None,
        addresses: Sequence[str] = ("127.0.0.1",),
    ):
        super().__init__(name="watchdog server", daemon=True)
        self.world_size = world_size
        self.token = token
        self._limits = (timeout_s, "DIST.TIMEOUT_S"), (startup_timeout_s or timeout_s, "DIST.STARTUP_TIMEOUT_S")
        self.heartbeat_s = max(HEARTBEAT_S, world_size / MAX_HEARTBEATS_PER_S)
        _raise_file_limit(2 * world_size + 512)
        self._selector = selectors.DefaultSelector()
        self._listeners = [_listen(address, world_size) for address in addresses]
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)
        self.ports = [listener.getsockname()[1] for listener in self._listeners]
        self._pending: dict[_Peer, None] = {}
        self._peers: dict[int, _Peer] = {}
        self._reporter: _Peer | None = None
        self._suspect: tuple[float, _Peer] | None = None
        self._clock, self._clock_read_at = 0.0, time.monotonic()
        self._is_over = threading.Event()
        self._is_closed = False

    def run(self) -> None:
        """Serve until the run is over or has to end."""
        next_heartbeat = time.monotonic() + self.heartbeat_s
        try:
            while not self._is_over.is_set():
                self._receive_all(timeout_s=min(0.2, self.heartbeat_s))
                if time.monotonic() > next_heartbeat:
                    next_heartbeat = time.monotonic() + self.heartbeat_s
                    self._check_progress()
                if self._suspect and time.monotonic() > self._suspect[0]:
                    self._end_run(self._suspect[1])
        except Exception as error:  # a bug of the watchdog must not end a healthy run
            self._is_closed = True
            logger.warning("watchdog disabled: %s in its server", repr(error), exc_info=True)
        for listener in self._listeners:
            listener.close()
        if self._is_closed:
            for peer in self._peers.values():
                peer.lines.send({"over": True})

    def close(self) -> None:
        """Stop without ending the processes."""
        self._is_closed = not self._is_over.is_set()
        self._is_over.set()
        self.join()

    def _receive_all(self, timeout_s: float) -> None:
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if key.data and key.data.is_open:
                self._receive(key.data)
        for key, _ in ready:  # afterwards: a pending connection that has sent the token makes room for the next
            if isinstance(key.fileobj, socket.socket) and key.data is None and not self._is_over.is_set():
                self._accept(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
            peer = _Peer(JsonLines(connection), since=self._clock)
        except OSError as error:  # closed already, or no room
            if error.errno in _NO_ROOM:
                self._selector.unregister(listener)  # until the next heartbeat
            return
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._pending[peer] = None
        if len(self._pending) > self.world_size + MAX_PENDING:
            self._drop(next(iter(self._pending)))

    def _receive(self, peer: _Peer) -> None:
        lines = peer.lines.receive_lines()
        if lines and not peer.is_authenticated:
            peer.is_authenticated = hmac.compare_digest(lines.pop(0), self.token.encode())
            if not peer.is_authenticated:
                lines = None
        if lines is None or not peer.is_authenticated and len(peer.lines.partial) > len(self.token):
            self._drop(peer)
            if peer.rank >= 0:
                self._end_run(peer)
            return
        for message in (message for line in lines for message in _parse(line)):
            if not peer.is_open:
                return
            if peer.rank < 0:
                self._register(peer, message)
            else:
                self._handle(peer, message)

    def _register(self, peer: _Peer, message: dict[str, Any]) -> None:
        rank = message.get("rank")
        if type(rank) is not int or not 0 <= rank < self.world_size or rank in self._peers:
            self._drop(peer)
            return
        peer.rank, peer.host = rank, _read_text(message, "host", "?")
        peer.message_at = peer.progress_at = self._clock
        del self._pending[peer]
        self._peers[rank] = peer
        peer.lines.send({"beat_s": self.heartbeat_s, "main": socket.gethostname(), "limit_s": self._limits[True][0]})
        if rank and (self._reporter is None or _report_order(peer) < _report_order(self._reporter)):
            if self._reporter:
                self._reporter.lines.send({"speaks": False})
            self._reporter = peer
            peer.lines.send({"speaks": True})

    def _handle(self, peer: _Peer, message: dict[str, Any]) -> None:
        peer.message_at = self._clock
        peer.position = _read_text(message, "at", peer.position)
        if (marks := message.get("marks", peer.num_marks)) != peer.num_marks:
            peer.num_marks, peer.progress_at = marks, self._clock
        peer.is_starting = message.get("starting", peer.is_starting) is True
        if message.get("leaves"):
            self._drop(peer)
        elif isinstance(message.get("failed"), dict) and peer.failed is None:
            failed = message["failed"]
            peer.failed = {"status": 2 if failed.get("status") == 2 else 1, "known": failed.get("known") is True}
            if failed.get("consequence") is not True:
                self._end_run(peer)
            elif self._suspect is None:
                self._suspect = (time.monotonic() + CAUSE_WAIT_S, peer)

    def _drop(self, peer: _Peer) -> None:
        if not peer.is_open:
            return
        peer.is_open = False
        self._selector.unregister(peer.lines.connection)
        if peer.rank < 0:
            del self._pending[peer]
            peer.lines.connection.close()
        else:
            del self._peers[peer.rank]

    def _check_progress(self) -> None:
        # A suspended job, or one whose interpreter lock was held, has a jump in time: no process was silent meanwhile.
        now = time.monotonic()
        self._clock += min(now - self._clock_read_at, 2 * self.heartbeat_s)
        self._clock_read_at = now
        for peer in [pending for pending in self._pending if self._clock - pending.since > AUTH_TIMEOUT_S]:
            self._drop(peer)
        for listener in self._listeners:
            if listener not in self._selector.get_map():
                self._selector.register(listener, selectors.EVENT_READ)
        # The other processes wait for one that is still starting.
        limit = self._limits[any(peer.is_starting for peer in self._peers.values())]
        for peer in self._peers.values():
            peer.lines.send({"limit_s": limit[0]})
        delay_s = 2 * self.heartbeat_s  # what is known of the others may be that old
        stalled = [peer for peer in self._peers.values() if self._clock - peer.progress_at > limit[0] + delay_s]
        if stalled:
            silent = [peer for peer in stalled if self._clock - peer.message_at > limit[0] / 2 + delay_s]
            self._end_run(min(silent or stalled, key=lambda peer: peer.progress_at), limit, bool(silent))

    def _end_run(self, culprit: _Peer, limit: tuple[float, str] | None = None, is_silent: bool = False) -> None:
        """End all processes, once: rank 0 last, except for a culprit that has an error to print.

        The culprit died, failed or, with a limit (seconds and their option), stalled; a silent one sends no messages.
        """
        if self._is_over.is_set():
            return
        self._is_over.set()
        if limit:
            self._collect_stacks()
        peers = self._peers
        reporter = min((rank for rank in peers if peers[rank] is not culprit), default=culprit.rank)
        message = describe_end(culprit, limit, is_silent)
        end: dict[str, Any] = {"status": 1, "message": message, "stacks": bool(limit)}
        if culprit.failed:
            end["status"] = culprit.failed["status"]
            end["message"] = None if culprit.failed["known"] else end["message"]
        first = [peer for rank, peer in peers.items() if rank != 0 and not (peer is culprit and peer.failed)]
        for peer in first:
            peer.lines.send({"end": {**end, "says": peer.rank == reporter}})
        self._await(first, lambda messages: messages is None)
        if 0 in peers:
            raises = peers[0] is culprit and culprit.failed is not None
            peers[0].lines.send({"end": {**end, "says": reporter == 0, "raises": raises}})
        # A culprit on another rank prints its error when the server has closed.

    def _collect_stacks(self) -> None:
        """Have every process write its stacks while all are alive: the end of one would move the others on."""
        peers = list(self._peers.values())
        for peer in peers:
            peer.lines.send({"stacks": True})
        self._await(peers, lambda messages: messages is None or any("wrote" in message for message in messages))

    def _await(self, peers: Sequence[_Peer], is_reply: Callable[[list[dict[str, Any]] | None], bool]) -> None:
        """Wait for a reply of each peer, at most EXIT_GRACE_S seconds."""
        waiting, deadline = set(peers), time.monotonic() + EXIT_GRACE_S
        while waiting and time.monotonic() < deadline:
            for key, _ in self._selector.select(timeout=0.1):
                if key.data is None or key.data.rank < 0:
                    self._selector.unregister(key.fileobj)  # no further connections
                    continue
                messages = key.data.lines.receive()
                if messages is None:
                    self._drop(key.data)
                if is_reply(messages):
                    waiting.discard(key.data)


def describe_end(culprit: _Peer, limit: tuple[float, str] | None = None, is_silent: bool = False) -> str:
    """Return the message of a run that ends because of a process."""
    if limit:
        event = "has been silent and has made no step" if is_silent else "has made no step"
        return f"{culprit} {event} for {limit[0]:.0f} s ({limit[1]}) after {culprit.position}; all stop"
    if culprit.failed:
        return f"{culprit} failed, see below, after {culprit.position}; the others stop"
    if culprit.lines.is_unreachable:
        return f"{culprit} could not be reached for {UNREACHABLE_S} s after {culprit.position}; the others stop"
    return f"{culprit} died after {LAST_STEP}; the others stop"


def _report_order(peer: _Peer) -> tuple[bool, int]:
    """Return the sort key of the processes that report the end of rank 0: those on other nodes first."""
    return peer.host == socket.gethostname(), peer.rank


def _read_text(message: dict[str, Any], key: str, default: str) -> str:
    value = message.get(key)
    return "".join(filter(str.isprintable, value[:MAX_TEXT])) if isinstance(value, str) else default


def _listen(address: str, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    target = socket.getaddrinfo(address, 0, family, socket.SOCK_STREAM)[0][4]  # with the scope of an IPv6 address
    listener = socket.create_server(target, family=family, backlog=max(128, backlog))
    listener.setblocking(False)
    return listener


def _raise_file_limit(num_files: int) -> None:
    """Raise the soft limit of open files as far as the hard limit allows."""
    if sys.platform != "linux":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
