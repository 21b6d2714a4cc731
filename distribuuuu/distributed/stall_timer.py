"""Stall timer: ends a process whose run makes no progress, and reports where every process of the run is.

A thread of each process counts the seconds since the last step and writes its state to the store of the run once a
second. A process whose time is over reads the states of the others: as long as one of them makes progress, or does
something that has an end of its own, it is waited for.
"""

import contextlib
import json
import logging
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist

from distribuuuu.config import ConfigError
from distribuuuu.distributed.comm import GroupState, PeerError, is_communication_error
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.signals import SignalState, end_process, write_stacks

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
# Periods between two readings of the states; a process whose state is the same in both has died or was stopped.
PERIODS_BETWEEN = 3
# Seconds for the store to answer: if process 0 was stopped, it never does.
ANSWER_S = 10.0
# By rank, what each process writes of itself.
States = dict[int, dict[str, Any]]


class StallTimer(threading.Thread):
    """Thread that ends the process when no process of the run makes progress.

    Time is counted in periods, not in seconds: a process that was suspended has not missed any.

    Args:
        limits: seconds without progress, and the same for slow phases: the first step, an evaluation.
        store: a connection to the store of the run that nothing else uses: a request on it may never be answered.
    """

    def __init__(self, rank: int, world_size: int, limits: tuple[float, float], store: Any):
        super().__init__(name="stall timer", daemon=True)
        self.rank, self.world_size, self.limits, self._store = rank, world_size, limits, store
        self._position, self._limit_s, self._is_over = "its start", limits[1], threading.Event()
        self._num_marks = self._num_stalled = 0

    def __enter__(self) -> None:
        GroupState.stall_timer = self
        self._write_state()
        self.start()

    def __exit__(self, kind: Any = None, error: BaseException | None = None, trace: Any = None) -> None:
        """End the thread and, if its communication has failed because another process has ended, the process."""
        if isinstance(error, Exception) and not getattr(error, "on_all_processes", False):
            SignalState.current.is_ending = True
            if isinstance(error, PeerError) or is_communication_error(error):
                self.end_after_others(error.status if isinstance(error, ConfigError) else 1)
            self._write_state()  # with the last position, for those that find out who has ended
            if isinstance(error, ConfigError):
                error.one_process = True
        GroupState.stall_timer = None
        self._num_marks += 1
        self._is_over.set()

    def mark(self, position: str) -> None:
        """Record a step."""
        self._position = position
        self.begin_phase(self.limits[0])

    def begin_phase(self, limit_s: float) -> float:
        """Apply another limit until the next step, and return the one before."""
        before, self._limit_s = self._limit_s, limit_s
        self._num_marks += 1
        return before

    def run(self) -> None:
        """Count, and write the state once in a period, until the run is over or has stalled."""
        seen = -1
        while not self._is_over.wait(PERIOD_S):
            marks = self._num_marks
            self._num_stalled = self._num_stalled + 1 if seen == marks else 0
            seen, excess = marks, self._num_stalled - self._limit_s / PERIOD_S
            if 0 < excess <= 1:
                write_stacks(SignalState.current.stacks_file, f"process {self.rank}, after {self._position}")
            self._write_state()
            if excess > 0:
                self._end_if_all_stall()

    def _write_state(self) -> None:
        """Write the state of this process to the store; without an answer, so that it waits for nothing."""
        stalled_s, phase = self._num_stalled * PERIOD_S, GroupState.phase
        state = {
            "place": f"process {self.rank} on {socket.gethostname()}",
            "position": f"after {self._position}{phase and f', {phase}'}",
            "stalled_s": stalled_s,  # since the last step
            "is_overdue": stalled_s > self._limit_s,
            "time": time.time(),
        }
        with contextlib.suppress(torch_dist.DistError):  # process 0 has ended
            self._store.set(f"state {self.rank}", json.dumps(state))

    def _read_states(self) -> States:
        """Return the states of all processes by rank; none: the store does not answer, so process 0 is lost."""
        found: States = {}

        def read() -> None:
            with contextlib.suppress(torch_dist.DistError):
                ranks = [rank for rank in range(self.world_size) if self._store.check([f"state {rank}"])]
                texts = self._store.multi_get([f"state {rank}" for rank in ranks])
                found.update(zip(ranks, map(json.loads, texts), strict=True))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(ANSWER_S)
        return dict(found)

    def _read_twice(self) -> tuple[States, list[int]]:
        """Return the states of all processes, and the ranks of those that no longer write theirs."""
        before = self._read_states()
        for _ in range(PERIODS_BETWEEN if before else 0):
            time.sleep(PERIOD_S)
            self._write_state()
        states = self._read_states() if before else before
        return states, [rank for rank in states if rank in before and before[rank]["time"] == states[rank]["time"]]

    def _end_if_all_stall(self) -> None:
        """End the process if each other one is overdue or does not respond."""
        marks, (states, silent) = self._num_marks, self._read_twice()
        responding = [rank for rank in states if rank not in silent]
        if marks != self._num_marks or not all(states[rank]["is_overdue"] for rank in responding):
            return
        name = "DIST.TIMEOUT_S" if self._limit_s == self.limits[0] else "DIST.STARTUP_TIMEOUT_S"
        text = f"no process has made a step for {self._limit_s:.0f} s ({name}), all stop"
        text += f"; stacks: {file.parent}" if (file := SignalState.current.stacks_file) else ""
        text += "" if states else "; process 0, which hosts the store, does not respond"
        for rank in sorted(states, key=lambda rank: (rank not in silent, -states[rank]["stalled_s"]))[:10]:
            state, seen = states[rank], f"no step for {states[rank]['stalled_s']:.0f} s"
            if rank in silent:
                seen = f"does not respond; last seen {max(0.0, time.time() - state['time']):.0f} s ago"
            text += f"\n  {state['place']}: {seen} {state['position']}"
        if self.rank == min(responding, default=min(self.rank, 1)):
            logger.error("%s", text)
        time.sleep(PERIOD_S * (1 if self.rank else 1 + PERIODS_BETWEEN))  # the store is there until the others end
        end_process(1)

    def end_after_others(self, status: int) -> None:
        """End this process, whose communication has failed, if another one has ended: else it failed by itself."""
        states, silent = self._read_twice()
        gone = sorted({*silent} - {self.rank}, key=lambda rank: states[rank]["time"])  # others end for the first one
        ended = [f"{states[rank]['place']} died {states[rank]['position']}" for rank in gone]
        ended += [] if states else [f"process 0 died after {self._position}"]
        if ended and self.rank == min({*states} - {*silent}, default=1):
            logger.error("%s; the others stop", ended[0])
        if ended:
            end_process(status)


def open_timer(launch: Launch, store: torch_dist.PrefixStore, limits: tuple[float, float]) -> StallTimer:
    """Return the stall timer of a group, with a connection to the store of its own."""
    host, port = store.underlying_store.host, store.underlying_store.port  # type: ignore[attr-defined]  # a TCPStore
    connection = torch_dist.TCPStore(host, port, None, False, timedelta(seconds=ANSWER_S), False)
    states = torch_dist.PrefixStore(f"states of {launch.run_id}", connection)
    return StallTimer(launch.rank, launch.world_size, limits, states)
