"""Number of images and duration of the training steps, over all starts of a run."""

import time
from typing import Any

# Fraction of the time spent waiting for data above which the loader limits training.
MAX_DATA_FRACTION = 0.1


class StepTiming:
    """Images and seconds of the training steps, over all starts of a run; a row covers the steps between two reads."""

    def __init__(self):
        self.images, self.seconds = 0, 0.0
        self._row_seconds = 0.0
        self._since: float | None = None

    @property
    def images_per_s(self) -> float | None:
        """Throughput of all processes over the rows so far; None before the first one."""
        return self.images / self.seconds if self.seconds else None

    def begin(self, now: float) -> None:
        """Start the clock at `now` (`time.perf_counter()`), before the first step of an epoch or of a start."""
        self._since = now

    def end_row(self, now: float, images: int, is_last: bool) -> float:
        """Add a row of `images` images and return its seconds; stop the clock after the last row of an epoch."""
        seconds = self._elapsed(now)
        self.images, self.seconds, self._row_seconds = self.images + images, self.seconds + seconds, 0.0
        self._since = None if is_last else now
        return seconds

    def _elapsed(self, now: float) -> float:
        """Return the seconds of the current row."""
        return self._row_seconds + (0.0 if self._since is None else now - self._since)

    def drop_row(self) -> None:
        """Discard the seconds since the last row."""
        self._row_seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint."""
        return {"images": self.images, "seconds": self.seconds, "row_seconds": self._elapsed(time.perf_counter())}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; a rollback keeps the totals, which include the discarded steps."""
        if content.get("seconds", 0.0) >= self.seconds:
            self.images, self.seconds = content.get("images", 0), content.get("seconds", 0.0)
        self._row_seconds, self._since = content.get("row_seconds", 0.0), None
