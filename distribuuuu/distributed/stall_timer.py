"""Stall timer: ends this process when it makes no progress, with its stacks on disk.

The package `watchdog`, if it is there, ends all processes together and names the one that stalled. Without it, or when
it cannot reach rank 0, each process ends by its own timer.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distribuuuu.distributed.comm import GroupState
from distribuuuu.launch.signals import end_process, write_stacks

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
# Seconds after the time-out that the watchdog has to end all processes together.
LATE_S = 15.0


class StallTimer(threading.Thread):
    """Thread that ends the process after a time without `mark`.

    Time is counted in periods, not in seconds: a process that was suspended has not missed any.

    Args:
        limits: seconds without progress, and the same for slow phases: the first step, an evaluation, a save.
        stacks_file: the file for the stacks of all threads.

    Attributes:
        position: the last step, e.g. 'epoch 2, step 14'.
        num_marks: grows with each step.
        is_slow: the limit of slow phases applies.
        is_watched: tells whether the watchdog decides instead.
    """

    def __init__(self, rank: int, limits: tuple[float, float], stacks_file: Path | None):
        super().__init__(name="stall timer", daemon=True)
        self.rank, self.limits = rank, limits
        self.position, self.num_marks, self.is_slow = "its start", 0, True
        self.is_watched: Callable[[], bool] = lambda: False
        self._stacks_file = stacks_file
        self._is_over = threading.Event()

    def __enter__(self) -> "StallTimer":
        GroupState.stall_timer = self
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        GroupState.stall_timer = None
        self._is_over.set()

    def mark(self, position: str) -> None:
        self.position, self.is_slow = position, False
        self.num_marks += 1

    def write_stacks(self) -> None:
        write_stacks(self._stacks_file, f"process {self.rank}, after {self.position}")

    def run(self) -> None:
        num_stalled, seen = 0, -1
        while not self._is_over.wait(PERIOD_S):
            num_stalled = num_stalled + 1 if seen == self.num_marks else 0
            seen, limit_s = self.num_marks, self.limits[self.is_slow]
            if num_stalled * PERIOD_S > limit_s + LATE_S and not self.is_watched():
                self.write_stacks()
                logger.error("process %d has made no step for %.0f s after %s and ends; stacks: %s",
                             self.rank, limit_s, self.position, self._stacks_file)  # fmt: skip
                end_process(1)
