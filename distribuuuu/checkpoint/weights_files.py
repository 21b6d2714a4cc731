"""Kinds of weights, the best weights of each kind, and the file of weights that an option names. Imports no torch.

A new kind, e.g. another average, is an entry of KINDS and of `build_averages` in optim/ema.py. Names of files, entries
of checkpoints, records and reports follow.
"""

import math
import os
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.config_node import get_value

RAW = "raw"
# File names of weights in a model's repository on the Hugging Face Hub, in the order of preference.
HUB_NAMES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class WeightsKind:
    """A kind of weights.

    Attributes:
        file_name: the file of the best ones, in OUT_DIR.
        tensors_key: the entry of a checkpoint with the state dict.
        value_key: the entry with the best value of the first metric.
        epoch_key: the entry with the epoch of that value.
        average: the average that they are, in reports; "": they are the weights that the optimizer updates.
        option: the option without which a run has none; "": every run has them.
    """

    file_name: str
    tensors_key: str
    value_key: str
    epoch_key: str
    average: str = ""
    option: str = ""


# By the name in records, in order of precedence: of several kinds, a reader of a run takes the first.
KINDS = {
    "ema": WeightsKind(
        "best_ema.pth.tar", "ema_state_dict", "best_ema_acc1", "best_ema_epoch", "moving average", "EMA.HALF_LIFE"
    ),
    RAW: WeightsKind("best.pth.tar", "state_dict", "best_acc1", "best_epoch"),
}


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


def build_kinds(cfg) -> list[str]:
    """Return the kinds of weights of a run, in order of precedence."""
    return [name for name, kind in KINDS.items() if not kind.option or get_value(cfg, kind.option)]


def common_kind(records: Sequence[Container[str]]) -> str:
    """Return the first kind, in order of precedence, that every record has results of; "raw" if there is none."""
    return next((kind for kind in KINDS if all(kind in results for results in records)), RAW)


def best_paths(out_dir: str | os.PathLike) -> dict[str, Path]:
    """Return the files of the best weights of a run by kind, in order of precedence."""
    return {name: Path(out_dir) / kind.file_name for name, kind in KINDS.items()}


def find_best(out_dir: str | os.PathLike, kinds: Iterable[str] = KINDS) -> Path | None:
    """Return the file of the best weights of a run, of the first of the kinds that has one; None: there is none."""
    paths = best_paths(out_dir)
    return next((paths[kind] for kind in kinds if paths[kind].is_file()), None)


def kind_of(path: str | os.PathLike) -> str:
    """Return the kind of weights of a file by its name; "raw" for a name that is not one of best weights."""
    return next((name for name, kind in KINDS.items() if kind.file_name == Path(path).name), RAW)


def best_state_dict(content: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of a checkpoint, of the first kind of weights that it has."""
    return next(content[kind.tensors_key] for kind in KINDS.values() if content.get(kind.tensors_key))


def find_weights_file(path: str, ema: bool = True) -> Path:
    """Return the weights file at `path`, in the folder of a run there, or in one that huggingface_hub has downloaded.

    Of a run, these are the best weights; with `ema`, those of an average if there are some.
    The folder holds `model.safetensors` or `pytorch_model.bin`, or it is a repository of the Hub's cache with them in
    `snapshots/REVISION`; of several revisions, the one that `refs/main` names is used.

    Raises:
        ConfigError: there is no such file; the message has no key.
    """
    found = Path(path).expanduser()
    if found.is_file():
        return found
    if not found.is_dir():
        raise ConfigError(f"no such file or folder: {path}")
    from distribuuuu.checkpoint.hub_cache import find_snapshots

    for folder in (found, *find_snapshots(found)):
        if best := find_best(folder, sorted(KINDS, key=lambda kind: kind != RAW and not ema)):
            return best
        for name in HUB_NAMES:
            if (folder / name).is_file():
                return folder / name
    names = ", ".join((KINDS[RAW].file_name, *HUB_NAMES))
    raise ConfigError(f"{path} is a folder without {names}; fix: name the file")


def find_card(path: str | os.PathLike) -> Path | None:
    """Return the config.json of an exported folder at a path, or with the weights there; None: there is none."""
    weights = Path(path) if Path(path).name == HUB_NAMES[0] else Path(path) / HUB_NAMES[0]
    card = weights.with_name("config.json")
    return card if weights.is_file() and card.is_file() else None


def has_card(path: Path) -> bool:
    """Tell whether a file of weights has a config.json, so that `local-dir:FOLDER` names them."""
    return path.name in HUB_NAMES and path.with_name("config.json").is_file()
