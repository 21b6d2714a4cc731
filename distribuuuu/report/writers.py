"""What a run writes besides checkpoints: metrics.jsonl and TensorBoard events. A full disk does not stop the run."""

import functools
import json
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distribuuuu.config.atomic_file import replacing
from distribuuuu.config.errors import counted

logger = logging.getLogger(__name__)

# Seconds between two tries to write events.
RETRY_S = 60.0


class RecordFile:
    """Lines of JSON. Those that the disk refuses are kept and written with the next one.

    Args:
        path: the file; made anew, with its folder, if it vanishes.
    """

    def __init__(self, path: Path):
        self.path = path
        self._unwritten: list[str] = []

    def append(self, record: dict[str, Any]) -> None:
        """Add a record as a line."""
        self._unwritten.append(json.dumps(record) + "\n")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write("".join(self._unwritten).encode())
        except OSError as error:
            if len(self._unwritten) == 1:
                logger.warning("%s CANNOT BE WRITTEN, its lines are kept until it can: %s", self.path, error)
            return
        self._unwritten.clear()

    def _write(self, data: bytes) -> None:
        """Append all of the data or, on a full disk, nothing."""
        with open(self.path, "ab", buffering=0) as file:
            before = file.tell()
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(before)
                raise


class EventFile:
    """TensorBoard events. When they cannot be written they are lost, with a warning; later ones go to a new file.

    Args:
        folder: where the events go.
        purge_step: events from this step on, of an earlier start, are not shown.
    """

    def __init__(self, folder: Path, purge_step: int):
        self.folder = folder
        self._writer: Any = None
        self._retry_at = 0.0
        threading.excepthook = functools.partial(_pass_over_tensorboard, threading.excepthook)
        self._call(None, purge_step=purge_step)

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Add a point to a curve."""
        self._call("add_scalar", tag, value, step)

    def image(self, tag: str, pixels: Any, step: int) -> None:
        """Add an image, uint8 (3, H, W)."""
        self._call("add_image", tag, pixels, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer:
            self._call("close")

    def _call(self, method: str | None, *arguments: Any, purge_step: int | None = None) -> None:
        if self._writer is None and time.monotonic() < self._retry_at:
            return
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(self.folder, purge_step=purge_step)
            if method:
                getattr(self._writer, method)(*arguments)
        except OSError as error:
            logger.warning("TensorBoard events CANNOT BE WRITTEN, those of a minute are lost: %s", error)
            self._writer, self._retry_at = None, time.monotonic() + RETRY_S


def _pass_over_tensorboard(before: Callable, problem: threading.ExceptHookArgs) -> None:
    """Print what a thread died of; TensorBoard's thread tells it to the next call as well."""
    if not type(problem.thread).__module__.startswith("tensorboard"):
        before(problem)


def drop_records_after(path: Path, epoch: int, step: int) -> None:
    """Keep the records of metrics.jsonl up to a position (finished epochs, steps since); drop unreadable lines."""
    try:
        content = path.read_bytes() if path.exists() else b""
        places = {line: _place_of(line) for line in content.splitlines()}
        if num_lost := sum(place is None for place in places.values()):
            logger.warning("%s: %s removed, which cannot be read", path, counted(num_lost, "line"))
        kept = [line + b"\n" for line in content.splitlines() if places[line] and places[line] <= (epoch, step)]
        if b"".join(kept) != content:
            with replacing(path) as file:
                file.writelines(kept)
    except OSError as error:
        logger.warning("%s CANNOT BE WRITTEN, it keeps the records of steps that are done again: %s", path, error)


def _place_of(line: bytes) -> tuple[int, float] | None:
    """Return (finished epochs, steps since) of a record, an evaluation after all steps; None: it is no record."""
    try:
        record = json.loads(line)
        epoch, step, is_eval = record["epoch"], record["step"], record["kind"].startswith("eval")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return (epoch - 1, math.inf if is_eval else step) if type(epoch) is int and type(step) is int else None
