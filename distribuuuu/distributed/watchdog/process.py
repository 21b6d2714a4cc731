"""The watchdog's thread of a process: it sends the state of the process to the monitor on rank 0, and obeys it."""

import contextlib
import ipaddress
import json
import logging
import os
import selectors
import socket
import threading
import time
import uuid

import torch.distributed as torch_dist

from distribuuuu.distributed.stall_timer import LATE_S, PERIOD_S, StallTimer
from distribuuuu.distributed.watchdog.monitor import CAUSE_WAIT_S, EXIT_GRACE_S, Channel, Monitor, kill_here
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.ports import LOOPBACK
from distribuuuu.launch.signals import end_process

logger = logging.getLogger(__name__)


class Watchdog(threading.Thread):
    """Thread that ends this process when the monitor says so or rank 0 has died.

    `main` are the host and the process id of rank 0, which has the `monitor` too; `token` is the secret of the run.
    """

    def __init__(
        self, launch: Launch, timer: StallTimer, channel: Channel, token: str, main: tuple[str, int],
        monitor: Monitor | None = None,
    ):  # fmt: skip
        super().__init__(name="watchdog", daemon=True)
        self._timer, self._channel, self._main, self._monitor = timer, channel, main, monitor
        self._is_last = launch.rank + 1 == launch.world_size
        self._may_raise, self._is_over, self._has_failed = threading.Event(), threading.Event(), False
        self._heard_at_period = self._num_periods = 0
        timer.is_watched = self._is_watched
        channel.send(token=token, rank=launch.rank, host=socket.gethostname(), pid=os.getpid())

    def fail(self, status: int | None, is_consequence: bool) -> None:
        """Report an exception of this process; return when this process may print it; see `Peer` for the arguments."""
        self._has_failed = not is_consequence
        self._channel.send(failed=True, status=status, is_consequence=is_consequence, position=self._timer.position)
        self._may_raise.wait(CAUSE_WAIT_S + EXIT_GRACE_S + 5)

    def close(self) -> None:
        """Leave without ending the run."""
        self._is_over.set()  # first: the answer to the message is the end of the connection
        self._channel.send(left=True)
        if self._monitor:
            self._monitor.close()
        self._channel.close()

    def run(self) -> None:
        """Send the state once in a period and obey the monitor, until the run is over."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._channel, selectors.EVENT_READ)
                self._watch(selector)
        except Exception as error:  # a bug of the watchdog must not end a healthy run
            if not self._is_over.is_set():
                logger.warning("watchdog disabled on this process: %s", repr(error), exc_info=True)
                self._channel.send(left=True)
        self._may_raise.set()

    def _watch(self, selector: selectors.BaseSelector) -> None:
        next_period = 0.0
        while not self._is_over.is_set():
            if time.monotonic() > next_period:
                next_period, self._num_periods = time.monotonic() + PERIOD_S, self._num_periods + 1
                timer = self._timer
                self._channel.send(position=timer.position, marks=timer.num_marks, slow=timer.is_slow)
            if not selector.select(PERIOD_S):
                continue
            self._heard_at_period = self._num_periods
            for message in self._channel.receive():
                self._obey(**message)
            if (broken := self._channel.broken) and not self._is_over.is_set():
                if not self._has_failed:
                    if self._is_last:
                        text = "process 0 on %s %s after %s; the others stop"
                        logger.error(text, self._main[0], broken, self._timer.position)
                    end_process(1)
                return

    def _obey(
        self, write_stacks: bool = False, end: int | None = None, may_raise: bool = False, over: bool = False,
        kill: tuple[str, int] | None = None,
    ) -> None:  # fmt: skip
        """Follow an order of the monitor; an empty one says that rank 0 is alive."""
        if write_stacks:
            self._timer.write_stacks()
            self._channel.send(stacks=True)
        if kill:
            kill_here(*kill)
        if end is not None:
            end_process(end)
        if may_raise:
            self._may_raise.set()
        if over:
            self._is_over.set()

    def _is_watched(self) -> bool:
        """Tell whether rank 0 is heard, when this process has stalled; else name it, and kill it if it is here."""
        silent_s = (self._num_periods - self._heard_at_period) * PERIOD_S
        if silent_s < min(self._timer.limits) / 2 + LATE_S and not self._is_over.is_set():
            return True
        if not self._is_over.is_set():
            logger.error("process 0 on %s has been silent for %.0f s; all stop", self._main[0], silent_s)
            kill_here(*self._main)
        return False


def start_watchdog(launch: Launch, store: torch_dist.Store, timer: StallTimer, store_host: str) -> Watchdog | None:
    """Start the watchdog of this process, and its monitor on rank 0; None: it cannot connect to rank 0.

    Each process reads the place of the monitor from the store of this start, which is on the machine `store_host`.
    """
    host, monitor = socket.gethostname(), None
    store.set(f"watchdog host {launch.rank}", host)
    if launch.rank == 0:
        is_local = {*store.multi_get([f"watchdog host {rank}" for rank in range(launch.world_size)])} == {host.encode()}
        address, token = LOOPBACK if is_local else _find_own_address(store_host), uuid.uuid4().hex
        try:
            monitor = Monitor(token, launch.world_size, timer, is_local)
            store.set("watchdog", json.dumps([address, monitor.port, token, host, os.getpid()]))
            monitor.start()
        except OSError as error:
            logger.warning("watchdog disabled: rank 0 cannot listen: %s", error)
            store.set("watchdog", "null")
    if not (place := json.loads(store.get("watchdog"))):
        return None
    address, port, token, *main = place
    address = address or store_host
    try:
        channel = Channel(socket.create_connection((address, port), timeout=30))
    except OSError as error:  # e.g. a firewall that allows the ports of the backend only
        problem = f"cannot connect to {address}:{port}: {error}"
        logger.warning("watchdog: a crash of this process is detected only after DIST.TIMEOUT_S: %s", problem)
        return None
    watchdog = Watchdog(launch, timer, channel, token, tuple(main), monitor)
    watchdog.start()
    return watchdog


def _find_own_address(host: str) -> str:
    """Return the address from which this machine reaches a host; '' if it is the host itself, or there is no route."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # sends nothing
                address = probe.getsockname()[0]
                return "" if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address
    return ""
