"""Write checkpoints in the background: training goes on with the next step while the one before is put on disk."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from distribuuuu.checkpoint.io import CheckpointError
from distribuuuu.distributed.fsdp import FullStateDict
from distribuuuu.launch.signals import WRITER_NAME

logger = logging.getLogger(__name__)

# Seconds between two tries to write what could not be written, and how long the last one of a run is tried.
RETRY_S = 5.0
LAST_TRIES_S = 10.0
# Seconds between two warnings about the same trouble.
WARN_EVERY_S = 30.0


def snapshot(value: Any) -> Any:
    """Return a copy of a nested content with every tensor on the CPU, which later steps do not change."""
    if isinstance(value, FullStateDict):
        return dict(value)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    return type(value)(snapshot(item) for item in value) if isinstance(value, (list, tuple)) else value


def find_nonfinite(value: Any, where: str = "") -> str | None:
    """Return the place of the first tensor that holds an infinity or a NaN, or None."""
    for place, tensor in _tensors(value, where):
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            return place
    return None


def _tensors(value: Any, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield where, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(item, f"{where}/{key}" if where else str(key))


class BackgroundWriter:
    """Does one job at a time on a thread. A job that the disk refuses is tried again until a newer one replaces it."""

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._trouble: Exception | None = None
        self._is_replaced = threading.Event()
        self._warned_at = float("-inf")
        self._fatal: BaseException | None = None

    def join_or_abandon(self) -> None:
        """Return when no job is at work: the last one is done, or given up because the disk refuses it."""
        self._finish_last(patience_s=0.0)

    def start(self, job: Callable[[], None], what: str) -> None:
        """Begin with a job, once the one before has settled."""
        self.join_or_abandon()
        self._is_replaced.clear()
        self._thread = threading.Thread(target=self._work, args=(job, what), name=WRITER_NAME)
        self._thread.start()

    def wait(self) -> None:
        """Return when the last job is done.

        Raises:
            CheckpointError: the disk has refused it for LAST_TRIES_S seconds.
        """
        trouble = self._finish_last(patience_s=LAST_TRIES_S)
        if trouble:
            raise CheckpointError(f"the last checkpoint could not be written: {trouble}")

    def _finish_last(self, patience_s: float) -> Exception | None:
        """Wait for the job at hand; if the disk refuses it, only for so long. Return what was wrong in the end."""
        thread = self._thread
        if thread is None:
            return None
        deadline = time.monotonic() + patience_s
        while thread.is_alive() and not (self._trouble and time.monotonic() > deadline):
            thread.join(0.02 if self._trouble else 0.1)
        self._is_replaced.set()
        thread.join()
        self._thread = None
        if self._fatal:
            raise self._fatal
        return self._trouble

    def _work(self, job: Callable[[], None], what: str) -> None:
        self._trouble = None
        while True:
            try:
                job()
                if self._trouble:
                    logger.info("%s is written after all", what)
                self._trouble = None
                return
            except OSError as error:
                self._warn(what, error)
                self._trouble = error
            except BaseException as error:  # a bug: raised again by the thread that trains
                self._fatal = error
                return
            if self._is_replaced.wait(RETRY_S):
                return

    def _warn(self, what: str, error: Exception) -> None:
        if time.monotonic() - self._warned_at < WARN_EVERY_S:
            return
        self._warned_at = time.monotonic()
        logger.warning("%s CANNOT BE WRITTEN, training goes on without it and tries again: %s", what, error)
