"""Watchdog: ends this process within seconds after another process has died, failed or stalled.

Without it the others would wait in a collective until a time-out. Each process writes its state to the store of the
process group and reads the order of the monitor (watchdog_monitor.py), which runs on rank 0. One process logs the rank,
the host and the last position of the culprit; a process that raised an exception prints it last.
"""

import contextlib
import faulthandler
import json
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypeVar

import torch.distributed as torch_dist

from distribuuuu.config.run_files import STACKS
from distribuuuu.distributed.watchdog_monitor import (
    CAUSE_WAIT_S,
    EXIT_GRACE_S,
    LAST_STEP,
    UNREACHABLE_S,
    State,
    format_address,
    is_unreachable,
    keep_alive,
    period_s,
)
from distribuuuu.launch.detect import Launch, has_lost_launcher
from distribuuuu.launch.signals import end_process, write_stacks

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds after the time-out of a stall at which a process ends itself although its interpreter lock is held.
ALARM_S = 60.0


class Watchdog(threading.Thread):
    """Thread that reports the state of this process, and ends it when the monitor says so or rank 0 has died.

    Args:
        launch: rank and world size; without an address the store is that of torchrun, which may die, else of rank 0.
        store: a connection of its own to the store: an operation of another one may wait for a key for minutes.
        limits: seconds without progress after which this process counts as stalled, and while it is starting.
        report_dir: receives `stacks/rank_N.txt` on a time-out.
        address: from which this process reaches the machine of the store.
    """

    current: ClassVar["Watchdog | None"] = None

    def __init__(
        self,
        launch: Launch,
        store: torch_dist.Store,
        limits: tuple[float, float],
        report_dir: str | os.PathLike,
        address: str = "",
    ):
        super().__init__(name="watchdog", daemon=True)
        self.rank, self.world_size, self.state = launch.rank, launch.world_size, State(address=address)
        self.period_s = period_s(launch.world_size)
        self._store, self._is_hosted_by_launcher, self._limits = store, launch.address is None, limits
        self._stacks_file = Path(report_dir) / STACKS / f"rank_{self.rank}.txt"
        self._main_host, self._num_main_writes = "", 0
        self._connection: socket.socket | None = None
        self._wake, self._may_raise, self._is_over = threading.Event(), threading.Event(), threading.Event()
        self._is_culprit = self._is_leaving = False
        self._decided = threading.Lock()  # acquired once, by the thread that ends this process
        store.set(f"order {self.rank}", "{}")
        self.state.write(store, self.rank)

    def connect(self, main_host: str, address: str, port: int) -> None:
        """Connect to the monitor, on the machine of the name `main_host`."""
        self._main_host = main_host
        try:
            self._connection = socket.create_connection((address, port), timeout=30)
        except OSError as error:  # e.g. a firewall that allows the ports of the backend only
            problem = f"cannot connect to {address}:{port}: {error}"
            logger.warning("watchdog: the death of this process will be noticed after DIST.TIMEOUT_S: %s", problem)
            return
        keep_alive(self._connection)
        self.state.sender = format_address(self._connection.getsockname())

    def mark(self, position: str) -> None:
        """Note progress, e.g. 'epoch 2, step 14'."""
        self.state.position, self.state.is_starting = position, False
        self.state.num_marks += 1

    def begin_start_up(self) -> None:
        """Apply the start-up time-out until the next mark, e.g. because a model is compiled."""
        self.state.is_starting = True
        self.state.num_marks += 1

    def fail(self, status: int | None, is_consequence: bool) -> None:
        """Report an exception of this process to the others; return when this process may print it.

        Args:
            status: exit status of all processes for a ConfigError, whose message is complete; None for other errors.
            is_consequence: the error may result from the end of another process, which is then reported instead.
        """
        self._is_culprit = not is_consequence
        failure = {"status": 1 if status is None else status, "is_known": status is not None}
        self.state.failure = {**failure, "is_consequence": is_consequence}
        self._wake.set()
        self._may_raise.wait(CAUSE_WAIT_S + EXIT_GRACE_S + 5)

    def close(self) -> None:
        """Leave without ending the run."""
        self._is_leaving = True
        self._end_threads()
        self.join(EXIT_GRACE_S)
        if self._connection:
            self._connection.close()

    def run(self) -> None:
        """Watch rank 0 until the run is over, while another thread exchanges states and orders."""
        exchange = threading.Thread(target=self._guarded, args=(self._exchange,), name="watchdog store", daemon=True)
        exchange.start()
        self._guarded(self._watch)
        exchange.join(EXIT_GRACE_S)

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # a bug of the watchdog must not end a healthy run
            logger.warning("watchdog disabled on this process: %s", repr(error), exc_info=True)
            self._is_leaving = True
            self._leave()
            self._end_threads()

    def _end_threads(self) -> None:
        """End both threads."""
        self._is_over.set()
        self._may_raise.set()
        self._wake.set()
        if self._connection:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RD)  # wakes `_watch`; nothing is sent

    def _exchange(self) -> None:
        """Write the state and obey the order, once in a period."""
        while not self._is_over.is_set():
            if self._is_hosted_by_launcher and has_lost_launcher():  # and with it the store; a signal ends this process
                return
            try:
                self.state.write(self._store, self.rank)
                order, main_state = self._store.multi_get([f"order {self.rank}", "state 0"])
            except torch_dist.DistError:
                if not self._is_hosted_by_launcher and not self._is_leaving:
                    self._end_without_monitor("died")
                return
            self._num_main_writes = json.loads(main_state)["num_writes"]
            self._obey(**json.loads(order))
            if self.state.has_left:  # the store may end at any time
                return
            self._wake.wait(self.period_s / (4 if self.state.failure else 1))  # an order is near
            self._wake.clear()
        if self._is_leaving:
            self._leave()

    def _leave(self) -> None:
        """Tell the monitor that this process ends by itself."""
        self.state.has_left = True
        with contextlib.suppress(RuntimeError):
            self.state.write(self._store, self.rank)
            self._store.check(["state 0"])  # the reply comes after the state is stored

    def _watch(self) -> None:
        """Watch the connection to rank 0, and this process itself."""
        # Counted in periods, not in seconds: a process that was suspended has not missed any.
        num_silent = num_stalled = 0
        seen = (-1, -1)
        try:
            while not self._is_over.is_set():
                limit_s = self._limits[self.state.is_starting]
                # A timer in C, which needs no interpreter lock. It is the last resort, as the backend's own time-out.
                faulthandler.dump_traceback_later(limit_s + ALARM_S, exit=True, file=2)
                event = self._wait_for_break()
                if event and not self._is_over.is_set():
                    self._end_without_monitor(event)
                num_silent = num_silent + 1 if seen[0] == self._num_main_writes else 0
                num_stalled = num_stalled + 1 if seen[1] == self.state.num_marks else 0
                seen = (self._num_main_writes, self.state.num_marks)
                if min(num_silent, num_stalled) * self.period_s > limit_s + UNREACHABLE_S:
                    self._write_stacks()
                    self._end_without_monitor(f"has been silent for {num_silent * self.period_s:.0f} s")
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _wait_for_break(self) -> str:
        """Wait for a period, or until the connection to rank 0 breaks; return how, or ''."""
        if self._connection is None:
            self._is_over.wait(self.period_s)
            return ""
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            if not selector.select(self.period_s):
                return ""
        return f"could not be reached for {UNREACHABLE_S} s" if is_unreachable(self._connection) else "died"

    def _obey(self, stacks: bool = False, over: bool = False, end: dict | None = None) -> None:
        """Follow the order of the monitor; the parameters are its keys."""
        if stacks and not self.state.wrote_stacks:
            self._write_stacks()
            self.state.wrote_stacks = True
            self._wake.set()
        if over:
            self._end_threads()
        if end and end["culprit"] == self.rank:
            self._is_culprit = True
            if self.rank == 0:  # is the last one; others wait for its end
                self._end_threads()
            else:
                self._leave()
        elif end:
            message = end["message"]
            if end["stacks"]:
                message = f"{message}; every process wrote its stacks to {self._stacks_file.parent}"
            self._end(end["status"], message if end["reporter"] == self.rank else None)

    def _end_without_monitor(self, event: str) -> None:
        if self._is_culprit:
            self._end_threads()
        else:
            message = f"process 0 on {self._main_host} {event} after {LAST_STEP}; the others stop"
            self._end(1, message if self.rank == self.world_size - 1 else None)

    def _end(self, status: int, message: str | None) -> None:
        self._is_over.set()
        if not self._decided.acquire(blocking=False):
            return
        if message:
            logger.error("%s", message.replace(LAST_STEP, self.state.position))
        end_process(status)

    def _write_stacks(self) -> None:
        write_stacks(self._stacks_file, f"process {self.rank}, after {self.state.position}")


def mark_position(position: str) -> None:
    """Report progress to the watchdog, e.g. 'epoch 2, step 14', which is logged if this process dies."""
    if Watchdog.current:
        Watchdog.current.mark(position)


def begin_start_up() -> None:
    """Apply DIST.STARTUP_TIMEOUT_S until the next position."""
    if Watchdog.current:
        Watchdog.current.begin_start_up()
