"""Checkpoints: written whole or not at all, checked before they are believed, the newest and the best kept."""

import contextlib
import logging
import os
import re
import threading
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from distribuuuu.checkpoint.io import CheckpointError, read_checkpoint, write_atomically
from distribuuuu.checkpoint.load import check_resumable
from distribuuuu.checkpoint.writer import BackgroundWriter, find_nonfinite, snapshot
from distribuuuu.distributed import comm as dist

logger = logging.getLogger(__name__)

_NAME = re.compile(r"ckpt_ep_(\d+)(?:_step_(\d+))?\.pth\.tar")


class TrainingState(Protocol):
    """What is saved: the position of the run, and its content as a dict."""

    epoch: int
    step: int
    evaluated_at: tuple[int, int] | None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint; every process must call it."""


class CheckpointManager:
    """OUT_DIR/checkpoints, OUT_DIR/best.pth.tar and best_ema.pth.tar. Only the main process writes, in the background.

    Args:
        out_dir: the folder of the run.
        keep_last: how many of the newest checkpoints that the run wrote to keep; files of other runs always stay.
        keep_every: also keep those of every Kth epoch; 0: none.
        every_steps: the most steps of an epoch that may be lost; 0: all of them.
    """

    def __init__(self, out_dir: str | os.PathLike, keep_last: int = 3, keep_every: int = 0, every_steps: int = 0):
        self.folder = Path(out_dir) / "checkpoints"
        self.bests = {"raw": Path(out_dir) / "best.pth.tar", "ema": Path(out_dir) / "best_ema.pth.tar"}
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.every_steps = every_steps
        self._writer = BackgroundWriter()
        self._not_finite: str | None = None
        # Outlives the save it came with, which the disk may refuse until another one replaces it.
        self._unwritten_bests: dict[str, dict[str, Any]] = {}
        # The path that is being written, and whether it need not be any more.
        self._writing: Path | None = None
        self._is_superseded = threading.Event()
        # Names of the files that this run wrote, over all its starts: each checkpoint holds them as `checkpoints`.
        self._own: set[str] = set()
        self._not_removable: set[str] = set()
        self._has_removed = False

    def is_due(self, step: int) -> bool:
        """Tell whether a checkpoint is to be written after `step` steps of an epoch.

        At each multiple of `every_steps` and once in between: while one checkpoint is being written, which counts for
        nothing until it is whole, the one before is at most `every_steps` steps old.
        """
        every = self.every_steps
        return every > 0 and step % every in (0, every // 2)

    def save(self, state: TrainingState, new_bests: Sequence[str] = ()) -> Path:
        """Write the state, then remove what is no longer kept; return the file.

        Raises:
            CheckpointError: the disk refuses it, or the weights are not finite.
        """
        path = self.save_in_background(state, new_bests)
        self.finish()
        return path

    def save_in_background(self, state: TrainingState, new_bests: Sequence[str] = ()) -> Path:
        """Copy the state, and write it while training goes on; return the file that will be there.

        Waits for the save before, unless that is of this epoch's steps and this one of its evaluation too, which takes
        its place: then it is abandoned. What the disk refuses is tried again. A state that is not finite is not
        written. Every process must call it.

        Args:
            state: what to save.
            new_bests: the kinds of its weights, "raw" and "ema", that are the best of their kind.
        """
        path = self.folder / checkpoint_name(state.epoch, state.step)
        content = state.to_dict()
        before = self.folder / checkpoint_name(*state.evaluated_at) if state.evaluated_at and not state.step else None
        if dist.is_main():
            content = snapshot(content)
            if before and before == self._writing:
                self._is_superseded.set()
            self._writer.join_or_abandon()
            self._is_superseded.clear()
            self._writing = path
            self._unwritten_bests |= {kind: weights_of(content, kind) for kind in new_bests}
            self._own &= {path.name for path in self.list()}
            content["checkpoints"] = sorted(self._own | {path.name})
            self._writer.start(lambda: self._write(path, content, before), f"checkpoint {path.name}")
        return path

    def wait(self) -> None:
        """Return on every process when the last save is on disk.

        Raises:
            CheckpointError: the disk refuses it.
        """
        if problem := dist.broadcast_object(self._find_write_problem() if dist.is_main() else None):
            raise CheckpointError(problem)

    def finish(self) -> None:
        """Return on every process when the last save of the run is on disk.

        Raises:
            CheckpointError: the disk refuses it, or it was not written because the weights are not finite.
        """
        self.wait()
        if problem := dist.broadcast_object(self._not_finite):
            raise CheckpointError(problem)

    def _find_write_problem(self) -> str | None:
        try:
            self._writer.wait()
        except CheckpointError as error:
            return f"{error}; the newest one is {(self.list() or ['none'])[-1]}"
        return None

    def join_or_abandon(self) -> None:
        """Return when the last save is on disk or refused by it; unlike `wait`, for one process alone."""
        self._writer.join_or_abandon()

    def _write(self, path: Path, content: dict[str, Any], superseded: Path | None) -> None:
        weights = {key: value for key, value in content.items() if key != "meter"}  # a loss is judged when it is read
        if where := find_nonfinite(weights):
            self._unwritten_bests = {}
            self._not_finite = f"the weights are not finite (first {where}): {path.name} was not written"
            logger.error("%s", self._not_finite)
            return
        self._not_finite = None
        self.folder.mkdir(parents=True, exist_ok=True)
        for kind in list(
            self._unwritten_bests
        ):  # first: killed in between, the epoch is done again and writes the same
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
            every_kth = self.keep_every > 0 and step == 0 and epoch % self.keep_every == 0
            if path not in (*own[-self.keep_last :], newest) and not every_kth:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint that is no longer kept; the first is logged, one that cannot be removed is a warning."""
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

    def list(self) -> list[Path]:
        """Return the checkpoints, oldest position first: by number, so 1000 comes after 999."""
        if not self.folder.is_dir():
            return []
        return sorted((path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)), key=position_of)

    def find_latest(self) -> Path | None:
        """Return the newest sound checkpoint on every process; broken ones are renamed to *.broken, with a warning."""
        return dist.broadcast_object(self._find_latest() if dist.is_main() else None)

    def _find_latest(self) -> Path | None:
        for path in reversed(self.list()):
            try:
                content = read_checkpoint(path)
                check_resumable(content, path)
                self._own |= {*content.get("checkpoints", ())}
                return path
            except CheckpointError as error:
                logger.warning("skipped a broken checkpoint: %s", error)
                with contextlib.suppress(OSError):  # a folder that can only be read
                    os.replace(path, f"{path}.broken")
        return None

    def remove_temporary_files(self) -> None:
        """Remove the temporary files of a training that was killed; only while this one has the lock on OUT_DIR."""
        if dist.is_main():
            own = (".best*.pth.tar.*tmp", ".metrics.jsonl.*.tmp", ".results.json.*.tmp")
            for path in [*self.folder.glob(".*.tmp"), *chain.from_iterable(map(self.folder.parent.glob, own))]:
                with contextlib.suppress(OSError):
                    path.unlink()

    def archive(self, names: Sequence[str] = ()) -> Path | None:
        """Rename the checkpoints and the best weights of an older run, so that a new one begins beside them.

        Args:
            names: files of OUT_DIR that go with them.
        """
        if not dist.is_main() or not self.list():
            return None
        numbered = (Path(f"{self.folder}.{number}") for number in range(1, 10**6))
        aside = next(path for path in numbered if not path.exists())
        os.replace(self.folder, aside)
        for path in (*self.bests.values(), *(self.folder.parent / name for name in names)):
            if path.exists():
                os.replace(path, aside / path.name)
        return aside


def weights_of(content: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the file of weights, "raw" or "ema", of a checkpoint: one that cannot be resumed."""
    left_out = ("optimizer", "step", "seconds", "timing", "peak_memory_mib", "meter", "scaler", "ema_state_dict")
    weights = {key: value for key, value in content.items() if key not in left_out}
    return {**weights, "state_dict": content["ema_state_dict" if kind == "ema" else "state_dict"]}


def checkpoint_name(epoch: int, step: int) -> str:
    """Return the file name of a position: finished epochs, and steps since."""
    return f"ckpt_ep_{epoch:03d}_step_{step:06d}.pth.tar" if step else f"ckpt_ep_{epoch:03d}.pth.tar"


def position_of(path: Path) -> tuple[int, int]:
    """Return (finished epochs, steps since) of a checkpoint's name."""
    epoch, step = _NAME.fullmatch(path.name).groups()
    return int(epoch), int(step or 0)
