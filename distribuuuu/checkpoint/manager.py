"""Checkpoint manager: saving in the background, finding the newest valid checkpoint, removing old ones."""

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from distribuuuu.checkpoint.background_writer import BackgroundWriter
from distribuuuu.checkpoint.io import CheckpointError, read_checkpoint, write_atomically
from distribuuuu.checkpoint.restore import check_resumable, weights_of
from distribuuuu.checkpoint.snapshot import find_nonfinite, snapshot
from distribuuuu.checkpoint.weights_files import best_paths
from distribuuuu.config import run_files
from distribuuuu.distributed import comm as dist

logger = logging.getLogger(__name__)

# Seconds of attempts to write the last checkpoint of a run.
LAST_RETRIES_S = 10.0

# Returns why this run must not write to OUT_DIR any more; None if it may.
FindLoss = Callable[[], str | None]

_NAME = re.compile(r"ckpt_ep_(\d+)(?:_step_(\d+))?\.pth\.tar")


class OutDirLost(CheckpointError):
    """OUT_DIR is no longer this run's; raised on the main process, whose watchdog ends the others."""


class TrainingState(Protocol):
    """Training state to save: its position, and its content as a dict."""

    epoch: int
    step: int
    evaluated_at: tuple[int, int] | None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint; every process must call it."""


@dataclass(frozen=True)
class SaveJob:
    """A checkpoint to write, with what is done before and after.

    Attributes:
        path: the file.
        content: its content.
        bests: best weights to write before, by kind: a run that is killed in between repeats the epoch and writes them.
        first: called with the content before anything is written.
        superseded: the checkpoint to remove after: that of the steps of an epoch, after the one of its evaluation.
        is_superseded: to be set to abandon the write of the checkpoint.
    """

    path: Path
    content: dict[str, Any]
    bests: dict[str, dict[str, Any]]
    first: Callable[[dict[str, Any]], None]
    superseded: Path | None
    is_superseded: threading.Event = field(default_factory=threading.Event)

    def find_nonfinite(self) -> str | None:
        """Return the path of the first value that is not finite, or None; the meter is not searched."""
        return find_nonfinite({key: value for key, value in self.content.items() if key != "meter"})


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
        self.folder = Path(out_dir) / run_files.CHECKPOINTS
        self.bests = best_paths(out_dir)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.every_steps = every_steps
        self._find_loss = find_loss
        self._writer = BackgroundWriter()
        # The job in progress, or the one whose writes have failed so far.
        self._job: SaveJob | None = None
        # Why the last job has not written its checkpoint.
        self._problem: CheckpointError | None = None
        # Names of the files that this run wrote, over all its starts: each checkpoint holds them as `checkpoints`.
        self._own: set[str] = set()
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
        self,
        state: TrainingState,
        new_bests: Sequence[str] = (),
        first: Callable[[dict[str, Any]], None] = lambda content: None,
    ) -> Path:
        """Copy the state, write it while training continues, then remove old checkpoints; return the file.

        Every process must call it. It waits for the previous save, except that a save after an evaluation abandons
        the one before that evaluation. A failed write is retried. A state that is not finite is not written.

        Args:
            state: the training state.
            new_bests: the kinds of its weights, see `weights_files.KINDS`, that are the best so far.
            first: called in the background on the main process with the content, before it is written.

        Raises:
            OutDirLost: OUT_DIR belongs to another run, or was replaced; the state is in a new folder beside it.
        """
        path = self.folder / checkpoint_name(state.epoch, state.step)
        content = state.to_dict()
        if dist.is_main():
            content = snapshot(content)
            evaluated_at = None if state.step else state.evaluated_at
            superseded = self.folder / checkpoint_name(*evaluated_at) if evaluated_at else None
            unwritten_bests = self._end_last_job(superseded)
            self._own &= {path.name for path in self.list()}
            job = SaveJob(
                path=path,
                content={**content, "checkpoints": sorted(self._own | {path.name})},
                bests={**unwritten_bests, **{kind: weights_of(content, kind) for kind in new_bests}},
                first=first,
                superseded=superseded,
            )
            if loss := self._find_loss():
                raise self._save_elsewhere(job, loss)
            self._job = job
            self._writer.start(lambda: self._run(job), f"checkpoint {path.name}")
        return path

    def _end_last_job(self, superseded: Path | None) -> dict[str, dict[str, Any]]:
        """Return when the last job is done or abandoned; return best weights that it could not write, by kind."""
        if superseded and (job := self._job) and job.path == superseded:
            job.is_superseded.set()
        self._writer.join()
        if isinstance(self._problem, OutDirLost):
            raise self._problem
        return self._job.bests if self._job else {}

    def wait(self) -> None:
        """Return on every process when the last save is on disk.

        Raises:
            CheckpointError: it cannot be written.
        """
        problem = None
        if dist.is_main():
            if error := self._writer.join(LAST_RETRIES_S):
                newest = next(reversed(self.list()), "none")
                problem = f"the last checkpoint could not be written: {error}; the newest one is {newest}"
            if isinstance(self._problem, OutDirLost):
                raise self._problem
        if problem := dist.broadcast_object(problem):
            raise CheckpointError(problem)

    def finish(self) -> None:
        """Return on every process when the last save of the run is on disk.

        Raises:
            CheckpointError: it cannot be written, or was not because the weights are not finite.
        """
        self.wait()
        if problem := dist.broadcast_object(str(self._problem) if self._problem else None):
            raise CheckpointError(problem)

    def join_or_abandon(self) -> None:
        """Return when the last save is on disk or its write has failed; unlike `wait`, on one process alone."""
        self._writer.join()

    def _run(self, job: SaveJob) -> None:
        """Do a job in the background; after an OSError it is done again."""
        self._problem = self._write(job)
        self._job = None

    def _write(self, job: SaveJob) -> CheckpointError | None:
        if loss := self._find_loss():  # since this write was requested, or since its last attempt
            return self._save_elsewhere(job, loss)
        job.first(job.content)
        if name := job.find_nonfinite():
            problem = f"the weights are not finite (first {name}): {job.path.name} was not written"
            logger.error("%s", problem)
            return CheckpointError(problem)
        self.folder.mkdir(exist_ok=True)  # OUT_DIR is created by its lock only: another folder in its place is found
        for kind, weights in job.bests.items():
            write_atomically(self.bests[kind], weights)
        if write_atomically(job.path, job.content, job.is_superseded.is_set):
            if job.superseded:
                with contextlib.suppress(OSError):
                    job.superseded.unlink()
            self._own.add(job.path.name)
            self._remove_old(job.path)
        return None

    def _save_elsewhere(self, job: SaveJob, loss: str) -> OutDirLost:
        """Write what a job writes to a new folder beside OUT_DIR; return the error to raise."""
        out_dir = self.folder.parent
        folder = next(new for number in range(1, 10**6) if not (new := Path(f"{out_dir}.{number}")).exists())
        path = folder / self.folder.name / job.path.name
        saved = f"its checkpoint is {path}; fix: resume it with OUT_DIR {folder}"
        try:
            if name := job.find_nonfinite():
                saved = f"its weights are not finite (first {name}) and were not saved"
            else:
                path.parent.mkdir(parents=True)
                for kind, weights in job.bests.items():
                    write_atomically(folder / self.bests[kind].name, weights)
                write_atomically(path, job.content)
        except OSError as error:
            saved = f"{path.name} cannot be saved to {folder} either: {error.strerror or error}"
        return OutDirLost(f"{loss}; this training stops, and writes no more to it; {saved}")

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
            self._own.discard(path.name)  # one warning, and no other attempt
            logger.warning("%s: cannot be removed: %s; fix: remove it by hand", path, error.strerror or error)

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
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):  # it may be deleted at any time
            return []
        return sorted((self.folder / name for name in names if _NAME.fullmatch(name)), key=position_of)


def checkpoint_name(epoch: int, step: int) -> str:
    """Return the file name of a checkpoint after `epoch` epochs and `step` steps."""
    return f"ckpt_ep_{epoch:03d}_step_{step:06d}.pth.tar" if step else f"ckpt_ep_{epoch:03d}.pth.tar"


def position_of(path: Path) -> tuple[int, int]:
    """Return (epochs, steps) of a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1]), int(match[2] or 0)
