"""The hub of the watch, kept by process 0: it hears from every process and decides how they end. See watch.py.

It listens on the network, so until a connection has sent the token nothing that it sends is interpreted.
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

# Seconds between two messages of a process, as long as all of them together send at most so many a second.
BEAT_S = 1.0
MOST_BEATS = 256
# Seconds after which the kernel gives up a connection whose other end answers no more, e.g. a node without power.
UNREACHABLE_S = 15
# Seconds to wait for the cause behind an error that may only be its consequence, e.g. a broken connection.
CAUSE_S = 2.0
# Stands for the position of whoever says a message. Processes step together, and the word of a dead one is a beat old.
LAST_STEP = "{last step}"
# Seconds that the processes get to end before the one that failed prints its error.
FAREWELL_S = 3.0
# Seconds that a connection has to send the token, and how many more than there are processes may be that far.
TOKEN_S = 10.0
MOST_STRANGERS = 64
# Bytes of a line, and characters of a text in it; longer ones are cut.
MOST_LINE, MOST_TEXT = 1 << 14, 200
# accept() fails with these as long as there is no room for another connection.
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Lines:
    """JSON objects over a non-blocking socket, one a line."""

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
        self._rest = bytearray()
        self._lock = threading.Lock()

    def send(self, message: dict) -> None:
        """Send a message without waiting; the reader notices when the other side has gone.

        Messages are few and short. One that finds no room goes to a process that has long stopped reading.
        """
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError), self._lock:
            if self.connection.send(data) < len(data):
                self.connection.shutdown(socket.SHUT_RDWR)  # half a line cannot be mended

    def receive(self) -> list[dict] | None:
        """Return the messages that have come; None: the other side has gone. What is no JSON object is skipped."""
        lines = self.receive_lines()
        return None if lines is None else [message for line in lines for message in _parse(line)]

    def receive_lines(self) -> list[bytes] | None:
        """Return the whole lines that have come; None: the other side has gone."""
        try:
            data = self.connection.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            self.is_unreachable = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
            return None
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = bytes(self._rest) + whole[0]
            self._rest.clear()
        self._rest += rest
        del self._rest[MOST_LINE:]
        return whole if data else None

    @property
    def num_waiting(self) -> int:
        """The bytes of the line that has begun."""
        return len(self._rest)


def _parse(line: bytes) -> list[dict]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return [message] if isinstance(message, dict) else []


@dataclass(eq=False)
class _Member:
    """What the hub knows of a connection: of a process, once it has sent the token and its rank."""

    lines: Lines
    since: float
    is_open: bool = True
    is_trusted: bool = False
    rank: int = -1
    host: str = "?"
    position: str = "its start"
    num_marks: int = 0
    is_starting: bool = True
    moved_at: float = 0.0
    heard_at: float = 0.0
    failed: dict | None = None

    def __str__(self) -> str:
        return f"process {self.rank} on {self.host}"


class WatchdogServer(threading.Thread):
    """Hears every process and decides, once, how they end.

    A broken connection is a death. Silence is not: a call into C may hold the interpreter lock for minutes. A process
    that is silent makes no progress either, which counts as stuck in the end.

    Args:
        world_size: the number of processes.
        token: what a connection must show to be heard.
        timeout_s: seconds without progress after which a process counts as stuck.
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
        super().__init__(name="watch hub", daemon=True)
        self.world_size = world_size
        self.token = token
        self._limits = (timeout_s, "DIST.TIMEOUT_S"), (startup_timeout_s or timeout_s, "DIST.STARTUP_TIMEOUT_S")
        self.beat_s = max(BEAT_S, world_size / MOST_BEATS)
        _raise_file_limit(2 * world_size + 512)
        self._selector = selectors.DefaultSelector()
        self._servers = [_listen(address, world_size) for address in addresses]
        for server in self._servers:
            self._selector.register(server, selectors.EVENT_READ)
        self.ports = [server.getsockname()[1] for server in self._servers]
        self._strangers: dict[_Member, None] = {}
        self._members: dict[int, _Member] = {}
        self._speaker: _Member | None = None
        self._suspect: tuple[float, _Member] | None = None
        self._clock, self._seen_at = 0.0, time.monotonic()
        self._over = threading.Event()
        self._is_peaceful = False

    def run(self) -> None:
        """Listen until the run is over or has to end."""
        next_beat = time.monotonic() + self.beat_s
        try:
            while not self._over.is_set():
                self._hear_all(timeout_s=min(0.2, self.beat_s))
                if time.monotonic() > next_beat:
                    next_beat = time.monotonic() + self.beat_s
                    self._beat()
                if self._suspect and time.monotonic() > self._suspect[0]:
                    self._blame(self._suspect[1])
        except Exception as error:  # a bug of the watch must not end a run that is sound
            self._is_peaceful = True
            logger.warning("the processes no longer watch each other: %s in the hub", repr(error), exc_info=True)
        for server in self._servers:
            server.close()
        if self._is_peaceful:
            for member in self._members.values():
                member.lines.send({"over": True})

    def close(self) -> None:
        """Tell everybody that the run is over and that nobody has to be watched any more."""
        self._is_peaceful = not self._over.is_set()
        self._over.set()
        self.join()

    def _hear_all(self, timeout_s: float) -> None:
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if key.data and key.data.is_open:
                self._hear(key.data)
        for key, _ in ready:  # afterwards: a stranger that has sent the token makes room for the next
            if key.data is None and not self._over.is_set():
                self._accept(key.fileobj)

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, _ = server.accept()
            stranger = _Member(Lines(connection), since=self._clock)
        except OSError as error:  # it has gone already, or there is no room
            if error.errno in _NO_ROOM:
                self._selector.unregister(server)  # until the next beat
            return
        self._selector.register(connection, selectors.EVENT_READ, stranger)
        self._strangers[stranger] = None
        if len(self._strangers) > self.world_size + MOST_STRANGERS:
            self._drop(next(iter(self._strangers)))

    def _hear(self, member: _Member) -> None:
        lines = member.lines.receive_lines()
        if lines and not member.is_trusted:
            member.is_trusted = hmac.compare_digest(lines.pop(0), self.token.encode())
            if not member.is_trusted:
                lines = None
        if lines is None or not member.is_trusted and member.lines.num_waiting > len(self.token):
            self._drop(member)
            if member.rank >= 0:
                self._blame(member)
            return
        for message in (message for line in lines for message in _parse(line)):
            if not member.is_open:
                return
            if member.rank < 0:
                self._admit(member, message)
            else:
                self._heed(member, message)

    def _admit(self, member: _Member, message: dict) -> None:
        rank = message.get("rank")
        if type(rank) is not int or not 0 <= rank < self.world_size or rank in self._members:
            self._drop(member)
            return
        member.rank, member.host = rank, _text(message, "host", "?")
        member.heard_at = member.moved_at = self._clock
        del self._strangers[member]
        self._members[rank] = member
        member.lines.send({"beat_s": self.beat_s, "main": socket.gethostname(), "limit_s": self._limits[True][0]})
        if rank and (self._speaker is None or _place(member) < _place(self._speaker)):
            if self._speaker:
                self._speaker.lines.send({"speaks": False})
            self._speaker = member
            member.lines.send({"speaks": True})

    def _heed(self, member: _Member, message: dict) -> None:
        member.heard_at = self._clock
        member.position = _text(message, "at", member.position)
        if (marks := message.get("marks", member.num_marks)) != member.num_marks:
            member.num_marks, member.moved_at = marks, self._clock
        member.is_starting = message.get("starting", member.is_starting) is True
        if message.get("leaves"):
            self._drop(member)
        elif isinstance(message.get("failed"), dict) and member.failed is None:
            failed = message["failed"]
            member.failed = {"status": 2 if failed.get("status") == 2 else 1, "known": failed.get("known") is True}
            if failed.get("consequence") is not True:
                self._blame(member)
            elif self._suspect is None:
                self._suspect = (time.monotonic() + CAUSE_S, member)

    def _drop(self, member: _Member) -> None:
        if not member.is_open:
            return
        member.is_open = False
        self._selector.unregister(member.lines.connection)
        if member.rank < 0:
            del self._strangers[member]
            member.lines.connection.close()
        else:
            del self._members[member.rank]

    @property
    def _limit(self) -> tuple[float, str]:
        """The seconds that count, and their option: processes wait for one that is still starting."""
        return self._limits[any(member.is_starting for member in self._members.values())]

    def _beat(self) -> None:
        # A job that was suspended, or whose interpreter lock was held, finds itself later: that is nobody's silence.
        now = time.monotonic()
        self._clock, self._seen_at = self._clock + min(now - self._seen_at, 2 * self.beat_s), now
        for stranger in [one for one in self._strangers if self._clock - one.since > TOKEN_S]:
            self._drop(stranger)
        for server in self._servers:
            if server not in self._selector.get_map():
                self._selector.register(server, selectors.EVENT_READ)
        limit = self._limit
        for member in self._members.values():
            member.lines.send({"limit_s": limit[0]})
        patience_s = limit[0] + 2 * self.beat_s  # what is known of the others may be that old
        late = [member for member in self._members.values() if self._clock - member.moved_at > patience_s]
        if late:
            silent = [member for member in late if self._clock - member.heard_at > limit[0] / 2]
            self._blame(min(silent or late, key=lambda member: member.moved_at), limit, bool(silent))

    def _blame(self, culprit: _Member, limit: tuple[float, str] | None = None, is_silent: bool = False) -> None:
        """Tell everybody, once, to end: the process of the hub last but for a culprit that has an error to print.

        Args:
            culprit: the process that died, failed or, with a limit, is stuck.
            limit: the seconds without progress that were too many, and their option.
            is_silent: it does not even answer.
        """
        if self._over.is_set():
            return
        self._over.set()
        if limit:
            self._collect_stacks()
        members = self._members
        speaker = min((rank for rank in members if members[rank] is not culprit), default=culprit.rank)
        message = describe_end(culprit, limit, is_silent)
        end: dict[str, Any] = {"status": 1, "message": message, "stacks": bool(limit)}
        if culprit.failed:
            end["status"] = culprit.failed["status"]
            end["message"] = None if culprit.failed["known"] else end["message"]
        first = [m for rank, m in members.items() if rank != 0 and not (m is culprit and m.failed)]
        for member in first:
            member.lines.send({"end": {**end, "says": member.rank == speaker}})
        self._await(first, lambda messages: messages is None)
        if 0 in members:
            raises = members[0] is culprit and culprit.failed is not None
            members[0].lines.send({"end": {**end, "says": speaker == 0, "raises": raises}})
        # A culprit elsewhere prints its error when the hub is gone.

    def _collect_stacks(self) -> None:
        """Have every process write where it is while all are still there: a peer's end would move the others on."""
        members = list(self._members.values())
        for member in members:
            member.lines.send({"stacks": True})
        self._await(members, lambda messages: messages is None or any("wrote" in message for message in messages))

    def _await(self, members: Sequence[_Member], is_answer: Callable) -> None:
        """Wait for an answer of each of them, FAREWELL_S seconds at most."""
        waiting, deadline = set(members), time.monotonic() + FAREWELL_S
        while waiting and time.monotonic() < deadline:
            for key, _ in self._selector.select(timeout=0.1):
                if key.data is None or key.data.rank < 0:
                    self._selector.unregister(key.fileobj)  # nobody else is let in
                    continue
                messages = key.data.lines.receive()
                if messages is None:
                    self._drop(key.data)
                if is_answer(messages):
                    waiting.discard(key.data)


