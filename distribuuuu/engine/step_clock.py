"""Times of the parts of training steps, without waiting for the device."""

import itertools
import time
from typing import Any

import torch


class StepClock:
    """The seconds of the parts of steps: on CUDA by events that the device records, else by the host's clock."""

    def __init__(self, device_type: str):
        self._now = record_event if device_type == "cuda" else time.perf_counter
        self._marks: list[tuple[str, Any]] = []

    def mark(self, part: str = "") -> None:
        """End a part, which began with the mark before; the time before a mark without a name counts for no part."""
        self._marks.append((part, self._now()))

    def pop(self) -> dict[str, float]:
        """Return the seconds of each part since the last call; on CUDA, the device must have done all of it."""
        marks, self._marks = self._marks, []
        spent: dict[str, float] = {}
        for (_, first), (part, last) in itertools.pairwise(marks):
            spent[part] = spent.get(part, 0.0) + seconds_between(first, last)
        spent.pop("", None)
        return spent


def record_event() -> Any:
    """Return an event that the device records after all queued work."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Any, last: Any) -> float:
    """Return the seconds between two marks that are over."""
    return last - first if isinstance(first, float) else 1e-3 * first.elapsed_time(last)
