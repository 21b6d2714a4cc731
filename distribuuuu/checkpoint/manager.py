"""Checkpoint manager: best weights, saving in the background, finding the newest valid one, removal."""

import contextlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch

from distribuuuu.checkpoint.io import CheckpointError, read_checkpoint, write_atomically
from distribuuuu.checkpoint.load import check_resumable
from distribuuuu.config import run_files
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.fsdp import FullStateDict
from distribuuuu.launch.host import copy_to_host
from distribuuuu.launch.signals import WRITER_NAME

logger = logging.getLogger(__name__)

# Seconds between two attempts to write a checkpoint, and seconds of attempts for the last one of a run.
RETRY_S = 5.0
LAST_RETRIES_S = 10.0
# The writer waits at its start: the training thread waits for it there, and would then wait for the interpreter's lock.
YIELD_S = 1e-3
# Seconds between two warnings about failed attempts.
WARN_EVERY_S = 30.0

# Returns why this run must not write to OUT_DIR any more; None if it may.
FindLoss = Callable[[], str | None]

_NAME = re.compile(r"ckpt_ep_(\d+)(?:_step_(\d+))?\.pth\.tar")


class OutDirLost(CheckpointError):
    """OUT_DIR is no longer this run's; raised on the main process, whose watchdog ends the others."""


@dataclass
class Best:
    """The best evaluation so far: the value of the first metric, and the epoch, from 0.

    The epoch is -1 before the first evaluation, and in checkpoints of the 2021 distribuuuu, which did not record it.
    """

    value: float = 0.0
    epoch: int = -1

    def __str__(self) -> str:
        return f"{self.value:.2f} (epoch {self.epoch + 1 if self.epoch >= 0 else 'unknown'})"

    def update(self, value: float, epoch: int, higher_is_better: bool = True) -> bool:
        """Record an evaluation if it is the best; return whether it is."""
        is_unset = math.isnan(self.value) or (self.value == 0 and (higher_is_better or self.epoch < 0))
        is_best = is_unset or (value > self.value if higher_is_better else value < self.value)
        if is_best:
            self.value, self.epoch = value, epoch
        return is_best


