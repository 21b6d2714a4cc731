"""Graceful stop on a signal or after CHECKPOINT.MAX_HOURS, after the same step on every process.

What happens on SIGTERM: `handled_by` of launch/signals.py passes it to this process's `SignalState`; the next `check`
on which the processes agree raises `RunStopped` on all of them; the trainer saves a checkpoint; the command exits with
the status of the signal. A second signal ends the process at once.
"""

import time
from typing import Any

from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.stall_timer import begin_slow_phase, mark_position
from distribuuuu.launch.signals import OUT_OF_TIME, RunStopped, SignalState, handled_by

# The processes exchange their stop requests about this often, and at least every so many calls: steps may turn slower.
AGREE_EVERY_S = 1.0
MAX_CALLS = 50
_NO_REASON = 0


class StopRequest:
    """A request of any process to stop; every process calls `check` equally often and stops at the same call.

    Args:
        max_hours: stop so many hours after the start of the process, or of a later run in it; 0: never.
    """

    def __init__(self, max_hours: float = 0.0):
        self._signals = SignalState.current.begin_run()
        self._deadline = self._signals.started + 3600 * max_hours if max_hours else float("inf")
        self._handling = handled_by(self._signals.receive)
        self._begun = {""}
        self.begin_phase()

    def __enter__(self) -> "StopRequest":
        self._handling.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handling.__exit__(*error)
        self._signals.started = time.monotonic()

    def begin_phase(self, name: str = "") -> None:
        """Exchange stop requests at the next call, because the calls of a new phase may be slower or faster.

        Args:
            name: if new in this start, the start-up timeout applies until the next call: it may include a compilation.
        """
        if name not in self._begun:
            self._begun.add(name)
            begin_slow_phase()
        self._agreed_at, self._calls, self._calls_to_wait = time.monotonic(), 0, 1

    def check(self, position: str) -> None:
        """Record the position for the watchdog, and stop if any process has a reason to.

        Processes communicate about once a second, at a call on which they agreed the time before; one stops at once.

        Raises:
            RunStopped: on every process, after the same call.
        """
        mark_position(position)
        self._calls += 1
        if self._calls < self._calls_to_wait and (self._signals.first is None or dist.is_distributed()):
            return
        now = time.monotonic()
        reason, call_s = dist.all_reduce_max([self._reason(now), (now - self._agreed_at) / self._calls])
        if reason != _NO_REASON:
            raise RunStopped(int(reason))
        self._agreed_at, self._calls = now, 0
        self._calls_to_wait = min(max(int(AGREE_EVERY_S / max(call_s, 1e-6)), 1), MAX_CALLS)

    def _reason(self, now: float) -> int:
        if self._signals.first is not None:
            return int(self._signals.first)
        return OUT_OF_TIME if now > self._deadline else _NO_REASON
