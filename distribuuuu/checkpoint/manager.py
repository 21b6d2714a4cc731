"""Checkpoint manager: saving in the background, finding the newest valid checkpoint, removing old ones."""

import contextlib
import hashlib
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from distribuuuu.checkpoint.io import CheckpointError, UnreadableError, check_resumable, read_checkpoint
from distribuuuu.checkpoint.weights_files import best_key, best_path, merge_adapters, tensors_key
from distribuuuu.config import run_files
from distribuuuu.config.errors import NonFiniteError
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.comm import FullStateDict, to_local
from distribuuuu.files.atomic_file import replacing, sync_folder
from distribuuuu.launch.signals import WRITER_NAME, SignalState

logger = logging.getLogger(__name__)

WriteResults = Callable[[dict[str, Any]], None]

# Seconds between two attempts to write; seconds of attempts, below DIST.TIMEOUT_S; of the last save of a run.
RETRY_S, RETRIES_S, LAST_RETRIES_S = 5.0, 240.0, 10.0
# The writer waits at its start, so that Thread.start returns before the writer takes the interpreter's lock.
YIELD_S = 5e-3

# Entries that files of best weights, which cannot be resumed, do not have.
_ONLY_TO_RESUME = {"optimizer", "step", "seconds", "timing", "peak_memory_mib", "meter", "buffers", "scaler", "unsaved",
                   "evaluations"}  # fmt: skip
_NAME = re.compile(r"ckpt_ep_(\d+)(?:_step_(\d+))?\.pth\.tar")


