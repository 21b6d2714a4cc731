"""Kinds of weights, the best weights of each kind, and the file of weights that an option names. Imports no torch.

The kinds are the raw weights, their moving average (EMA.HALF_LIFE) and those of `Task.averages`. Names of files and
entries in checkpoints and records follow from that of the kind. Of several kinds, a reader of a run takes the first one
in order of precedence: those of the task by name, the moving average, the raw weights.
"""

import math
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.json_file import load_json
from distribuuuu.config.run_files import BEST_NAMES

RAW, EMA = "raw", "ema"
# File names of weights in a model's repository on the Hugging Face Hub, in the order of preference.
HUB_NAMES = ("model.safetensors", "pytorch_model.bin")


@dataclass
class Best:
    """The best evaluation so far: the value of the first metric, the epoch, from 0, and loss and metrics by name.

    The epoch is -1 before the first evaluation, and in checkpoints of the 2021 distribuuuu, which did not record it.
    """

    value: float = 0.0
    epoch: int = -1
    metrics: dict[str, float] = field(default_factory=dict)

    def describe(self, metric: str) -> str:
        """Return the value, a loss with four decimals, and the epoch, from 1: '98.40 (epoch 3)'."""
        epoch = self.epoch + 1 if self.epoch >= 0 else "unknown"
        return f"{self.value:.{4 if metric == 'loss' else 2}f} (epoch {epoch})"

    def update(self, metrics: dict[str, float], metric: str, epoch: int, higher_is_better: bool = True) -> None:
        """Record an evaluation if its metric of a name is the best."""
        value, is_unset = metrics[metric], math.isnan(self.value) or (self.value == 0 and self.epoch < 0)
        if is_unset or (value > self.value if higher_is_better else value < self.value):
            self.value, self.epoch = value, epoch
            self.metrics = {name: number for name, number in metrics.items() if name != "count"}


def by_precedence(kinds: Iterable[str]) -> list[str]:
    """Return kinds of weights in order of precedence."""
    return sorted(kinds, key=lambda kind: (kind == RAW, kind == EMA, kind))


def common_kind(records: Sequence[Collection[str]]) -> str:
    """Return the first kind, in order of precedence, that every record has results of; "raw" if there is none."""
    return next(iter(by_precedence(set.intersection(*map(set, records)))), RAW)


def describe_kind(kind: str) -> str:
    """Return what the weights of a kind are, for messages and reports."""
    return {RAW: "trained weights", EMA: "moving average of the weights"}.get(kind, f"{kind} weights")


def tensors_key(kind: str) -> str:
    """Return the entry of a checkpoint with the state dict of a kind of weights."""
    return "state_dict" if kind == RAW else f"{kind}_state_dict"


def best_key(kind: str, name: str) -> str:
    """Return the entry of a checkpoint with the value (`acc1`) or the epoch of the best weights of a kind."""
    return f"best_{name}" if kind == RAW else f"best_{kind}_{name}"


def best_path(out_dir: str | os.PathLike, kind: str = RAW) -> Path:
    """Return the file of the best weights of a kind."""
    return Path(out_dir) / ("best.pth.tar" if kind == RAW else f"best_{kind}.pth.tar")


def kind_of(path: str | os.PathLike) -> str:
    """Return the kind of weights of a file by its name; "raw" for a name that is not one of best weights."""
    name = BEST_NAMES.fullmatch(Path(path).name)
    return name[1][1:] if name and name[1] else RAW


def list_bests(out_dir: str | os.PathLike) -> dict[str, Path]:
    """Return the files of the best weights of a run by kind, in order of precedence."""
    found = {kind_of(path): path for path in Path(out_dir).glob("best*") if BEST_NAMES.fullmatch(path.name)}
    return {kind: found[kind] for kind in by_precedence(found) if found[kind].is_file()}


def find_best(out_dir: str | os.PathLike, ema: bool = True) -> Path | None:
    """Return the file of the best weights of a run, of the first kind that has one; None: there is none.

    Without `ema`, that of a moving average is an older one.
    """
    return next((path for kind, path in list_bests(out_dir).items() if ema or kind != EMA), None)


def merge_adapters(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return weights to which the adapters of FINETUNE.LORA are added, see models/lora.py; without any, they stay."""
    plain = {name: tensor for name, tensor in tensors.items() if not name.rpartition(".")[2].startswith("lora_")}
    for layer in {name.rpartition(".")[0] for name in tensors.keys() - plain.keys()}:
        names = [f"{layer}.{name}" for name in ("weight", "lora_scale", "lora_up", "lora_down")]
        if not tensors.keys() >= {*names}:  # of another program
            return tensors
        weight, scale, up, down = (tensors[name] for name in names)
        plain[names[0]] = weight + scale * (up @ down)
    return plain


def find_weights_file(path: str) -> Path:
    """Return the weights file at `path`, or in the folder of a run or of a model of the Hugging Face Hub there.

    Of a run, these are the best weights, those of an average if there are some.

    Raises:
        ConfigError: there is no such file; the message has no key.
    """
    found = Path(path).expanduser()
    if found.is_file():
        return found
    if not found.is_dir():
        raise ConfigError(f"no such file or folder: {path}")
    names = [*(path.name for path in list_bests(found).values()), *HUB_NAMES]
    if file := next((found / name for name in names if (found / name).is_file()), None):
        return file
    expected = ", ".join((best_path("").name, *HUB_NAMES))
    raise ConfigError(f"{path} is a folder without {expected}; fix: name the file")


def read_class_names(path: str) -> tuple[str, ...]:
    """Return the names of the classes of a weights file, or of the weights of a run or a model in a folder.

    Raises:
        ConfigError: there are no weights, they cannot be read, or they name no classes.
    """
    from distribuuuu.checkpoint.io import is_list_of, read_checkpoint

    try:
        file = find_weights_file(path)
        card = find_card(file)
        names = load_json(card).get("label_names") if card else read_checkpoint(file).get("classes")
    except ConfigError as error:
        raise ConfigError(Problem("TEST.LABELS", str(error))) from error
    if not is_list_of(names, str):
        fix = "fix: TEST.LABELS imagenet for the 1000 classes of ImageNet, else TRAIN.DATASET with all class folders"
        raise ConfigError(Problem("TEST.LABELS", f"{file} does not name its classes; {fix}"))
    return tuple(names)


def find_card(path: str | os.PathLike) -> Path | None:
    """Return the config.json of a folder of weights at a path, or with the weights there; None: there is none."""
    folder = Path(path).parent if Path(path).name in HUB_NAMES else Path(path)
    card = folder / "config.json"
    return card if card.is_file() and any((folder / name).is_file() for name in HUB_NAMES) else None
