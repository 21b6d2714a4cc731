"""Checkpoints: what a run is made of, written whole or not at all, checked before it is believed.

A file is a dict: `epoch` (the last finished one, from 0; -1: none), `step` (steps done since), `state_dict`,
`optimizer`, `best_acc1`, `best_epoch`, `seed`, `classes`, `arch`, `global_batch`. The 2021 distribuuuu wrote the first
five without `step`, and means the same by them.
"""

import contextlib
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distribuuuu import distributed as dist
from distribuuuu.checkpoint_file import CheckpointError, read_checkpoint, write_atomically
from distribuuuu.checkpoint_writer import BackgroundWriter, find_not_finite, snapshot
from distribuuuu.seeding import derive_seed

logger = logging.getLogger(__name__)

_NAME = re.compile(r"ckpt_ep_(\d+)(?:_step_(\d+))?\.pth\.tar")


@dataclass
class TrainState:
    """All that a checkpoint holds: the one place that says what is saved and what is loaded."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    seed: int
    arch: str
    classes: tuple[str, ...]
    global_batch: int
    epoch: int = 0
    step: int = 0
    best_top1: float = 0.0
    best_epoch: int = -1
    num_rollbacks: int = 0

    @property
    def stream_seed(self) -> int:
        """The seed of everything random; after a rollback another one, so that the run takes another path."""
        return derive_seed(self.seed, self.num_rollbacks) if self.num_rollbacks else self.seed

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint."""
        return {**self.to_weights(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    def to_weights(self) -> dict[str, Any]:
        """Return the content of a file of weights: a checkpoint that cannot be resumed."""
        return {
            "epoch": self.epoch - 1,
            "state_dict": self.model.state_dict(),
            "best_acc1": self.best_top1,
            "best_epoch": self.best_epoch,
            "seed": self.seed,
            "num_rollbacks": self.num_rollbacks,
            "classes": list(self.classes),
            "arch": self.arch,
            "global_batch": self.global_batch,
        }

    def load_dict(self, content: dict[str, Any], path: str | os.PathLike) -> None:
        """Continue where a checkpoint of ours or of the 2021 distribuuuu stopped.

        Raises:
            CheckpointError: the model or the optimizer does not take it, or it is not a whole checkpoint.
        """
        if "optimizer" not in content or "epoch" not in content:
            raise CheckpointError(f"{path}: holds weights only, so it cannot be resumed; give it as MODEL.WEIGHTS")
        self._check_classes(content, path)
        load_state_dict(self.model, content["state_dict"], path)
        load_optimizer(self.optimizer, content["optimizer"], path)
        self.epoch, self.step = int(content["epoch"]) + 1, int(content.get("step", 0))
        self.best_top1 = float(content.get("best_acc1", 0.0))
        self.best_epoch = int(content.get("best_epoch", -1))
        self.seed = int(content.get("seed", self.seed))
        self.num_rollbacks = int(content.get("num_rollbacks", 0))
        self._convert_step(int(content.get("global_batch", self.global_batch)))

    def _check_classes(self, content: dict[str, Any], path: str | os.PathLike) -> None:
        classes = tuple(content.get("classes", self.classes))
        if len(classes) == len(self.classes) and classes != self.classes:
            mine, theirs = next(pair for pair in zip(self.classes, classes, strict=True) if pair[0] != pair[1])
            raise CheckpointError(
                f"{path}: was trained on other classes: {theirs!r} where the data has {mine!r};"
                f" TRAIN.LOAD_OPT False with MODEL.WEIGHTS takes only its weights"
            )

    def _convert_step(self, old_batch: int) -> None:
        """Keep the images seen in this epoch when the size of a step has changed."""
        if self.step and old_batch != self.global_batch:
            seen = self.step * old_batch
            self.step = seen // self.global_batch
            logger.warning("global batch %d, was %d: %d images are seen twice", self.global_batch, old_batch,
                           seen - self.step * self.global_batch)  # fmt: skip

    def finish_epoch(self, top1: float) -> bool:
        """Count the epoch as done, and tell whether its accuracy (percent) is the best so far."""
        is_best = top1 > self.best_top1 or self.best_top1 == 0
        if is_best:
            self.best_top1, self.best_epoch = top1, self.epoch
        self.epoch, self.step = self.epoch + 1, 0
        return is_best


class CheckpointFolder:
    """OUT_DIR/checkpoints and OUT_DIR/best.pth.tar. Only the main process writes, in the background.

    Args:
        out_dir: the folder of the run.
        keep_last: how many of the newest checkpoints to keep.
        keep_every: also keep those of every Kth epoch; 0: none.
        every_steps: the most steps of an epoch that may be lost; 0: all of them.
    """

    def __init__(self, out_dir: str | os.PathLike, keep_last: int = 3, keep_every: int = 0, every_steps: int = 0):
        self.folder = Path(out_dir) / "checkpoints"
        self.best = Path(out_dir) / "best.pth.tar"
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.every_steps = every_steps
        self._writer = BackgroundWriter()
        self._not_finite: str | None = None
        # Outlives the save it came with, which the disk may refuse until another one replaces it.
        self._unwritten_best: dict[str, Any] | None = None

    def is_due(self, step: int) -> bool:
        """Tell whether a checkpoint is to be written after `step` steps of an epoch.

        At each multiple of `every_steps` and once in between: while one checkpoint is being written, which counts for
        nothing until it is whole, the one before is at most `every_steps` steps old.
        """
        every = self.every_steps
        return every > 0 and step % every in (0, every // 2)

    def save(self, state: TrainState, is_best: bool = False) -> Path:
        """Write the state, then remove what is no longer kept; return the file.

        Raises:
            CheckpointError: the disk refuses it, or the weights are not finite.
        """
        path = self.save_in_background(state, is_best)
        self.finish()
        return path

    def save_in_background(self, state: TrainState, is_best: bool = False) -> Path:
        """Copy the state, and write it while training goes on; return the file that will be there.

        Waits for the save before. What the disk refuses is tried again. A state that is not finite is not written.
        """
        path = self.folder / checkpoint_name(state.epoch, state.step)
        if dist.is_main():
            content = snapshot(state.to_dict())
            self._writer.settle()
            if is_best:
                self._unwritten_best = {key: content[key] for key in state.to_weights()}
            self._writer.start(lambda: self._write(path, content), f"checkpoint {path.name}")
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

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        if where := find_not_finite(content):
            self._unwritten_best = None
            self._not_finite = f"the weights are not finite (first {where}): {path.name} was not written"
            logger.error("%s", self._not_finite)
            return
        self._not_finite = None
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._unwritten_best:  # first: killed in between, the epoch is done again and writes the same file
            write_atomically(self.best, self._unwritten_best)
            self._unwritten_best = None
        write_atomically(path, content)
        self._remove_old(path)

    def _remove_old(self, newest: Path) -> None:
        kept = self.list()[-self.keep_last :] + [newest]
        for path in self.list():
            epoch, step = position_of(path)
            every_kth = self.keep_every > 0 and step == 0 and epoch % self.keep_every == 0
            if path not in kept and not every_kth:
                path.unlink(missing_ok=True)

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
                read_checkpoint(path)
                return path
            except CheckpointError as error:
                logger.warning("skipped a broken checkpoint: %s", error)
                with contextlib.suppress(OSError):  # a folder that can only be read
                    os.replace(path, f"{path}.broken")
        return None

    def clear_leftovers(self) -> None:
        """Remove the temporary files of saves that were killed."""
        if dist.is_main():
            for path in [*self.folder.glob(".*.tmp"), *self.best.parent.glob(f".{self.best.name}.tmp")]:
                with contextlib.suppress(OSError):
                    path.unlink()

    def set_aside(self) -> Path | None:
        """Rename the checkpoints and the best weights of an older run, so that a new one begins beside them."""
        if not dist.is_main() or not self.list():
            return None
        numbered = (Path(f"{self.folder}.{number}") for number in range(1, 10**6))
        aside = next(path for path in numbered if not path.exists())
        os.replace(self.folder, aside)
        if self.best.exists():
            os.replace(self.best, aside / self.best.name)
        return aside


def checkpoint_name(epoch: int, step: int) -> str:
    """Return the file name of a position: finished epochs, and steps since."""
    return f"ckpt_ep_{epoch:03d}_step_{step:06d}.pth.tar" if step else f"ckpt_ep_{epoch:03d}.pth.tar"


def position_of(path: Path) -> tuple[int, int]:
    """Return (finished epochs, steps since) of a checkpoint's name."""
    epoch, step = _NAME.fullmatch(path.name).groups()
    return int(epoch), int(step or 0)


def load_state_dict(model: nn.Module, state_dict: dict[str, torch.Tensor], path: str | os.PathLike) -> None:
    """Load weights into a model, all of them.

    Raises:
        CheckpointError: the class counts, the names or the shapes differ; says which.
    """
    mine = model.state_dict()
    shapes = {key: (tuple(state_dict[key].shape), tuple(mine[key].shape)) for key in mine if key in state_dict}
    different = {key: pair for key, pair in shapes.items() if pair[0] != pair[1]}
    missing, extra = [key for key in mine if key not in state_dict], [key for key in state_dict if key not in mine]
    if not (different or missing or extra):
        model.load_state_dict(state_dict)
        return
    if not missing and not extra and all(a[1:] == b[1:] for a, b in different.values()) and len(different) <= 2:
        key, (theirs, ours) = next(iter(different.items()))
        raise CheckpointError(f"{path}: has {theirs[0]} classes ({key}), but MODEL.NUM_CLASSES is {ours[0]}")
    parts = [f"{key} is {a}, here {b}" for key, (a, b) in list(different.items())[:2]]
    parts += [f"lacks {len(missing)} tensors, e.g. {missing[0]}"] if missing else []
    parts += [f"has {len(extra)} that the model lacks, e.g. {extra[0]}"] if extra else []
    raise CheckpointError(f"{path}: does not fit the model: {'; '.join(parts)}; was MODEL.ARCH another one?")


def load_optimizer(optimizer: torch.optim.Optimizer, content: dict[str, Any], path: str | os.PathLike) -> None:
    """Load the optimizer's buffers and learning rate; its settings (weight decay, momentum) stay the config's.

    Raises:
        CheckpointError: the groups or their sizes differ.
    """
    settings = [{key: group[key] for key in group if key not in ("params", "lr")} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(content)
    except (ValueError, KeyError, TypeError) as error:
        remedy = "TRAIN.LOAD_OPT False takes only the weights"
        raise CheckpointError(f"{path}: its optimizer does not fit: {error}; {remedy}") from error
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
