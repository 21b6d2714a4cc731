"""Images and seconds of the training steps, over all starts of a run."""

import time

# Share of the time that may be spent waiting for data before the loader is what limits training.
MOST_WAIT = 0.1


class StepTiming:
    """Images and seconds of the training steps, over all starts of the run; a row is what is between two reads."""

    def __init__(self):
        self.images, self.seconds = 0, 0.0
        self._row_seconds, self._since = 0.0, None

    @property
    def images_per_s(self) -> float | None:
        """The speed of the rows read so far, of all processes; None before the first one."""
        return self.images / self.seconds if self.seconds else None

    def begin(self, now: float) -> None:
        """Start the clock, `time.perf_counter()`, before the first step of an epoch or of a start."""
        self._since = now

    def end_row(self, now: float, images: int, is_last: bool) -> float:
        """Add a row of so many images and return its seconds; stop the clock if it is the epoch's last one."""
        seconds = self._running_seconds(now)
        self.images, self.seconds, self._row_seconds = self.images + images, self.seconds + seconds, 0.0
        self._since = None if is_last else now
        return seconds

    def _running_seconds(self, now: float) -> float:
        return self._row_seconds + (0.0 if self._since is None else now - self._since)

    def drop_row(self) -> None:
        """Forget the seconds since the last row."""
        self._row_seconds = 0.0

    def state_dict(self) -> dict[str, float]:
        """Return what a later start goes on from."""
        return {
            "images": self.images,
            "seconds": self.seconds,
            "row_seconds": self._running_seconds(time.perf_counter()),
        }

    def load_state_dict(self, content: dict[str, float]) -> None:
        """Go on from an earlier start; a rollback does not take back what was timed."""
        if content.get("seconds", 0.0) >= self.seconds:
            self.images, self.seconds = content.get("images", 0), content.get("seconds", 0.0)
        self._row_seconds, self._since = content.get("row_seconds", 0.0), None