class CheckpointManager:
    """Checkpoints and best weights of a run. Only the main process writes, in a thread while training continues.

    Args:
        keep_last: number of newest checkpoints of this run to keep; files of other runs always stay.
        keep_every: also keep those of every Kth epoch; 0: none.
    """

    def __init__(self, out_dir: str | os.PathLike, keep_last: int = 3, keep_every: int = 0):
        self.folder = Path(out_dir) / run_files.CHECKPOINTS
        self.keep_last, self.keep_every = keep_last, keep_every
        self._thread: threading.Thread | None = None
        # The saves that are not on disk, the oldest first: one, or two after a failure.
        self._works: list[tuple[Path, dict[str, Any], WriteResults | None]] = []
        # The text of the last error of the write in progress: its traceback would keep the content of the checkpoint.
        self._error = ""
        self._bug: BaseException | None = None
        self._gives_up = threading.Event()
        # Names of the files that this run wrote, over all its starts: each checkpoint holds them as `checkpoints`.
        self._own: set[str] = set()

    # --------------------------------------------------------------------------------------- saving

    def save(self, content: dict[str, Any], ends_run: bool = False, write_results: WriteResults | None = None) -> Path:
        """Copy the content of a checkpoint, write it while training continues, and return its file.

        Every process must call it. It waits for the previous write, with `ends_run` for `LAST_RETRIES_S` at most. Then,
        if the content follows an evaluation, it calls `write_results` with it and writes the best weights. Last, it
        writes the checkpoint and removes older ones. After a write that has failed, it waits for this one too.

        Raises:
            NonFiniteError: the weights are infinite or NaN; nothing is written.
            CheckpointError: neither the previous write nor this one has succeeded within `RETRIES_S`.
        """
        path = self.folder / checkpoint_name(content["epoch"] + 1, content["step"])
        dist.on_main(lambda: self._start(path, content, ends_run, write_results))
        return path

    def _start(self, path: Path, content: dict[str, Any], ends_run: bool, write_results: WriteResults | None) -> None:
        deadline = time.monotonic() + (LAST_RETRIES_S if ends_run else RETRIES_S)
        skipped = ("meter", "task", "evaluations", "buffers")  # of which NaN may be a regular value
        if name := find_nonfinite({key: value for key, value in content.items() if key not in skipped}):
            raise NonFiniteError(f"the weights are not finite (first {name}): {path.name} was not written")
        if has_failed := self._join(deadline):
            logger.error("%s; trying to write %s", has_failed, path.name)
        self._works = [work for work in self._works if work[1].get("evaluations")]  # with results and best weights
        content = snapshot(content)
        self._own &= {one.name for one in self.list()}
        content["checkpoints"] = sorted(self._own | {work[0].name for work in self._works} | {path.name})
        self._works.append((path, content, write_results))
        self._error, self._gives_up = "", threading.Event()
        self._thread = threading.Thread(target=self._work, name=WRITER_NAME, daemon=True)
        self._thread.start()
        if has_failed and (problem := self._join(deadline)):
            raise CheckpointError(problem)

    def finish(self) -> None:
        """Return on every process when the last save is on disk; CheckpointError: it cannot be written."""

        def join() -> None:
            if problem := self._join(time.monotonic() + LAST_RETRIES_S):
                raise CheckpointError(problem)

        dist.on_main(join)

    def close(self) -> None:
        """Wait for the last save, but not if it fails; unlike `finish`, on one process alone, which has an error."""
        with contextlib.suppress(Exception):  # `_join` raises what the writer has caught, and an error is on its way
            self._join(time.monotonic() + LAST_RETRIES_S)

    def _join(self, deadline: float) -> str:
        """Wait for the write in progress; return why it failed. After the deadline, or soon after a signal, it ends."""
        thread = self._thread
        with dist.unlimited_phase("writing a checkpoint"):
            while thread and thread.is_alive():
                deadline = min(deadline, time.monotonic() + LAST_RETRIES_S) if SignalState.current.first else deadline
                if self._error and time.monotonic() > deadline:
                    self._gives_up.set()
                thread.join(0.02 if self._error else 0.1)
        self._thread = None
        if bug := self._bug:
            self._bug = None
            raise bug
        newest = next(reversed(self.list()), "none")
        reason = f"the last checkpoint could not be written: {self._error}; the newest one is {newest}"
        return reason if thread and self._error else ""

    def _work(self) -> None:
        deadline, is_first = time.monotonic() + RETRIES_S, True
        time.sleep(YIELD_S)
        while True:
            try:
                self._error = ""  # an attempt is not given up
                while self._works:
                    self._write(*self._works[0])
                    path, *_ = self._works.pop(0)
                    if not is_first:
                        logger.info("checkpoint %s was saved after further attempts", path.name)
                return
            except OSError as error:
                self._error = str(error)
            except BaseException as error:  # would end with this thread; the training raises it again
                self._bug = error
                return
            if is_first:
                logger.warning("Cannot write checkpoint %s: %s; training continues, and writing is retried for %.0f s",
                               self._works[0][0].name, self._error, RETRIES_S)  # fmt: skip
            is_first = False
            if time.monotonic() > deadline or self._gives_up.wait(RETRY_S):
                return

    def _write(self, path: Path, content: dict[str, Any], write_results: WriteResults | None) -> None:
        if any((task := content.get("task") or {}).values()):  # the only part that is not known to be readable
            from distribuuuu.checkpoint.readable import check_readable

            check_readable(task)
        saved = content
        if "unsaved" in content:
            from distribuuuu.checkpoint.unsaved import leave_out

            saved = leave_out(content)
        self.folder.mkdir(exist_ok=True)
        if content.get("evaluations"):
            if write_results:
                write_results(content)
            for kind in content["evaluations"]:
                if content[best_key(kind, "epoch")] == content["epoch"]:  # this evaluation is the best one
                    write_atomically(best_path(self.folder.parent, kind), weights_of(content, kind))
        write_atomically(path, saved)
        self._own.add(path.name)
        if evaluated_at := content.get("evaluated_at"):  # the steps of the epoch, saved before its evaluation
            with contextlib.suppress(OSError):
                (self.folder / checkpoint_name(*evaluated_at)).unlink()
        self._remove_old(path)

    def _remove_old(self, newest: Path) -> None:
        """Remove what CHECKPOINT does not keep, and later positions, which a larger global batch has left behind."""
        own = [path for path in self.list() if path.name in self._own]
        kept = [path for path in own if position_of(path) <= position_of(newest)]
        for path in own:
            epoch, step = position_of(path)
            is_kth = self.keep_every > 0 and step == 0 and epoch % self.keep_every == 0
            if path not in kept[-self.keep_last :] and not (is_kth and path in kept):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    self._own.discard(path.name)  # one warning, and no other attempt
                    logger.warning("%s: cannot be removed: %s", path, error.strerror or error)

    # --------------------------------------------------------------------------------------- finding

    def find_latest(self, jobs: Collection[str] | None = None) -> Path | None:
        """Return the newest valid checkpoint on every process; None: there are no checkpoints.

        Damaged ones that are newer are renamed to *.broken, with a warning. From now on, the run owns, and may remove,
        the checkpoints that its content names.

        Args:
            jobs: consider only the checkpoints that one of these jobs has written; None: all.

        Raises:
            CheckpointError: there are checkpoints, but none is valid, or one cannot be read; none is renamed.
        """
        return dist.on_main(lambda: self._find_latest(jobs))

    def has_any(self, jobs: Collection[str] | None = None) -> bool:
        """Tell whether there are checkpoints, of one of these jobs unless None, by the newest one that can be read."""
        for path in reversed(self.list()):
            if jobs is None:
                return True
            with contextlib.suppress(Exception):  # it may be damaged, of which torch.load raises errors of many kinds
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)  # without the tensors
                return bool({*jobs} & {*content.get("jobs", ())})
        return False

    def _find_latest(self, jobs: Collection[str] | None) -> Path | None:
        if jobs is not None and not jobs:
            return None
        damaged: dict[Path, CheckpointError] = {}
        others = False
        for path in reversed(self.list()):
            try:
                content = read_checkpoint(path, to_resume=True)
                check_resumable(content, path)
            except UnreadableError:
                raise
            except CheckpointError as error:
                damaged[path] = error
                continue
            if jobs is not None and not {*jobs} & {*content.get("jobs", ())}:
                others = True
                continue
            for bad, problem in damaged.items():
                logger.warning("a damaged checkpoint is not used: %s", problem)
                with contextlib.suppress(OSError):  # e.g. a read-only folder
                    os.replace(bad, f"{bad}.broken")
            self._own |= {*content.get("checkpoints", ())}
            return path
        if damaged and jobs is None and not others:
            first, fix = next(iter(damaged.values())), "restore one of them from a copy, or set another OUT_DIR"
            raise CheckpointError(f"OUT_DIR: none of the {len(damaged)} checkpoints in {self.folder} is valid, e.g. "
                                  f"{first}; fix: {fix}, or TRAIN.AUTO_RESUME False to start anew")  # fmt: skip
        return None

    # --------------------------------------------------------------------------------------- the folder

    def list(self) -> list[Path]:
        """Return the checkpoints ordered by epoch and step as numbers: 1000 is after 999."""
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((self.folder / name for name in names if _NAME.fullmatch(name)), key=position_of)


