"""What a run is made of: the one place that says what a checkpoint holds and how a run goes on from it.

A checkpoint is a dict: `epoch` (the last finished one, from 0; -1: none), `step` (steps done since), `state_dict`,
`optimizer`, `optimizer_names` (of its parameters, by group), `best_acc1`, `best_epoch`, `seed`, `classes`, `arch`,
`config` (every option by its key), `global_batch`, `seconds`, `timing`, `peak_memory_mib`, `meter` (what each process
has counted since the last row of metrics), `checkpoints` (names of those that the run wrote and keeps), and where the
run has them `ema_state_dict`, `best_ema_acc1`, `best_ema_epoch` and `scaler`. With all steps of an epoch done and
`epoch` not yet counted, its evaluation is pending. The 2021 distribuuuu wrote `epoch`, `state_dict`, `optimizer` and
`best_acc1`, and means the same by them.
"""

import logging
import math
import os
import reprlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import nn

from distribuuuu import distributed as dist
from distribuuuu.checkpoint_file import CheckpointError, find_other_class, is_list_of, is_state_dict
from distribuuuu.ema import Ema
from distribuuuu.limits import OPEN_SECTIONS
from distribuuuu.metrics import ClassificationMeter, MultilabelMeter, StepTiming
from distribuuuu.plural import counted
from distribuuuu.precision import Precision
from distribuuuu.provenance import peak_memory_mib
from distribuuuu.seeding import derive_seed
from distribuuuu.sharding import load_whole_state_dict, match_strides, whole_state_dict

logger = logging.getLogger(__name__)

# What helps when all of a checkpoint does not fit.
_WEIGHTS_ONLY = "to take only its weights name it as MODEL.WEIGHTS, with TRAIN.LOAD_OPT False and another OUT_DIR"


