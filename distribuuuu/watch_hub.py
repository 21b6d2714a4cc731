"""The hub of the watch, kept by process 0: it hears from every process and decides how they end. See watch.py."""

import contextlib
import json
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

BEAT_S = 1.0
# Beats without a word after which a process counts as dead. Counted, not timed: a suspended job has not died.
SILENCE = 15
# Seconds to wait for the cause behind an error that may only be its consequence, e.g. a broken connection.
CAUSE_S = 2.0
# Stands for the position of whoever says a message. Processes step together, and the word of a dead one is a beat old.
LAST_STEP = "{last step}"
# Seconds that the processes get to end before the one that failed prints its error.
FAREWELL_S = 3.0


@dataclass
class _Member:
    """What the hub knows of a process."""

    lines: "Lines"
    rank: int = -1
    host: str = "?"
    position: str = "its start"
    age_s: float = 0.0
    silent: int = 0
    failed: dict | None = None

    def __str__(self) -> str:
        return f"process {self.rank} on {self.host}"


class Lines:
    """JSON objects over a socket, one a line."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._rest = b""
        self._lock = threading.Lock()

    def send(self, message: dict) -> None:
        """Send a message; the reader notices when the other side has gone."""
        with contextlib.suppress(OSError), self._lock:
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict] | None:
        """Return the messages that have come, at least a part of one being there; None: the other side has gone."""
        try:
            data = self.connection.recv(1 << 16)
            *whole, self._rest = (self._rest + data).split(b"\n")
            messages = [json.loads(line) for line in whole]
        except (OSError, ValueError):  # ValueError: a stranger who does not speak JSON
            return None
        return messages if data and all(isinstance(message, dict) for message in messages) else None


class Hub(threading.Thread):
    """Hears every process and decides, once, how they end.

    Args:
        world_size: the number of processes.
        token: what a connection must show to be heard.
        timeout_s: seconds without progress after which a process counts as stuck.
    """

    def __init__(self, world_size: int, token: str, timeout_s: float):
        super().__init__(name="watch hub", daemon=True)
        self.world_size = world_size
        self.token = token
        self._timeout_s = timeout_s
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=world_size, dualstack_ipv6=both)
        self.port = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._members: list[_Member] = []
        self._suspect: tuple[float, _Member] | None = None
        self._over = threading.Event()
        self._is_peaceful = False

    def run(self) -> None:
        """Listen until the run is over or has to end."""
        next_beat = time.monotonic() + BEAT_S
        while not self._over.is_set():
            for key, _ in self._selector.select(timeout=0.2):
                self._hear(key)
            if time.monotonic() > next_beat:
                next_beat = time.monotonic() + BEAT_S
                self._beat()
            if self._suspect and time.monotonic() > self._suspect[0]:
                self._blame(self._suspect[1])
        if self._is_peaceful:
            for member in self._members:
                member.lines.send({"over": True})

    def close(self) -> None:
        """Tell everybody that the run is over and that nobody has to be watched any more."""
        self._is_peaceful = not self._over.is_set()
        self._over.set()
        self.join()
        self._server.close()

    def _hear(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._server:
            connection, _ = self._server.accept()
            member = _Member(Lines(connection))
            self._selector.register(connection, selectors.EVENT_READ, member)
            return
        member: _Member = key.data
        messages = member.lines.receive()
        for message in messages or ():
            self._heed(member, message)
        if messages is None:
            self._drop(member)
            if member.rank >= 0:
                self._blame(member)

    def _heed(self, member: _Member, message: dict) -> None:
        member.silent = 0
        if message.get("token") == self.token:
            member.rank, member.host = message["rank"], message["host"]
            self._members.append(member)
        if member.rank < 0:
            return
        member.position, member.age_s = message.get("at", member.position), message.get("age_s", 0.0)
        if message.get("leaves"):
            self._drop(member)
        elif "failed" in message and member.failed is None:
            member.failed = message["failed"]
            if not member.failed["consequence"]:
                self._blame(member)
            elif self._suspect is None:
                self._suspect = (time.monotonic() + CAUSE_S, member)

    def _drop(self, member: _Member) -> None:
        if member.lines.connection in self._selector.get_map():
            self._selector.unregister(member.lines.connection)
        if member in self._members:
            self._members.remove(member)

    def _beat(self) -> None:
        hosts = {str(member.rank): member.host for member in self._members}
        for member in list(self._members):
            member.silent += 1
            member.lines.send({"hosts": hosts})
        silent = [member for member in self._members if member.silent > SILENCE]
        late = [member for member in self._members if member.age_s > self._timeout_s]
        if silent:
            self._drop(silent[0])
            self._blame(silent[0])
        elif late:
            self._blame(max(late, key=lambda member: member.age_s), stuck=True)

    def _blame(self, culprit: _Member, stuck: bool = False) -> None:
        """Tell everybody, once, to end: the process of the hub last but for a culprit that has an error to print."""
        if self._over.is_set():
            return
        self._over.set()
        if stuck:
            self._collect_stacks()
        speaker = min((m for m in self._members if m is not culprit), key=lambda m: m.rank, default=culprit)
        end: dict[str, Any] = {"status": 1, "message": describe_end(culprit, stuck, self._timeout_s), "stacks": stuck}
        if culprit.failed:
            end["status"] = culprit.failed["status"]
            end["message"] = None if culprit.failed["known"] else end["message"]
        first = [m for m in self._members if m.rank != 0 and not (m is culprit and m.failed)]
        for member in first:
            member.lines.send({"end": {**end, "says": member is speaker}})
        self._await_farewells(first)
        for main in (m for m in self._members if m.rank == 0):
            raises = main is culprit and main.failed is not None
            main.lines.send({"end": {**end, "says": main is speaker, "raises": raises}})
        # A culprit elsewhere prints its error when the hub is gone.

    def _collect_stacks(self) -> None:
        """Have every process write where it is while all are still there: a peer's end would move the others on."""
        waiting = list(self._members)
        for member in waiting:
            member.lines.send({"stacks": True})
        deadline = time.monotonic() + FAREWELL_S
        while waiting and time.monotonic() < deadline:
            for key, _ in self._selector.select(timeout=0.1):
                if key.fileobj is self._server:
                    continue
                messages = key.data.lines.receive()
                if messages is None:
                    self._drop(key.data)
                has_answered = messages is None or any("wrote" in message for message in messages)
                if has_answered and key.data in waiting:
                    waiting.remove(key.data)

    def _await_farewells(self, members: list[_Member]) -> None:
        deadline = time.monotonic() + FAREWELL_S
        while members and time.monotonic() < deadline:
            for key, _ in self._selector.select(timeout=0.1):
                if key.data in members and key.data.lines.receive() is None:
                    members.remove(key.data)
                    self._selector.unregister(key.fileobj)


def describe_end(culprit: _Member, stuck: bool, timeout_s: float) -> str:
    """Return the one message of a run that ends because of a process."""
    if stuck:
        return f"{culprit} has made no step for {timeout_s:.0f} s (DIST.TIMEOUT_S) after {culprit.position}; all stop"
    if culprit.failed:
        return f"{culprit} failed, see below, after {culprit.position}; the others stop"
    if culprit.silent > SILENCE:
        return f"{culprit} has been silent for {SILENCE} s after {culprit.position}; the others stop"
    return f"{culprit} died after {LAST_STEP}; the others stop"