class TrainingState(Protocol):
    """Training state to save: its position, and its content as a dict."""

    epoch: int
    step: int
    evaluated_at: tuple[int, int] | None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint; every process must call it."""


class CheckpointManager:
    """Checkpoints and best weights of a run. Only the main process writes, in the background.

    Args:
        out_dir: the folder of the run.
        keep_last: number of newest checkpoints of this run to keep; files of other runs always stay.
        keep_every: also keep those of every Kth epoch; 0: none.
        every_steps: maximum steps of an epoch that may be lost; 0: all of them.
        find_loss: called on the main process before each write.
    """

    def __init__(
        self,
        out_dir: str | os.PathLike,
        keep_last: int = 3,
        keep_every: int = 0,
        every_steps: int = 0,
        find_loss: FindLoss = lambda: None,
    ):
        self._find_loss = find_loss
        self._lost: OutDirLost | None = None
        self.folder = Path(out_dir) / run_files.CHECKPOINTS
        self.bests = {kind: Path(out_dir) / name for kind, name in run_files.BESTS.items()}
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.every_steps = every_steps
        self._writer = BackgroundWriter()
        self._nonfinite: str | None = None
        # Kept beyond their own save, which may fail and be replaced by a later one.
        self._unwritten_bests: dict[str, dict[str, Any]] = {}
        # The path that is being written, and whether its write may be abandoned.
        self._writing: Path | None = None
        self._is_superseded = threading.Event()
        # Names of the files that this run wrote, over all its starts: each checkpoint holds them as `checkpoints`.
        self._own: set[str] = set()
        self._not_removable: set[str] = set()
        self._has_removed = False

    def is_due(self, step: int) -> bool:
        """Tell whether to save after `step` steps of an epoch: at each multiple of `every_steps` and halfway between.

        While a checkpoint is being written, the one before is thus at most `every_steps` steps old.
        """
        every = self.every_steps
        return every > 0 and step % every in (0, every // 2)

    def save(self, state: TrainingState, new_bests: Sequence[str] = ()) -> Path:
        """Save the state and wait until it is on disk; see `save_in_background` and `finish`."""
        path = self.save_in_background(state, new_bests)
        self.finish()
        return path

    def save_in_background(
        self, state: TrainingState, new_bests: Sequence[str] = (), first: Callable[[], None] = lambda: None
    ) -> Path:
        """Copy the state, write it while training continues, then remove old checkpoints; return the file.

        Every process must call it. It waits for the previous save, except that a save after an evaluation abandons
        the one before that evaluation. A failed write is retried. A state that is not finite is not written.

        Args:
            state: the training state.
            new_bests: the kinds of its weights, "raw" and "ema", that are the best so far.
            first: called in the background on the main process, before the state is written.

        Raises:
            OutDirLost: OUT_DIR belongs to another run, or was replaced; the state is in a new folder beside it.
        """
        path = self.folder / checkpoint_name(state.epoch, state.step)
        content = state.to_dict()
        before = self.folder / checkpoint_name(*state.evaluated_at) if state.evaluated_at and not state.step else None
        if dist.is_main():
            content = snapshot(content)
            if before and before == self._writing:
                self._is_superseded.set()
            self._writer.join_or_abandon()
            if self._lost:
                raise self._lost
            self._is_superseded.clear()
            self._writing = path
            self._unwritten_bests |= {kind: weights_of(content, kind) for kind in new_bests}
            self._own &= {path.name for path in self.list()}
            content["checkpoints"] = sorted(self._own | {path.name})
            if loss := self._find_loss():
                raise self._save_elsewhere(path, content, loss)
            self._writer.start(lambda: self._write(path, content, before, first), f"checkpoint {path.name}")
        return path

    def wait(self) -> None:
        """Return on every process when the last save is on disk.

        Raises:
            CheckpointError: it cannot be written.
        """
        problem = None
        if dist.is_main():
            try:
                self._writer.wait()
                if self._lost:
                    raise self._lost
            except OutDirLost:
                raise
            except CheckpointError as error:
                problem = f"{error}; the newest one is {next(reversed(self.list()), 'none')}"
        if problem := dist.broadcast_object(problem):
            raise CheckpointError(problem)

    def finish(self) -> None:
        """Return on every process when the last save of the run is on disk.

        Raises:
            CheckpointError: it cannot be written, or was not because the weights are not finite.
        """
        self.wait()
        if problem := dist.broadcast_object(self._nonfinite):
            raise CheckpointError(problem)

    def join_or_abandon(self) -> None:
        """Return when the last save is on disk or its write has failed; unlike `wait`, on one process alone."""
        self._writer.join_or_abandon()

    def _save_elsewhere(self, path: Path, content: dict[str, Any], loss: str) -> OutDirLost:
        """Write a checkpoint and unwritten best weights to a new folder beside OUT_DIR; return the error to raise."""
        out_dir = self.folder.parent
        folder = next(new for number in range(1, 10**6) if not (new := Path(f"{out_dir}.{number}")).exists())
        saved = f"its checkpoint is {folder / self.folder.name / path.name}; fix: resume it with OUT_DIR {folder}"
        try:
            if name := find_nonfinite({key: value for key, value in content.items() if key != "meter"}):
                saved = f"its weights are not finite (first {name}) and were not saved"
            else:
                (folder / self.folder.name).mkdir(parents=True)
                for kind, weights in self._unwritten_bests.items():
                    write_atomically(folder / self.bests[kind].name, weights)
                write_atomically(folder / self.folder.name / path.name, content)
        except OSError as error:
            saved = f"{path.name} cannot be saved to {folder} either: {error.strerror or error}"
        return OutDirLost(f"{loss}; this training stops, and writes no more to it; {saved}")

    def _write(self, path: Path, content: dict[str, Any], superseded: Path | None, first: Callable[[], None]) -> None:
        if loss := self._find_loss():  # since this write was requested, or since its last attempt
            self._lost = self._save_elsewhere(path, content, loss)
            return
        first()
        weights = {key: value for key, value in content.items() if key != "meter"}  # a loss is checked by the task
        if name := find_nonfinite(weights):
            self._unwritten_bests = {}
            self._nonfinite = f"the weights are not finite (first {name}): {path.name} was not written"
            logger.error("%s", self._nonfinite)
            return
        self._nonfinite = None
        self.folder.mkdir(parents=True, exist_ok=True)
        for kind in list(self._unwritten_bests):  # first: a run killed in between repeats the epoch and writes the same
            write_atomically(self.bests[kind], self._unwritten_bests[kind])
            del self._unwritten_bests[kind]
        if not write_atomically(path, content, self._is_superseded.is_set):
            return
        if superseded:
            with contextlib.suppress(OSError):
                superseded.unlink()
        self._own.add(path.name)
        self._remove_old(path)

    def _remove_old(self, newest: Path) -> None:
        own = [path for path in self.list() if path.name in self._own]
        for path in own:
            epoch, step = position_of(path)
            is_kth = self.keep_every > 0 and step == 0 and epoch % self.keep_every == 0
            if path not in (*own[-self.keep_last :], newest) and not is_kth:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        if not self._has_removed:
            logger.info("CHECKPOINT.KEEP_LAST %d, KEEP_EVERY %d: older checkpoints of this run are removed, first %s; "
                        "files of other runs stay", self.keep_last, self.keep_every, path.name)  # fmt: skip
        self._has_removed = True
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            if path.name not in self._not_removable:
                logger.warning("%s: cannot be removed: %s; fix: remove it by hand", path, error.strerror or error)
            self._not_removable.add(path.name)

    def find_latest(self) -> Path | None:
        """Return the newest valid checkpoint on every process; invalid ones are renamed to *.broken, with a warning."""
        return dist.broadcast_object(self._find_latest() if dist.is_main() else None)

    def _find_latest(self) -> Path | None:
        for path in reversed(self.list()):
            try:
                content = read_checkpoint(path)
                check_resumable(content, path)
                self._own |= {*content.get("checkpoints", ())}
                return path
            except CheckpointError as error:
                logger.warning("skipped an invalid checkpoint: %s", error)
                with contextlib.suppress(OSError):  # e.g. a read-only folder
                    os.replace(path, f"{path}.broken")
        return None

    def remove_temporary_files(self) -> None:
        """Remove the temporary files of a killed run; call it only while this one holds the lock on OUT_DIR."""
        if dist.is_main():
            own = (".best*.pth.tar.*tmp", ".metrics.jsonl.*.tmp", ".results.json.*.tmp")
            for path in [*self.folder.glob(".*.tmp"), *chain.from_iterable(map(self.folder.parent.glob, own))]:
                with contextlib.suppress(OSError):
                    path.unlink()

    def archive(self, names: Sequence[str] = ()) -> Path | None:
        """Move checkpoints and best weights of an older run to checkpoints.N, for a new run in the same OUT_DIR.

        Args:
            names: other files of OUT_DIR to move.
        """
        if not dist.is_main() or not self.list():
            return None
        numbered = (Path(f"{self.folder}.{number}") for number in range(1, 10**6))
        archived = next(path for path in numbered if not path.exists())
        os.replace(self.folder, archived)
        for path in (*self.bests.values(), *(self.folder.parent / name for name in names)):
            if path.exists():
                os.replace(path, archived / path.name)
        return archived

    def list(self) -> list[Path]:
        """Return the checkpoints ordered by epoch and step as numbers: 1000 is after 999."""
        if not self.folder.is_dir():
            return []
        return sorted((path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)), key=position_of)


def weights_of(content: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the content of a file of best weights, "raw" or "ema", which cannot be resumed."""
    left_out = ("optimizer", "step", "seconds", "timing", "peak_memory_mib", "meter", "scaler", "ema_state_dict")
    weights = {key: value for key, value in content.items() if key not in left_out}
    return {**weights, "weights": kind, "state_dict": content["ema_state_dict" if kind == "ema" else "state_dict"]}


