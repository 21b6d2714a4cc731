"""Training state: the content of a checkpoint; `Run.save` adds the task and what is known of the evaluation.

A checkpoint is a dict:

- `epoch`: the last finished epoch, from 0; -1: none. `step`: steps done since. After the last step of an epoch, and
  before `epoch` is increased, the evaluation of the epoch is pending.
- `state_dict`, `optimizer`, `optimizer_names`: weights, optimizer state, names of its parameters by group.
- `best_acc1`, `best_epoch`: the best value of `best_metric`, in percent, and its epoch, from 0.
- `ema_state_dict`, `best_ema_acc1`, `best_ema_epoch`: the same for the moving average of the weights, if there is one,
  and likewise for the kinds of `Task.averages`. `unsaved`: names and SHA-256 of the tensors that are left out, if any.
- `scaler`: state of the gradient scaler; empty without one.
- `config`: every option, DATA.MEAN and DATA.STD as used; `plugins`: the SHA-256 of each; also `seed`, `classes`,
  `arch`, `global_batch`. Files of best weights also have `weights`: "raw" or "ema".
- `buffers`: for each process, the buffers of the models that differ from those of the first one.
- `meter`: for each process, its sums since the last row of metrics. `num_skipped`: steps that the task has skipped.
  `images_seen`: images of all steps, of which epochs may have different numbers.
- `bests`: loss, metrics and epoch, from 1, of the best evaluation of each kind of weights.
- `evaluations`, `evaluated_at`: the results of the evaluation that precedes it, if there is one; the position, as in
  its file name, of the checkpoint before that evaluation. `finished`: whether no epoch is left.
- `chosen`: the images that the epoch takes, if the task chose some; `ordered`: whether they are in order.
- `task`: the state of the task: `shared` by the processes, and `by_rank` where they differ.
- `data`: number of images and digest of the training and the evaluation data; `jobs`: those of the
  launcher that wrote it, see `list_jobs`.
- `seconds`, `timing`, `peak_memory_mib`: time and memory over all starts of the run.
- `checkpoints`: names of the checkpoints that the run wrote and keeps.

The 2021 distribuuuu wrote `epoch`, `state_dict`, `optimizer` and `best_acc1`, with the same meaning.
"""

import itertools
import logging
import os
import resource
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distribuuuu.checkpoint.io import WEIGHTS_ONLY, CheckpointError, load_optimizer, load_state_dict
from distribuuuu.checkpoint.weights_files import EMA, RAW, Best, best_key, describe_kind, tensors_key
from distribuuuu.config.errors import counted
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.sharding import full_state_dict
from distribuuuu.optim.precision import Precision
from distribuuuu.tasks.metrics import Meter

if TYPE_CHECKING:
    from distribuuuu.optim.ema import Ema

logger = logging.getLogger(__name__)

# Entries of a checkpoint that are attributes of the state.
_PLAIN = ("step", "best_metric", "seed", "num_skipped", "images_seen", "arch", "config", "plugins", "global_batch",
          "data", "jobs", "seconds")  # fmt: skip