def describe_end(culprit: _Member, limit: tuple[float, str] | None = None, is_silent: bool = False) -> str:
    """Return the one message of a run that ends because of a process."""
    if limit:
        what = "has been silent and has made no step" if is_silent else "has made no step"
        return f"{culprit} {what} for {limit[0]:.0f} s ({limit[1]}) after {culprit.position}; all stop"
    if culprit.failed:
        return f"{culprit} failed, see below, after {culprit.position}; the others stop"
    if culprit.lines.is_unreachable:
        return f"{culprit} could not be reached for {UNREACHABLE_S} s after {culprit.position}; the others stop"
    return f"{culprit} died after {LAST_STEP}; the others stop"


def _place(member: _Member) -> tuple[bool, int]:
    """Return the place in the order of those who report the end of process 0: first those on other nodes."""
    return member.host == socket.gethostname(), member.rank


def _text(message: dict, key: str, default: str) -> str:
    value = message.get(key)
    return "".join(filter(str.isprintable, value[:MOST_TEXT])) if isinstance(value, str) else default


def _listen(address: str, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    target = socket.getaddrinfo(address, 0, family, socket.SOCK_STREAM)[0][4]  # with the scope of an IPv6 address
    server = socket.create_server(target, family=family, backlog=max(128, backlog))
    server.setblocking(False)
    return server


def _raise_file_limit(num_files: int) -> None:
    """Let this process open so many files, if it may."""
    if sys.platform != "linux":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