def checkpoint_name(epoch: int, step: int) -> str:
    """Return the file name of a checkpoint after `epoch` epochs and `step` steps."""
    return f"ckpt_ep_{epoch:03d}_step_{step:06d}.pth.tar" if step else f"ckpt_ep_{epoch:03d}.pth.tar"


def position_of(path: Path) -> tuple[int, int]:
    """Return (epochs, steps) of a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1]), int(match[2] or 0)


def snapshot(value: Any) -> Any:
    """Return a copy of nested content with every tensor on the CPU, unaffected by later steps.

    Tensors of a GPU are copied together, and the host waits for them once.
    """
    tensors = [tensor for _, tensor in _iter_tensors(value, "") if tensor.is_cuda]
    copies = map(with_own_storage, copy_to_host(tensors)()) if tensors else ()
    return _copy(value, dict(zip(map(id, tensors), copies, strict=True)))


def _copy(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return a copy of nested content; `copies` are those of some tensors, by their `id`."""
    if isinstance(value, FullStateDict):
        return dict(value)
    if isinstance(value, torch.Tensor):
        return copies[id(value)] if id(value) in copies else value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy(item, copies) for key, item in value.items()}
    return type(value)(_copy(item, copies) for item in value) if isinstance(value, (list, tuple)) else value


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor in the same memory, whose storage is only that: torch saves storages, not tensors."""
    start, size = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()[start : start + size]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


def find_nonfinite(value: Any, name: str = "") -> str | None:
    """Return the path, e.g. 'state_dict/fc.weight', of the first tensor with an infinity or a NaN, or None."""
    for path, tensor in _iter_tensors(value, name):
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            return path
    return None


def _iter_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _iter_tensors(item, f"{name}/{key}" if name else str(key))


class BackgroundWriter:
    """Thread that runs one job at a time. A job that fails with OSError is retried until a newer one replaces it.

    It keeps the text of an error: the error's traceback would keep the content of the checkpoint.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._write_error: str | None = None
        self._is_replaced = threading.Event()
        self._warned_at = float("-inf")
        self._bug: BaseException | None = None

    def start(self, job: Callable[[], None], name: str) -> None:
        """Start a job after the previous one has ended; `name` is used in log lines."""
        self.join_or_abandon()
        self._is_replaced.clear()
        self._thread = threading.Thread(target=self._work, args=(job, name), name=WRITER_NAME)
        self._thread.start()

    def join_or_abandon(self) -> None:
        """Return when the last job is done, or abandon it if its write has failed."""
        self._join(retries_s=0.0)

    def wait(self) -> None:
        """Return when the last job is done.

        Raises:
            CheckpointError: its writes failed for LAST_RETRIES_S seconds.
        """
        if error := self._join(retries_s=LAST_RETRIES_S):
            raise CheckpointError(f"the last checkpoint could not be written: {error}")

    def _join(self, retries_s: float) -> str | None:
        """Wait for the last job, with retries for a limited time; return the error of the last attempt."""
        thread = self._thread
        if thread is None:
            return None
        deadline = time.monotonic() + retries_s
        while thread.is_alive() and not (self._write_error and time.monotonic() > deadline):
            thread.join(0.02 if self._write_error else 0.1)
        self._is_replaced.set()
        thread.join()
        self._thread = None
        if self._bug:
            bug, self._bug = self._bug, None
            raise bug
        return self._write_error

    def _work(self, job: Callable[[], None], name: str) -> None:
        self._write_error = None
        time.sleep(YIELD_S)
        while True:
            try:
                job()
                if self._write_error:
                    logger.info("%s saved after retrying", name)
                self._write_error = None
                return
            except OSError as error:
                if time.monotonic() - self._warned_at >= WARN_EVERY_S:
                    self._warned_at = time.monotonic()
                    logger.warning("%s CANNOT BE WRITTEN: %s; training continues, and it is retried", name, str(error))
                self._write_error = str(error)
            except BaseException as error:  # a bug: raised again by the training thread
                self._bug = error
                return
            if self._is_replaced.wait(RETRY_S):
                return
