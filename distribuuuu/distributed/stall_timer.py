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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist

from distribuuuu.distributed.comm import GroupState
from distribuuuu.launch.signals import end_process, write_stacks

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
# Periods between two readings of the states; a process whose state is the same in both has died or was stopped.
PERIODS_BETWEEN = 3
# Seconds for the store to answer: if process 0 was stopped, it never does.
ANSWER_S = 10.0
# The number of processes in a report.
MAX_NAMED = 10


@dataclass(frozen=True)
class ProcessState:
    """State of a process, as the others read it."""

    rank: int
    host: str
    position: str  # the last step, e.g. 'epoch 2, step 14'
    phase: str  # what it does since then, e.g. 'waiting for data'; '' if it computes
    stalled_s: float  # since the last step
    is_overdue: bool  # it has made no step for longer than it may
    has_failed: bool  # it has raised an error, which it prints
    time: float  # time.time() of the writing process


States = dict[int, ProcessState]  # by rank


class StallTimer(threading.Thread):
    """Thread that ends the process when no process of the run makes progress.

    Time is counted in periods, not in seconds: a process that was suspended has not missed any.

    Args:
        rank, world_size: the number of this process, and of all.
        limits: seconds without progress, and the same for slow phases: the first step, an evaluation.
        store: a connection to the store of the run that nothing else uses: a request on it may never be answered.
        stacks_file: the file for the stacks of all threads.
    """

    def __init__(self, rank: int, world_size: int, limits: tuple[float, float], store: Any, stacks_file: Path | None):
        super().__init__(name="stall timer", daemon=True)
        self.rank, self.world_size, self.limits = rank, world_size, limits
        self._store, self._stacks_file = store, stacks_file
        self._position, self._num_marks, self._num_stalled, self._limit_s = "its start", 0, 0, limits[1]
        self._has_failed, self._is_over, self._lock = False, threading.Event(), threading.Lock()

    def __enter__(self) -> "StallTimer":
        GroupState.stall_timer = self
        self.write_state()
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        GroupState.stall_timer = None
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

    def write_state(self) -> None:
        """Write the state of this process to the store; without an answer, so that it waits for nothing."""
        with self._lock, contextlib.suppress(torch_dist.DistError):  # process 0 has ended
            stalled_s = self._num_stalled * PERIOD_S
            values = (self.rank, socket.gethostname(), self._position, GroupState.phase, stalled_s,
                      stalled_s > self._limit_s, self._has_failed, time.time())  # fmt: skip
            self._store.set(f"state {self.rank}", json.dumps(values))

    def run(self) -> None:
        """Count, and write the state once in a period, until the run is over or has stalled."""
        seen, before = -1, States()
        while not self._is_over.wait(PERIOD_S):
            marks = self._num_marks
            self._num_stalled = self._num_stalled + 1 if seen == marks else 0
            seen, excess = marks, self._num_stalled - self._limit_s / PERIOD_S
            if 0 < excess <= 1:
                write_stacks(self._stacks_file, f"process {self.rank}, after {self._position}")
            self.write_state()
            if excess > 0 and int(excess) % PERIODS_BETWEEN == 0:
                states = self.read_states()
                self._judge(states, before)
                before = states

    def read_states(self) -> States:
        """Return the states of all processes by rank; none: the store does not answer, so process 0 is lost."""
        found: States = {}

        def read() -> None:
            with contextlib.suppress(torch_dist.DistError):
                keys = [f"state {rank}" for rank in range(self.world_size) if self._store.check([f"state {rank}"])]
                states = [ProcessState(*json.loads(text)) for text in self._store.multi_get(keys)]
                found.update({state.rank: state for state in states})

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(ANSWER_S)
        return dict(found)

    def _judge(self, states: States, before: States) -> None:
        """End the process if each other one is overdue or does not respond."""
        silent = find_silent(states, before)
        responding = [state for state in states.values() if state.rank not in silent]
        # Without an earlier reading, the next one shows who does not respond.
        if (states and not before) or not all(state.is_overdue for state in responding):
            return
        name = "DIST.TIMEOUT_S" if self._limit_s == self.limits[0] else "DIST.STARTUP_TIMEOUT_S"
        where = f"; stacks: {self._stacks_file.parent}" if self._stacks_file else ""
        where += "" if states else "; process 0, which hosts the store, does not respond; before:"
        if self.rank == min([state.rank for state in responding], default=min(self.rank, 1)):
            logger.error("no process has made a step for %.0f s (%s), all stop%s%s",
                         self._limit_s, name, where, _describe((states or before).values(), silent))  # fmt: skip
        time.sleep(PERIOD_S * (1 if self.rank else 1 + PERIODS_BETWEEN))  # the store is there until the others end
        end_process(1)

    def announce_failure(self) -> None:
        """Tell the others that this process ends with an error of its own."""
        self._has_failed = True
        self.write_state()

    def end_after_others(self, status: int) -> None:
        """End this process, whose communication has failed, if another one has ended, which one process reports.

        Returns if no other process has ended: then the error is a cause of its own.
        """
        before = states = self.read_states()
        if states and not any(state.has_failed for state in states.values()):
            time.sleep(PERIODS_BETWEEN * PERIOD_S)
            states = self.read_states()
        if not states:
            if self.rank == 1:
                logger.error("process 0 has ended after %s; the others stop", self._position)
            end_process(status)
        failed = [state for state in states.values() if state.has_failed]
        ended = failed or [states[rank] for rank in sorted(find_silent(states, before) - {self.rank})]
        if not ended:
            return
        if self.rank == min({*states} - {state.rank for state in ended}):
            event = "failed, see its error," if failed else "died"
            logger.error("process %d on %s %s after %s; the others stop",
                         ended[0].rank, ended[0].host, event, ended[0].position)  # fmt: skip
        end_process(status)


def find_silent(states: States, before: States) -> set[int]:
    """Return the ranks whose state is the same in two readings."""
    return {rank for rank, state in states.items() if rank in before and before[rank].time == state.time}


def _describe(states: Iterable[ProcessState], silent: set[int]) -> str:
    """Return a line for each state: those that do not respond first, then those that have made no step the longest."""
    text = ""
    for state in sorted(states, key=lambda state: (state.rank not in silent, -state.stalled_s, state.rank))[:MAX_NAMED]:
        is_silent, age_s = state.rank in silent, max(0.0, time.time() - state.time)
        seen = f"does not respond; last seen {age_s:.0f} s ago" if is_silent else f"no step for {state.stalled_s:.0f} s"
        place = f"after {state.position}" + (f", {state.phase}" if state.phase else "")
        text += f"\n  process {state.rank} on {state.host}: {seen} {place}"
    return text
