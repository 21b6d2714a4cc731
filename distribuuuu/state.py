"""What a run is made of: the one place that says what a checkpoint holds and how a run goes on from it.

A checkpoint is a dict: `epoch` (the last finished one, from 0; -1: none), `step` (steps done since), `state_dict`,
`optimizer`, `best_acc1`, `best_epoch`, `seed`, `classes`, `arch`, `global_batch`. The 2021 distribuuuu wrote the first
five without `step`, and means the same by them.
"""

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distribuuuu.checkpoint_file import CheckpointError
from distribuuuu.seeding import derive_seed

logger = logging.getLogger(__name__)


@dataclass
class TrainState:
    """All that a checkpoint holds."""

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
    """Load the optimizer's buffers, counts and learning rate; its settings (weight decay, ...) stay the config's.

    Raises:
        CheckpointError: the groups or their sizes differ.
    """
    names = {*optimizer.defaults, "lr_scale"} - {"lr"}
    settings = [{key: group[key] for key in group if key in names} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(content)
    except (ValueError, KeyError, TypeError) as error:
        remedy = "TRAIN.LOAD_OPT False takes only the weights"
        raise CheckpointError(f"{path}: its optimizer does not fit: {error}; {remedy}") from error
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
