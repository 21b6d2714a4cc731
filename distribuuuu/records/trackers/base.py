"""The base class of trackers: a thread that sends what the run records, and cannot end the run."""

import importlib
import logging
import shlex
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from distribuuuu.files.untrusted import printable
from distribuuuu.records.metric_writers import TrackedRun
from distribuuuu.records.trackers.spool import MetricRow, Spool

logger = logging.getLogger(__name__)

# Seconds that the end of a run waits for its trackers, all together; seconds after a failure until the next attempt.
FLUSH_S, RETRY_S = 10.0, 30.0
# Seconds between two requests with rows: one costs about as much time of the interpreter with 50 rows as with one.
SEND_EVERY_S = 5.0
# Project of the runs if the environment names none.
PROJECT = "distribuuuu"
_MAX_ERROR = 200


class Tracker(ABC):
    """A tracker: a subclass sends to one service; each of its methods may block or raise any exception.

    The thread of the run only wakes the thread of the tracker, which reads the rows from metrics.jsonl and sends them
    at most once in `SEND_EVERY_S` seconds. The first failure is a warning; the next attempt follows after `RETRY_S`
    seconds. What is missing at the end stays in the spool.

    Args:
        run: the run.
    """

    # The name in TRACKERS, and the Python package that it needs.
    name, package = "", ""

    def __init__(self, run: TrackedRun):
        self.run = run
        self.spool = Spool(run, self.name)
        self.sent = {"row": 0, "image": 0, "file": 0}  # numbers of this process
        self._wake, self._ending = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._is_connected = self._has_warned = self._is_late = False
        self._deadline = 0.0

    # ------------------------------------------------------------------------------- what a subclass defines

    @abstractmethod
    def connect(self, run_id: str) -> str:
        """Continue the run of an identifier, or begin one if it is empty; return the identifier."""

    @abstractmethod
    def send_rows(self, rows: list[MetricRow]) -> None:
        """Send rows in the order of the steps."""

    @abstractmethod
    def send_image(self, path: Path, tag: str, step: int) -> None:
        """Send an image, a PNG file."""

    @abstractmethod
    def send_file(self, path: Path) -> None:
        """Send the config or the results, which replace those of the same name."""

    @abstractmethod
    def finish(self) -> None:
        """Flush and close the connection; `connect` may continue the run later."""

    def abandon(self) -> None:  # noqa: B027  # most packages need nothing
        """Keep the package from delaying the end of the process, since `finish` has not returned in time."""

    # ------------------------------------------------------------------------------- the thread of the run

    def rewind(self, step: int) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            try:  # not in the thread: a loader worker that is forked during an import could wait for it forever
                importlib.import_module(self.package or __name__)
            except Exception as error:
                self._warn(f"{type(error).__name__}: {error}")
            self._thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
            self._thread.start()
        self._wake.set()

    def row(self, record: dict[str, Any], step: int) -> None:
        """Wake the thread, which reads the record from metrics.jsonl."""
        self._wake.set()

    def image(self, tag: str, pixels: Any, step: int) -> None:
        """Write an image to the spool and wake the thread; one that cannot be written is lost."""
        try:
            array = (pixels * 255).clamp(0, 255).byte() if pixels.is_floating_point() else pixels
            self.spool.save_image(tag, array.cpu().numpy(), step)
        except Exception as error:  # of the disk or of Pillow: a tracker never ends a run
            self._warn(f"an image is lost: {error}")
        self._wake.set()

    def end(self) -> None:
        """Let the thread send what is missing, and the files of the run."""
        self._deadline = time.monotonic() + FLUSH_S
        self._ending.set()
        self._wake.set()

    def wait(self) -> None:
        """Wait for the thread until `FLUSH_S` seconds after `end`."""
        if self._thread:
            self._thread.join(max(0.0, self._deadline - time.monotonic()))
            self._is_late = self._thread.is_alive()
            self._thread = None
        if self._is_late:
            self.abandon()
            self._warn(f"not everything was sent within {FLUSH_S:.0f} s after the end")

    # ------------------------------------------------------------------------------- the thread of the tracker

    def _work(self) -> None:
        next_send = 0.0
        while True:
            self._wake.wait()
            self._ending.wait(max(0.0, next_send - time.monotonic()))
            self._wake.clear()
            next_send = time.monotonic() + SEND_EVERY_S
            is_last = self._ending.is_set()
            try:
                self.send_missing(with_files=is_last)
            except Exception as error:  # of any service: the run continues without it
                self._warn(f"{type(error).__name__}: {error}")
                if not is_last:
                    self._ending.wait(RETRY_S)
                    self._wake.set()
            if is_last:
                return

    def send_missing(self, with_files: bool = True) -> None:
        """Send the rows, the images and, at the end, the files that the tracker lacks; may raise any exception."""
        if not self._is_connected:
            self.spool.begin(self.connect(self.spool.run_id))
            self._is_connected = True
        try:
            while not self._is_late and (rows := self.spool.next_rows()):
                self.send_rows(rows)
                self.sent["row"] += len(rows)
                self.spool.note_rows()
        except BaseException:
            self.spool.forget_read()
            raise
        for path, tag, step in self.spool.next_images() if not self._is_late else ():
            self.send_image(path, tag, step)
            self.sent["image"] += 1
            self.spool.note_file(path)
        if with_files and not self._is_late:
            for path, digest in self.spool.next_files():
                self.send_file(path)
                self.sent["file"] += 1
                self.spool.note_file(path, digest)
            self.finish()
            self._is_connected = False

    def _warn(self, problem: str) -> None:
        """Log the first problem; the run has one warning of each tracker."""
        if not self._has_warned:
            self._has_warned = True
            text = printable(" ".join(problem.split()))[:_MAX_ERROR]
            fix = f"after the run, distribuuuu track {shlex.quote(str(self.run.out_dir))}"
            logger.warning("LOG.TRACKERS: %s: %s; the run is not affected, and OUT_DIR keeps what is missing; fix: %s",
                           self.name, text, fix)  # fmt: skip
