"""Watchdog client: ends this process within seconds after another process has died, failed or stalled.

Without it the others would wait in a collective until a time-out. Rank 0 runs the server (watchdog_server.py). Every
process, rank 0 included, holds one TCP connection to it and sends its position in a heartbeat. A broken connection is
a death; too long without progress is a stall. The server then tells every process how to exit: one logs the rank, the
host and the last position of the culprit, and a process that raised an exception prints it last. Imports no torch.
"""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from distribuuuu.config.run_files import STACKS
from distribuuuu.distributed.watchdog_server import (
    CAUSE_WAIT_S,
    EXIT_GRACE_S,
    HEARTBEAT_S,
    LAST_STEP,
    UNREACHABLE_S,
    JsonLines,
)
from distribuuuu.launch.signals import end_process, write_stacks

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Attempts to connect, one per heartbeat, before the process continues without the watchdog.
MAX_ATTEMPTS = 30


class WatchdogClient(threading.Thread):
    """Thread that reports this process's position and ends it when the server says so or has died.

    Args:
        rank: rank of this process.
        address: host and port of the server.
        token: authenticates the connection.
        report_dir: receives `stacks/rank_N.txt` on a time-out.
    """

    current: ClassVar["WatchdogClient | None"] = None

    def __init__(self, rank: int, address: tuple[str, int], token: str, report_dir: str | os.PathLike):
        super().__init__(name="watchdog client", daemon=True)
        self.rank = rank
        self._address, self._token = address, token
        self._stacks_file = Path(report_dir) / STACKS / f"rank_{rank}.txt"
        self._lines = self._connect()
        self._position, self._num_marks, self._is_starting = "its start", 0, True
        self._heartbeat_s, self._limit_s, self._server_host = HEARTBEAT_S, float("inf"), ""
        self._is_reporter = self._is_leaving = self._is_culprit = False
        self._may_raise = threading.Event()

    def mark(self, position: str) -> None:
        """Note progress, e.g. 'epoch 2, step 14'."""
        self._position, self._is_starting = position, False
        self._num_marks += 1

    def begin_start_up(self) -> None:
        """Apply the start-up time-out until the next mark, e.g. because a model is compiled."""
        self._is_starting = True
        self._num_marks += 1

    def fail(self, status: int | None, is_consequence: bool) -> None:
        """Report an exception of this process to the others; return when this process may print it.

        Args:
            status: exit status of all processes for a ConfigError, whose message is complete; None for other errors.
            is_consequence: the error may result from the end of another process, which is then reported instead.
        """
        self._is_culprit = not is_consequence
        failed = {"status": 1 if status is None else status, "known": status is not None, "consequence": is_consequence}
        self._lines.send({"failed": failed, "at": self._position})
        self._may_raise.wait(CAUSE_WAIT_S + EXIT_GRACE_S + 5)

    def close(self) -> None:
        """Leave without ending the run."""
        self._is_leaving = True
        self._lines.send({"leaves": True})
        with contextlib.suppress(OSError):
            self._lines.connection.shutdown(socket.SHUT_RDWR)
        self.join(EXIT_GRACE_S)
        self._lines.connection.close()

    def run(self) -> None:
        """Send heartbeats and handle messages until the run is over."""
        try:
            self._watch()
        except Exception as error:  # a bug of the watchdog must not end a healthy run
            logger.warning("watchdog disabled on this process: %s in its client", repr(error), exc_info=True)
            self._lines.send({"leaves": True})
        finally:
            self._may_raise.set()

    def _connect(self) -> JsonLines:
        connection = socket.create_connection(self._address, timeout=30)
        connection.sendall(self._token.encode() + b"\n")
        lines = JsonLines(connection)
        lines.send({"rank": self.rank, "host": socket.gethostname()})
        return lines

    def _watch(self) -> None:
        # Counted in heartbeats, not in seconds: a process that was suspended has not missed any.
        silent, stalled, num_marks, num_attempts = 0, 0, -1, 1
        while True:
            self._lines.send({"at": self._position, "marks": self._num_marks, "starting": self._is_starting})
            silent, stalled = silent + 1, (stalled + 1 if num_marks == self._num_marks else 0)
            num_marks, deadline = self._num_marks, time.monotonic() + self._heartbeat_s
            for messages in self._receive_until(deadline):
                if self._is_leaving or (messages and any("over" in message for message in messages)):
                    return
                silent = 0
                for message in messages or ():
                    self._handle(message)
                if messages is None and self._server_host:
                    lost = f"could not be reached for {UNREACHABLE_S} s" if self._lines.is_unreachable else "died"
                    self._end_without_server(lost)
                    return
                if messages is None:  # dropped before authentication, because of too many pending connections
                    time.sleep(self._heartbeat_s)
                    num_attempts += 1
                    if num_attempts > MAX_ATTEMPTS:
                        raise ConnectionError(f"rank 0 refused {MAX_ATTEMPTS} connections")
                    self._lines = self._connect()
                    break
            if min(silent, stalled) * self._heartbeat_s > self._limit_s + UNREACHABLE_S:
                self._write_stacks()
                self._end_without_server(f"has been silent for {silent * self._heartbeat_s:.0f} s")
                return

    def _receive_until(self, deadline: float) -> Iterator[list[dict[str, Any]] | None]:
        """Yield messages of the server until the deadline; None when the connection is broken."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._lines.connection, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                if selector.select(timeout=left):
                    yield self._lines.receive()

    def _handle(self, message: dict[str, Any]) -> None:
        if "end" in message:
            self._end(**message["end"])
        elif "stacks" in message:
            self._write_stacks()
            self._lines.send({"wrote": True})
        self._heartbeat_s = message.get("beat_s", self._heartbeat_s)
        self._limit_s = message.get("limit_s", self._limit_s)
        self._server_host = message.get("main", self._server_host)
        self._is_reporter = message.get("speaks", self._is_reporter)

    def _end_without_server(self, event: str) -> None:
        if self._is_culprit:
            self._may_raise.set()
            return
        message = f"process 0 on {self._server_host} {event} after {LAST_STEP}; the others stop"
        self._end(1, message, stacks=False, says=self._is_reporter)

    def _end(self, status: int, message: str | None, stacks: bool, says: bool, raises: bool = False) -> None:
        """Exit as the server demands; the parameters are the keys of its message."""
        if raises:
            self._may_raise.set()
            return
        if stacks:
            message = f"{message}; every process wrote its stacks to {self._stacks_file.parent}"
        if says and message:
            logger.error("%s", message.replace(LAST_STEP, self._position))
        end_process(status)

    def _write_stacks(self) -> None:
        write_stacks(self._stacks_file, f"process {self.rank}, after {self._position}")


def mark_position(position: str) -> None:
    """Report progress to the watchdog, e.g. 'epoch 2, step 14', which is logged if this process dies."""
    if WatchdogClient.current:
        WatchdogClient.current.mark(position)


def begin_start_up() -> None:
    """Apply DIST.STARTUP_TIMEOUT_S until the next position."""
    if WatchdogClient.current:
        WatchdogClient.current.begin_start_up()


def marked(items: Iterable[T], position: str) -> Iterator[T]:
    """Yield the items and report progress after each."""
    for number, item in enumerate(items, 1):
        yield item
        mark_position(f"{position}, batch {number}")