def write_atomically(path: Path, content: dict[str, Any]) -> None:
    """Write a file completely or raise OSError, by `torch.save`: temporary file, fsync, rename, fsync of the folder."""
    failure = None
    with replacing(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's own, in place of that of the file
            if not isinstance(error.__context__, OSError):
                raise
            # Not the exception: its traceback holds the content.
            failure = error.__context__.errno, error.__context__.strerror
        if failure:
            raise OSError(*failure)
    sync_folder(path.parent)


def weights_of(content: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the content of a file of best weights of a kind, e.g. "raw"."""
    left_out = {*_ONLY_TO_RESUME, *map(tensors_key, content["bests"])}
    weights = {key: value for key, value in content.items() if key not in left_out}
    return {**weights, "weights": kind, "state_dict": merge_adapters(content[tensors_key(kind)])}


def checkpoint_name(epoch: int, step: int) -> str:
    """Return the file name of a checkpoint after `epoch` epochs and `step` steps."""
    return f"ckpt_ep_{epoch:03d}_step_{step:06d}.pth.tar" if step else f"ckpt_ep_{epoch:03d}.pth.tar"


def position_of(path: Path) -> tuple[int, int]:
    """Return (epochs, steps) of a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1]), int(match[2] or 0)


# ---------------------------------------------------------------------------------- content


def snapshot(value: Any) -> Any:
    """Return a copy of nested content with every tensor on the CPU, unaffected by later steps.

    Tensors of a GPU are copied together, and the host waits for them once.
    """
    tensors = [tensor for _, tensor in _iter_tensors(value, "") if tensor.is_cuda]
    if not tensors:
        return _copy(value, {})
    from distribuuuu.checkpoint.host_copy import copy_to_host

    return _copy(value, dict(zip(map(id, tensors), copy_to_host(tensors)(), strict=True)))


def _copy(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return a copy of nested content; `copies` are those of some tensors, by their `id`."""
    if isinstance(value, FullStateDict):
        return dict(value)
    if isinstance(value, torch.Tensor):
        return copies[id(value)] if id(value) in copies else value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy(item, copies) for key, item in value.items()}
    return type(value)(_copy(item, copies) for item in value) if isinstance(value, (list, tuple)) else value


def find_nonfinite(value: Any) -> str | None:
    """Return the path, e.g. 'state_dict/fc.weight', of the first tensor with an infinity or a NaN, or None."""
    groups: dict[Any, dict[str, torch.Tensor]] = {}
    for path, tensor in _iter_tensors(value, ""):
        if tensor.is_floating_point() and (own := to_local(tensor)).numel():  # of a shard, a process may have no rows
            groups.setdefault((own.device, own.dtype), {})[path] = own.detach()
    for tensors in groups.values():  # the host waits once for each
        largest = torch.stack(torch._foreach_norm(list(tensors.values()), float("inf")))
        if not largest.isfinite().all():
            return next(itertools.compress(tensors, (~largest.isfinite()).tolist()))
    return None


def hash_tensors(value: Any) -> str:
    """Return the SHA-256 of names, types, shapes and bytes of all tensors, sorted by name: that of any file format."""
    digest = hashlib.sha256()
    for path, tensor in sorted(_iter_tensors(value, ""), key=lambda entry: entry[0]):
        digest.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _iter_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _iter_tensors(item, f"{name}/{key}" if name else str(key))