def _is_integer(value: Any, least: float = -math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def _is_number(value: Any) -> bool:
    is_single = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
    return is_single or isinstance(value, float) or _is_integer(value)


def _is_duration(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def _is_timing(value: Any) -> bool:
    names = ("images", "seconds", "row_seconds")
    return isinstance(value, dict) and all(_is_duration(value.get(name, 0)) for name in names)


def _is_scaler(value: Any) -> bool:
    names = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
    return isinstance(value, dict) and (not value or all(_is_number(value.get(name)) for name in names))


def _is_optimizer(value: Any) -> bool:
    state, groups = (value.get("state"), value.get("param_groups")) if isinstance(value, dict) else (None, None)
    if not isinstance(state, dict) or not is_list_of(list(state.values()), dict) or not is_list_of(groups, dict):
        return False
    is_text = any(isinstance(item, (str, bytes)) for entry in state.values() for item in entry.values())
    is_numbered = all(_is_integer(index, 0) for index in state) and not is_text
    return is_numbered and all(is_list_of(group.get("params"), int) and _is_number(group.get("lr")) for group in groups)


# What a checkpoint must hold under its keys to be resumed: a test, and what it asks for.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "epoch": (lambda value: _is_integer(value, -1), "an integer from -1"),
    "optimizer": (_is_optimizer, "the state dict of an optimizer"),
    **dict.fromkeys(("step", "num_rollbacks"), (lambda value: _is_integer(value, 0), "an integer from 0")),
    **dict.fromkeys(("best_epoch", "best_ema_epoch"), (lambda value: _is_integer(value, -1), "an integer from -1")),
    **dict.fromkeys(("best_acc1", "best_ema_acc1"), (_is_number, "a number")),
    "seconds": (_is_duration, "a number from 0"),
    "seed": (_is_integer, "an integer"),
    "global_batch": (lambda value: _is_integer(value, 1), "an integer from 1"),
    "arch": (lambda value: isinstance(value, str), "a text"),
    **dict.fromkeys(("classes", "checkpoints"), (lambda value: is_list_of(value, str), "a list of texts")),
    "optimizer_names": (
        lambda value: is_list_of(value, (list, tuple)) and all(is_list_of(names, str) for names in value),
        "lists of texts",
    ),
    "ema_state_dict": (is_state_dict, "tensors by name"),
    "timing": (_is_timing, "images, seconds and row_seconds, each a number from 0"),
    "peak_memory_mib": (lambda value: value is None or _is_duration(value), "a number from 0"),
    "meter": (lambda value: is_list_of(value, dict), "a list of counters"),
    "config": (lambda value: isinstance(value, dict) and is_list_of(list(value), str), "options by name"),
    "scaler": (_is_scaler, "the state dict of a gradient scaler"),
}


def check_resumable(content: dict[str, Any], path: str | os.PathLike) -> None:
    """Raise CheckpointError for a checkpoint that holds weights only, or values of another type or range."""
    if "optimizer" not in content or "epoch" not in content:
        raise CheckpointError(f"{path}: holds weights only, so it cannot be resumed; give it as MODEL.WEIGHTS")
    for key, (is_right, expected) in _FIELDS.items():
        if key in content and not is_right(content[key]):
            got = reprlib.repr(content[key])[:80]
            raise CheckpointError(f"{path}: not a sound checkpoint: `{key}` is {got}; expected {expected}")


@dataclass
class Best:
    """The best evaluation so far: its accuracy in percent, and after which epoch, from 0.

    The epoch is -1 when there is none yet, or when the 2021 distribuuuu did not record it.
    """

    top1: float = 0.0
    epoch: int = -1

    def __str__(self) -> str:
        return f"{self.top1:.2f} (epoch {self.epoch + 1 if self.epoch >= 0 else 'unknown'})"

    def beaten_by(self, top1: float, epoch: int) -> bool:
        """Take in an evaluation, and tell whether it is the best."""
        is_best = top1 > self.top1 or not self.top1 > 0  # it may be no number: nothing to rank
        if is_best:
            self.top1, self.epoch = top1, epoch
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
    meter: ClassificationMeter | MultilabelMeter | None = None
    timing: StepTiming = field(default_factory=StepTiming)
    evaluated_at: tuple[int, int] | None = None
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
            averaged = {"ema_state_dict": whole_state_dict(self.ema.model), "best_ema_acc1": best.top1,
                        "best_ema_epoch": best.epoch}  # fmt: skip
        return {
            **self._facts(),
            "state_dict": whole_state_dict(self.model),
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
            "best_acc1": self.bests["raw"].top1,
            "best_epoch": self.bests["raw"].epoch,
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
        other = find_other_class(content, self.classes)
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
        self.bests["raw"] = Best(float(content.get("best_acc1", 0.0)), int(content.get("best_epoch", -1)))
        self.bests["ema"] = Best(float(content.get("best_ema_acc1", 0.0)), int(content.get("best_ema_epoch", -1)))
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
        self.meter.load_state_dict([part for part in parts if self._is_own_kind(part)])

    def _is_own_kind(self, part: dict[str, Any]) -> bool:
        """Tell whether a meter of this run has counted something: another task or other classes count otherwise."""
        own = self.meter.state_dict()
        return part.keys() == own.keys() and all(
            isinstance(part[name], torch.Tensor) and part[name].dtype == value.dtype
            and (part[name].dim(), part[name].shape[-1:]) == (value.dim(), value.shape[-1:])
            for name, value in own.items()
        )  # fmt: skip

    def _check_classes(self, content: dict[str, Any], path: str | os.PathLike) -> None:
        other = find_other_class(content, self.classes)
        if other:
            raise CheckpointError(f"{path}: was trained on other classes: {other}; {_WEIGHTS_ONLY}")

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
                f" {settings}; set it back, or {_WEIGHTS_ONLY}"
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
    def best_top1(self) -> dict[str, float]:
        """The best accuracy (percent) of each kind of weights."""
        return {kind: best.top1 for kind, best in self.bests.items()}

    def finish_step(self, num_steps: int) -> None:
        """Count a step of an epoch of `num_steps` as done, and take its weights into their average."""
        self.step += 1
        if self.ema:
            images_seen = (self.epoch * num_steps + self.step) * self.global_batch
            self.ema.update(self.global_batch, images_seen)

    def finish_epoch(self, top1: dict[str, float]) -> list[str]:
        """Count the epoch as done; return the kinds of weights whose accuracy (percent) is their best so far."""
        new_bests = [kind for kind, value in top1.items() if self.bests[kind].beaten_by(value, self.epoch)]
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
        load_whole_state_dict(model, state_dict)
        return
    if not missing and not extra and all(a[1:] == b[1:] for a, b in different.values()) and len(different) <= 2:
        key, (theirs, ours) = next(iter(different.items()))
        raise CheckpointError(f"{path}: has {counted(theirs[0], 'class')} ({key}), but MODEL.NUM_CLASSES is {ours[0]}")
    parts = [f"{key} is {a}, here {b}" for key, (a, b) in list(different.items())[:2]]
    parts += [f"lacks {counted(len(missing), 'tensor')}, e.g. {missing[0]}"] if missing else []
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
        match_strides(optimizer)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: its optimizer does not fit: {error}; {_WEIGHTS_ONLY}") from error
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