@dataclass
class TrainState:
    """The content of a checkpoint, see above.

    Attributes:
        meter: loss and metrics of the training steps since the last row of metrics. clock: the times of their parts.
        epoch: number of finished epochs. step: number of steps since.
        averages: averages of the weights by kind, e.g. "ema", with the attributes and methods of `Ema`.
        unsaved: names and SHA-256 of the tensors that checkpoints leave out.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    seed: int
    arch: str
    classes: tuple[str, ...]
    global_batch: int
    meter: Meter
    epoch: int = 0
    step: int = 0
    num_skipped: int = 0
    images_seen: int = 0
    chosen: torch.Tensor | None = None
    ordered: bool = False
    precision: Precision = field(default_factory=Precision)
    averages: "dict[str, Ema]" = field(default_factory=dict)
    unsaved: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    plugins: dict[str, str | None] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=lambda: {"images": 0, "seconds": 0.0})
    jobs: list[str] = field(default_factory=list)
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    best_metric: str = "top1"
    higher_is_better: bool = True
    bests: dict[str, Best] = field(default_factory=lambda: defaultdict(Best))

    def __post_init__(self):
        self._seconds_before, self._peak_before, self._started = 0.0, 0.0, time.perf_counter()
        self.clock = StepClock(self.precision.device_type)

    @property
    def seconds(self) -> float:
        """Duration of the run so far, over all its starts."""
        return self._seconds_before + time.perf_counter() - self._started

    def peak_memory_mib(self) -> float:
        """Return the peak memory over all starts: on CUDA the maximum over all processes, else of this process.

        Every process must call it.
        """
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        peak = float(local_peak_bytes(device))
        peak = dist.all_reduce_max([peak])[0] if device.type == "cuda" else peak
        return max(self._peak_before, round(peak / 2**20, 1))

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models to evaluate, by kind of weights."""
        return {RAW: self.model, **{kind: average.model for kind, average in self.averages.items()}}

    @property
    def ema(self) -> nn.Module | None:
        """The moving average of the weights; None without one."""
        return self.averages[EMA].model if EMA in self.averages else None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint; complete on the main process only. Every process must call it."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "epoch": self.epoch - 1,
            "classes": list(self.classes),
            **{tensors_key(kind): full_state_dict(model) for kind, model in self.models.items()},
            **{best_key(kind, "acc1"): self.bests[kind].value for kind in self.models},
            **{best_key(kind, "epoch"): self.bests[kind].epoch for kind in self.models},
            "bests": {
                kind: {
                    "epoch": best.epoch + 1 if best.epoch >= 0 else None,
                    **(best.metrics or {self.best_metric: best.value}),
                }
                for kind, best in ((kind, self.bests[kind]) for kind in self.models)
            },
            "optimizer": self.optimizer.state_dict(),
            "optimizer_names": self._optimizer_names(),
            "timing": {**self.timing},
            "peak_memory_mib": self.peak_memory_mib(),
            "meter": dist.gather_objects(self.meter.state_dict()),
            "scaler": self.precision.state_dict(),
            **({} if self.chosen is None else {"chosen": self.chosen, "ordered": self.ordered}),
            **({"unsaved": self.unsaved} if self.unsaved else {}),
        }

    def load_dict(self, content: dict[str, Any], path: str | os.PathLike) -> None:
        """Restore the content of a checkpoint of this version or of the 2021 distribuuuu, for `restore_state`."""
        if self.unsaved or "unsaved" in content:
            from distribuuuu.checkpoint.unsaved import add_unsaved

            content = add_unsaved(content, self.unsaved, self.model.state_dict(), path)
        load_state_dict(self.model, content["state_dict"], path)
        load_optimizer(self.optimizer, content["optimizer"], path)
        self._check_groups(content, path)
        self.epoch, self.step = content["epoch"] + 1, content.get("step", 0)
        self._load_bests(content, path)
        self._seconds_before, self._started = float(content.get("seconds", 0.0)), time.perf_counter()
        self.precision.load_state_dict(content.get("scaler", {}))
        for kind, average in self.averages.items():
            tensors = content.get(tensors_key(kind))
            load_state_dict(average.model, tensors or content["state_dict"], path)
            if not tensors:
                logger.warning("%s has no %s; it starts from the raw weights", path, describe_kind(kind))
        if dist.is_distributed():
            from distribuuuu.distributed.replicas import load_buffers

            load_buffers(self.models, content.get("buffers", ()))
        saved, seed = int(content.get("seed", self.seed)), self.config.get("RNG_SEED")
        if seed not in (None, saved):
            logger.warning("RNG_SEED: the checkpoint has seed %d; the run continues with %d", saved, seed)
        self.seed = saved if seed is None else seed
        timing = content.get("timing", self.timing)
        self.timing.update(images=timing["images"], seconds=timing["seconds"])  # in place: the log has it too
        self._peak_before = content.get("peak_memory_mib") or 0.0
        self.load_meter(content.get("meter", []))
        self.num_skipped, self.images_seen = int(content.get("num_skipped", 0)), int(content.get("images_seen", -1))
        self.chosen, self.ordered = content.get("chosen"), bool(content.get("ordered"))
        self._convert_step(int(content.get("global_batch", self.global_batch)))

    def _load_bests(self, content: dict[str, Any], path: str | os.PathLike) -> None:
        """Restore the best evaluations, unless another metric selected them. Without `best_metric`, it is the same."""
        self.bests.clear()
        if (metric := content.get("best_metric", self.best_metric)) != self.best_metric:
            logger.warning("%s: best weights were selected by %s; selection restarts with %s", path, metric,
                           self.best_metric)  # fmt: skip
            return
        for kind in self.models:
            best = self.bests[kind] = Best()
            best.value = float(content.get(best_key(kind, "acc1"), 0.0))
            best.epoch = int(content.get(best_key(kind, "epoch"), -1))
            metrics = content.get("bests", {}).get(kind, {})
            best.metrics = {name: value for name, value in metrics.items() if name != "epoch"}

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, see `Meter.read`, and how many steps the run has skipped, if any.

        Every process must call it.
        """
        return self.meter.read() | ({"skipped_steps": self.num_skipped} if self.num_skipped else {})

    def load_meter(self, states: list[dict[str, torch.Tensor]]) -> None:
        """Restore the meter of each process; if the number of processes has changed, the main one gets all sums."""
        if len(states) == dist.world_size():
            states = [states[dist.rank()]]
        elif not dist.is_main():
            states = []
        self.meter.load_state_dict(states)

    def _optimizer_names(self) -> list[list[str]]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [[names[parameter] for parameter in group["params"]] for group in self.optimizer.param_groups]

    def _check_groups(self, content: dict[str, Any], path: str | os.PathLike) -> None:
        """Raise CheckpointError if the optimizer, which stores parameters by number, now numbers them differently."""
        expected = self._optimizer_names()
        if content.get("optimizer_names", expected) != expected:
            options = "FINETUNE.LR_MULT, FINETUNE.FREEZE, OPTIM.LAYER_DECAY or a weight decay has changed"
            message = f"the parameter groups of its optimizer differ: {options}; fix: set it back"
            raise CheckpointError(f"{path}: {message}, or {WEIGHTS_ONLY}")

    def _convert_step(self, old_batch: int) -> None:
        """Convert the step to the current global batch, so that no image of the epoch is skipped."""
        if self.step and old_batch != self.global_batch:
            seen = self.step * old_batch
            self.step = seen // self.global_batch
            self.load_meter([])
            logger.warning("global batch changed from %d to %d; repeated in this epoch: %s", old_batch,
                           self.global_batch, counted(seen - self.step * self.global_batch, "image"))  # fmt: skip

    @property
    def best_value(self) -> float:
        """The best value of the first metric over all kinds of weights."""
        values = [self.bests[kind].value for kind in self.models]
        return max(values) if self.higher_is_better else min(values)

    def finish_step(self) -> None:
        """Count a step as done, and update the averages of the weights."""
        self.step, self.images_seen = self.step + 1, self.images_seen + self.global_batch
        for average in self.averages.values():
            average.finish_step(self.epoch, self.step - 1, self.images_seen, self.global_batch)

    def finish_epoch(self, evaluations: dict[str, dict[str, float]] | None = None) -> int:
        """Count the epoch as done, with the results of its evaluation by kind of weights, if any; return it, from 0."""
        for kind, metrics in (evaluations or {}).items():
            self.bests[kind].update(metrics, self.best_metric, self.epoch, self.higher_is_better)
        self.epoch, self.step = self.epoch + 1, 0
        return self.epoch - 1


class StepClock:
    """The seconds of the parts of steps: on CUDA by events that the device records, else by the host's clock."""

    def __init__(self, device_type: str):
        self._now = record_event if device_type == "cuda" else time.perf_counter
        self._marks: list[tuple[str, Any]] = []

    def mark(self, part: str = "") -> None:
        """End a part, which began with the mark before; the time before a mark without a name counts for no part."""
        self._marks += [(part, self._now())]

    def pop(self) -> dict[str, float]:
        """Return the seconds of each part since the last call; on CUDA, the device must have done all of it."""
        marks, self._marks = self._marks, []
        spent = dict.fromkeys([part for part, _ in marks], 0.0)
        for (_, first), (part, last) in itertools.pairwise(marks):
            spent[part] += seconds_between(first, last)
        return {part: seconds for part, seconds in spent.items() if part}


def record_event() -> Any:
    """Return an event that the device records after all queued work."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Any, last: Any) -> float:
    """Return the seconds between two marks that are over."""
    return last - first if isinstance(first, float) else 1e-3 * first.elapsed_time(last)


def local_peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: on its CUDA device, else on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
