"""What a run is made of: the one place that says what a checkpoint holds and how a run goes on from it.

A checkpoint is a dict: `epoch` (the last finished one, from 0; -1: none), `step` (steps done since), `state_dict`,
`optimizer`, `optimizer_names` (of its parameters, by group), `best_acc1` (the best value of `best_metric`, in
percent), `best_epoch`, `best_metric`, `seed`, `classes`, `arch`,
`config` (every option by its key), `global_batch`, `seconds`, `timing`, `peak_memory_mib`, `meter` (what each process
has counted since the last row of metrics), `checkpoints` (names of those that the run wrote and keeps), and where the
run has them `ema_state_dict`, `best_ema_acc1`, `best_ema_epoch` and `scaler`. With all steps of an epoch done and
`epoch` not yet counted, its evaluation is pending. The 2021 distribuuuu wrote `epoch`, `state_dict`, `optimizer` and
`best_acc1`, and means the same by them.
"""

import logging
import math
import os
import time
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import nn

from distribuuuu.checkpoint.io import CheckpointError, find_class_mismatch
from distribuuuu.checkpoint.load import WEIGHTS_ONLY, check_resumable, load_optimizer, load_state_dict
from distribuuuu.config.errors import counted
from distribuuuu.config.rules import OPEN_SECTIONS
from distribuuuu.data.seeding import derive_seed
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.fsdp import full_state_dict
from distribuuuu.optim.ema import Ema
from distribuuuu.optim.precision import Precision
from distribuuuu.report.environment import peak_memory_mib
from distribuuuu.report.step_timing import StepTiming
from distribuuuu.tasks.metrics import Meter

logger = logging.getLogger(__name__)


