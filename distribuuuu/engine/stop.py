"""Stop a run in the middle, on a signal or after its hours: all processes after the same step."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.watchdog import begin_start_up, mark_position
from distribuuuu.launch.signals import OUT_OF_TIME, RunStopped, SignalState, handled_by

T = TypeVar("T")

# Seconds between two agreements of the processes, and the most calls: a run may turn slow in between.
AGREE_EVERY_S = 1.0
MOST_CALLS = 50
# What is wanted when no signal came.
_NOTHING = 0


class StopRequest:
    """Listens for signals and the clock; every process calls `check` equally often and leaves at the same call.

    Args:
        max_hours: stop after so many hours; 0: never.
    """

    def __init__(self, max_hours: float = 0.0):
        self._ends_at = time.monotonic() + 3600 * max_hours if max_hours else float("inf")
        self._signals = SignalState()
        self._handling = handled_by(self._signals.receive)
        self._begun = {""}
        self.begin_phase()

    def __enter__(self) -> "StopRequest":
        self._handling.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._handling.__exit__(*error)

    def begin_phase(self, name: str = "") -> None:
        """Agree at the next call: what follows may be slower or faster than what was before.

        Args:
            name: the first of a name in this start may compile something before its first call.
        """
        if name not in self._begun:
            self._begun.add(name)
            begin_start_up()
        self._agreed_at, self._calls, self._calls_to_wait = time.monotonic(), 0, 1

    def check(self, position: str) -> None:
        """Note the position reached, and leave if any process was asked to stop.

        The processes talk about once a second, at a call that they agreed upon the time before; nothing is waited for
        in between.

        Raises:
            RunStopped: on every process, after the same call.
        """
        mark_position(position)
        self._calls += 1
        if self._calls < self._calls_to_wait:
            return
        now = time.monotonic()
        wanted, pace_s = dist.all_reduce_max([self._wanted(now), (now - self._agreed_at) / self._calls])
        if wanted != _NOTHING:
            raise RunStopped(int(wanted))
        self._agreed_at, self._calls = now, 0
        calls = int(AGREE_EVERY_S / max(pace_s, 1e-6)) if dist.is_distributed() else 1
        self._calls_to_wait = min(max(calls, 1), MOST_CALLS)

    def checked(self, items: Iterable[T], max_num_batches: int, position: str) -> Iterator[T]:
        """Yield the items with a `check` after each, and as many more as make `max_num_batches` on every process."""
        self.begin_phase()
        done = 0
        for done, item in enumerate(items, 1):  # noqa: B007
            yield item
            self.check(f"{position}, batch {done}")
        for _ in range(done, max_num_batches):
            self.check(f"{position}, batch {done}")

    def _wanted(self, now: float) -> int:
        if self._signals.first is not None:
            return int(self._signals.first)
        return OUT_OF_TIME if now > self._ends_at else _NOTHING