@dataclass
class Best:
    """The best evaluation so far: the value of its first metric, and its epoch, from 0.

    The epoch is -1 when there is none yet, or when the 2021 distribuuuu did not record it.
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


@dataclass
class TrainState:
    """All that a checkpoint holds.

    Weights come in two kinds: "raw", as they are trained, and, where there is an average of them, "ema".

    Attributes:
        config: every option by its key, e.g. "MODEL.ARCH".
        meter: the counters of the training steps.
        evaluated_at: the position (finished epochs, steps since) that the last evaluation was made at.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    seed: int
    arch: str
    classes: tuple[str, ...]
    global_batch: int
    epoch: int = 0
    step: int = 0
    num_rollbacks: int = 0
    precision: Precision = field(default_factory=Precision)
    ema: Ema | None = None
    config: dict[str, Any] = field(default_factory=dict)
    meter: Meter | None = None
    timing: StepTiming = field(default_factory=StepTiming)
    evaluated_at: tuple[int, int] | None = None
    best_metric: str = "top1"
    higher_is_better: bool = True
    bests: dict[str, Best] = field(default_factory=lambda: {"raw": Best(), "ema": Best()})

    def __post_init__(self):
        self._seconds_before, self._started = 0.0, time.perf_counter()
        self._peak_before = 0.0

    @property
    def seconds(self) -> float:
        """The seconds that the run has taken so far, over all its starts."""
        return self._seconds_before + time.perf_counter() - self._started

    def peak_memory_mib(self) -> float | None:
        """Return the greatest peak of all starts, see `provenance.peak_memory_mib`. Every process must call it."""
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        return max(self._peak_before, peak_memory_mib(device) or 0.0) or None

    @property
    def stream_seed(self) -> int:
        """The seed of everything random; after a rollback another one, so that the run takes another path."""
        return derive_seed(self.seed, self.num_rollbacks) if self.num_rollbacks else self.seed

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models to evaluate, by the kind of their weights."""
        return {"raw": self.model, "ema": self.ema.model} if self.ema else {"raw": self.model}

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint, whole on the main process. Every process must call it."""
        averaged = {}
        if self.ema:
            best = self.bests["ema"]
            averaged = {"ema_state_dict": full_state_dict(self.ema.model), "best_ema_acc1": best.value,
                        "best_ema_epoch": best.epoch}  # fmt: skip
        return {
            **self._facts(),
            "state_dict": full_state_dict(self.model),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_names": self._optimizer_names(),
            "step": self.step,
            "seconds": self.seconds,
            "timing": self.timing.state_dict(),
            "peak_memory_mib": self.peak_memory_mib(),
            "meter": dist.gather_objects(self.meter.state_dict()) if self.meter else [],
            "scaler": self.precision.state_dict(),
            **averaged,
        }

    def _facts(self) -> dict[str, Any]:
        """Return what is told of weights beside the weights."""
        return {
            "epoch": self.epoch - 1,
            "best_acc1": self.bests["raw"].value,
            "best_epoch": self.bests["raw"].epoch,
            "best_metric": self.best_metric,
            "seed": self.seed,
            "num_rollbacks": self.num_rollbacks,
            "classes": list(self.classes),
            "arch": self.arch,
            "config": self.config,
            "global_batch": self.global_batch,
        }

    def start_from(self, content: dict[str, Any], path: str | os.PathLike) -> None:
        """Take the weights of a file, and nothing else; their moving average begins with them.

        Raises:
            CheckpointError: they do not fit the model.
        """
        for model in self.models.values():
            load_state_dict(model, content["state_dict"], path)
        other = find_class_mismatch(content, self.classes)
        if other:
            logger.warning("%s: was trained on other classes: %s", path, other)

    def load_dict(self, content: dict[str, Any], path: str | os.PathLike) -> None:
        """Continue where a checkpoint of ours or of the 2021 distribuuuu stopped.

        Raises:
            CheckpointError: the model or the optimizer does not take it, or it is not a whole checkpoint.
        """
        check_resumable(content, path)
        self._check_classes(content, path)
        load_state_dict(self.model, content["state_dict"], path)
        load_optimizer(self.optimizer, content["optimizer"], path)
        self._check_groups(content, path)
        self.epoch, self.step = int(content["epoch"]) + 1, int(content.get("step", 0))
        self._load_bests(content, path)
        # A rollback does not take back the time that was spent.
        seconds = max(self.seconds, float(content.get("seconds", 0.0)))
        self._seconds_before, self._started = seconds, time.perf_counter()
        self.precision.load_state_dict(content.get("scaler", {}))
        if self.ema:
            averaged = content.get("ema_state_dict")
            load_state_dict(self.ema.model, averaged or content["state_dict"], path)
            if not averaged:
                logger.warning("%s has no moving average of the weights: it begins here", path)
        self.seed = int(content.get("seed", self.seed))
        self.num_rollbacks = int(content.get("num_rollbacks", 0))
        self.evaluated_at = None
        self.timing.load_state_dict(content.get("timing", {}))
        self._peak_before = max(self._peak_before, content.get("peak_memory_mib") or 0.0)
        self._load_meter(content.get("meter", []))
        self._convert_step(int(content.get("global_batch", self.global_batch)))

    def _load_bests(self, content: dict[str, Any], path: str | os.PathLike) -> None:
        """Restore the best evaluations, unless they were selected by another metric; the 2021 distribuuuu had top-1."""
        self.bests = {"raw": Best(), "ema": Best()}
        if (metric := content.get("best_metric", self.best_metric)) != self.best_metric:
            logger.warning(
                "%s: its best weights were selected by %s; now %s selects anew", path, metric, self.best_metric
            )
            return
        for kind, best in self.bests.items():
            infix = "" if kind == "raw" else f"{kind}_"
            best.value = float(content.get(f"best_{infix}acc1", 0.0))
            best.epoch = int(content.get(f"best_{infix}epoch", -1))

    def drop_row(self) -> None:
        """Begin a new row of metrics: the next one counts only the steps from here on."""
        self._load_meter([])
        self.timing.drop_row()

    def _load_meter(self, parts: list[dict[str, torch.Tensor]]) -> None:
        """Give each process what it had counted; with another number of processes, all of it to the main one."""
        if self.meter is None:
            return
        if len(parts) == dist.world_size():
            parts = [parts[dist.rank()]]
        elif not dist.is_main():
            parts = []
        self.meter.load_state_dict(parts)

    def _check_classes(self, content: dict[str, Any], path: str | os.PathLike) -> None:
        other = find_class_mismatch(content, self.classes)
        if other:
            raise CheckpointError(f"{path}: was trained on other classes: {other}; {WEIGHTS_ONLY}")

    def _optimizer_names(self) -> list[list[str]]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [[names[parameter] for parameter in group["params"]] for group in self.optimizer.param_groups]

    def _check_groups(self, content: dict[str, Any], path: str | os.PathLike) -> None:
        """Raise CheckpointError if the optimizer, which knows parameters by number, has taken them for others."""
        mine = self._optimizer_names()
        theirs = content.get("optimizer_names", mine)
        if theirs != mine:
            pairs = zip_longest(chain.from_iterable(theirs), chain.from_iterable(mine))
            names = next((pair for pair in pairs if pair[0] != pair[1]), None)
            example = f", e.g. {' in the place of '.join(map(str, names))}" if names else ""
            settings = "FINETUNE.LR_MULT or FREEZE, OPTIM.LAYER_DECAY or a weight decay"
            raise CheckpointError(
                f"{path}: its optimizer has the parameters in other groups{example}: it was made with another"
                f" {settings}; set it back, or {WEIGHTS_ONLY}"
            )

    def _convert_step(self, old_batch: int) -> None:
        """Keep the images seen in this epoch when the size of a step has changed."""
        if self.step and old_batch != self.global_batch:
            seen = self.step * old_batch
            self.step = seen // self.global_batch
            self.drop_row()
            logger.warning("global batch %d, was %d: %s seen a second time in this epoch", self.global_batch, old_batch,
                           counted(seen - self.step * self.global_batch, "image"))  # fmt: skip

    @property
    def best_value(self) -> float:
        """The best value of the first metric over the kinds of weights."""
        values = [self.bests[kind].value for kind in self.models]
        return max(values) if self.higher_is_better else min(values)

    def finish_step(self, num_steps: int) -> None:
        """Count a step of an epoch of `num_steps` as done, and take its weights into their average."""
        self.step += 1
        if self.ema:
            images_seen = (self.epoch * num_steps + self.step) * self.global_batch
            self.ema.update(self.global_batch, images_seen)

    def finish_epoch(self, values: dict[str, float]) -> list[str]:
        """Count the epoch as done; return the kinds of weights whose value of the first metric is the best so far."""
        better = self.higher_is_better
        new_bests = [kind for kind, value in values.items() if self.bests[kind].update(value, self.epoch, better)]
        self.evaluated_at = self.epoch, self.step
        self.epoch, self.step = self.epoch + 1, 0
        return new_bests


def list_changes(before: dict[str, Any], now: dict[str, Any], sections: tuple[str, ...] = ("",)) -> list[str]:
    """Return the options of sections that differ between two configs, e.g. ["OPTIM.BASE_LR 0.1 -> 0.2"].

    Options that one of two versions does not know do not count.
    """
    keys = [key for key in dict.fromkeys((*before, *now)) if key.startswith(sections)]
    known = [key for key in keys if key.startswith(OPEN_SECTIONS) or (key in before and key in now)]
    pairs = {key: (before.get(key, "unset"), now.get(key, "unset")) for key in known}
    return [f"{key} {old} -> {new}" for key, (old, new) in pairs.items() if old != new]
