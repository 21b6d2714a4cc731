"""Accumulation of the loss and the metrics on the device, and their exact reduction over the processes."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from distribuuuu.checkpoint.snapshot import NonFiniteError
from distribuuuu.config import ConfigError
from distribuuuu.distributed.comm import gather_objects, gather_rows, scaled_all_reduce
from distribuuuu.tasks.metrics import Mean, Metric, ScoreMetric, StepOutput, SumMetric, display_names, join, one_hot

# Logits of a process that a checkpoint stores at most, 20 MiB; with more, a resumed run starts a new accumulation.
_MAX_SAVED = 2**22
# Batches that are kept until their metrics are computed together, and their logits at most.
_MAX_PENDING, _MAX_PENDING_LOGITS = 64, 2**20
# Names of a row of metrics, and of columns of the table, that a task cannot use.
_RESERVED = ("count", "loss", "lr", "kind", "epoch", "step", "stage", "time", "seconds", "images_per_s", "img/s",
             "wait", "data", "eta_s", "eta", "skipped_steps", "layer_norms")  # fmt: skip


class NonFiniteLoss(NonFiniteError):
    """The training loss is infinite or NaN; raised by every process at the same read of the meter."""


def check_finite(metrics: dict[str, float]) -> dict[str, float]:
    """Return the values that a meter has read, unchanged.

    Raises:
        NonFiniteLoss: the mean loss is infinite or NaN.
    """
    if not math.isfinite(metrics["loss"]):
        raise NonFiniteLoss(f"the training loss is {metrics['loss']}")
    return metrics


def _check_shape(metric: SumMetric, sums: torch.Tensor) -> torch.Tensor:
    """Return the sums of a batch; raise ConfigError if a metric of the user returns another shape than it has named."""
    if sums.shape != metric.shape:
        name = f"{type(metric).__name__}.batch_sums"
        raise ConfigError(f"{name}: got shape {tuple(sums.shape)}; expected {tuple(metric.shape)}, its `shape`")
    return sums


class Meter:
    """Number of images, mean loss, metrics, and means of other `StepOutput.sums`, over all batches since the last read.

    All sums are in one tensor on the device: `update` does not synchronize, and `read` needs one collective for them.
    Sums are added over the processes before they are divided, so every image has the same weight. Several batches are
    added at a time: right after a step, each small operation takes long.

    Args:
        metrics: metrics by name.
        num_classes: columns of the logits.
        device: the device of the batches.
    """

    def __init__(self, metrics: Mapping[str, Metric], num_classes: int, device: torch.device):
        self._sum_metrics = {name: metric for name, metric in metrics.items() if isinstance(metric, SumMetric)}
        self._score_metrics = {name: metric for name, metric in metrics.items() if isinstance(metric, ScoreMetric)}
        self._names = list(metrics)
        # The sums of `StepOutput.sums` that no metric shows, and the names that all processes have agreed on.
        self._others: dict[str, torch.Tensor] = {}
        self._agreed: list[str] = []
        keys = (metric.key for metric in metrics.values() if isinstance(metric, Mean))
        self._shown = {*metrics, *display_names(metrics).values(), *keys}
        # MPS has no float64; a float32 sum is exact for counts below 2^24.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        num_sums = 2 + sum(math.prod(metric.shape) for metric in self._sum_metrics.values())
        self._sums = torch.zeros(num_sums, dtype=dtype, device=device)
        no_scores = torch.empty(0, num_classes, device=device)
        self._no_scores = no_scores, no_scores.to(torch.uint8)
        self._scores = [self._no_scores]
        self._pending: list[StepOutput] = []

    def update(self, output: StepOutput) -> None:
        """Add one batch."""
        self._pending.append(output.detach())
        num = len(self._pending)
        if self._score_metrics or num == _MAX_PENDING or num * output.logits.numel() >= _MAX_PENDING_LOGITS:
            self._add_pending()

    @torch.no_grad()
    def _add_pending(self) -> None:
        """Add the pending batches to the sums: counts at once, other values one after the other, as they round."""
        pending, self._pending = self._pending, []
        joined = join(pending)
        count, loss, parts = self._split(self._sums)
        count += sum(output.num_images for output in pending)
        for output in pending:
            loss.add_(output.loss, alpha=output.num_images)
            self._add_others(output.sums)
        for name, metric in self._sum_metrics.items():
            for output in joined if metric.is_count else pending:
                parts[name].add_(_check_shape(metric, metric.batch_sums(output)))
        for output in joined if self._score_metrics else ():
            self._scores.append((output.logits.float(), one_hot(output.targets, output.logits.shape[1])))

    def _add_others(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Add sums that no metric shows.

        Raises:
            ConfigError: a new one has a reserved name or more than one value.
        """
        for name, value in sums.items():
            if name in self._shown:
                continue
            if name not in self._others:
                if name in _RESERVED or value.dim():
                    expected = f"shape () and none of the names {', '.join(_RESERVED)}"
                    raise ConfigError(f"StepOutput.sums: got {name!r}, shape {tuple(value.shape)}; expected {expected}")
                with torch.inference_mode(False):  # `read` is called after an evaluation
                    self._others[name] = self._sums.new_zeros(())
            self._others[name].add_(value)

    def _reduce(self) -> tuple[torch.Tensor, list[float]]:
        """Return the sums over all processes on the CPU, and those of the names in `_agreed`.

        The processes first agree on new names, since one whose share of an evaluation is empty has found none.
        """
        while True:
            zero, num_new = self._sums.new_zeros(()), len(self._others.keys() - set(self._agreed))
            others = [self._others.get(name, zero) for name in self._agreed]
            sums = torch.cat([self._sums, torch.stack([*others, zero + num_new])])
            scaled_all_reduce([sums], scale=1.0)
            own, *means, unknown = sums.cpu().split([len(self._sums), *[1] * (len(others) + 1)])
            if not unknown:
                return own, [mean.item() for mean in means]
            self._agreed = list(dict.fromkeys(chain(*gather_objects(list(self._others)))))

    def read(self) -> dict[str, float]:
        """Return count, loss, metrics and other means over all processes, and reset. Every process must call it."""
        self._add_pending()
        (sums, others), scores = self._reduce(), self._scores
        for tensor in (self._sums, *self._others.values()):
            tensor.zero_()
        self._scores = [self._no_scores]
        count, loss, parts = self._split(sums)
        num = count.item()
        values = {name: float(metric.value(parts[name], num)) for name, metric in self._sum_metrics.items()}
        if self._score_metrics:
            logits, targets = (gather_rows(torch.cat(parts)) for parts in zip(*scores, strict=True))
            values |= {name: float(metric.value(logits, targets)) for name, metric in self._score_metrics.items()}
        # The two divisions round differently; both are kept, so that recorded results stay bitwise the same.
        mean_loss = loss.item() / (num or math.nan) if self._score_metrics else loss.item() * (1 / (num or math.nan))
        values |= {name: total / (num or math.nan) for name, total in zip(self._agreed, others, strict=True)}
        return {"count": int(num), "loss": mean_loss, **{name: values[name] for name in (*self._names, *self._agreed)}}

    def _split(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return views of all sums: the number of images (), the loss (), and those of each metric."""
        shapes = {name: metric.shape for name, metric in self._sum_metrics.items()}
        count, loss, *parts = sums.split([1, 1, *map(math.prod, shapes.values())])
        views = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return count.view(()), loss.view(()), views

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and logits of this process since the last read; zeros if the logits exceed `_MAX_SAVED`."""
        self._add_pending()
        is_small = sum(logits.numel() for logits, _ in self._scores) <= _MAX_SAVED
        keep = torch.Tensor.cpu if is_small else lambda sums: torch.zeros_like(sums, device="cpu")
        state: dict[str, Any] = {"sums": keep(self._sums)}
        if self._others:
            state["others"] = {name: keep(sums) for name, sums in self._others.items()}
        if self._score_metrics:
            parts = zip(*(self._scores if is_small else [self._no_scores]), strict=True)
            state["scores"], state["applies"] = (torch.cat(part).cpu() for part in parts)
        return state

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Replace the accumulated values by the sum of the states of some processes; without states, by zeros.

        States of other metrics or other classes are ignored.
        """
        self._pending, self._others, self._agreed = [], {}, []
        self._sums.zero_()
        self._scores = [self._no_scores]
        empty = self.state_dict()
        for saved in states:
            state = {name: value for name, value in saved.items() if name != "others"}
            if not _is_compatible(state, empty):
                continue
            self._sums += state["sums"].to(self._sums)
            self._add_others(saved.get("others", {}))
            if self._score_metrics:
                device = self._sums.device
                self._scores.append((state["scores"].to(device), state["applies"].to(device)))


def _is_compatible(state: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> bool:
    """Return whether a saved state has the names, types and shapes (except the number of rows) of a meter's own."""
    return state.keys() == own.keys() and all(
        isinstance(state[name], torch.Tensor) and state[name].dtype == value.dtype
        and (state[name].dim(), state[name].shape[-1:]) == (value.dim(), value.shape[-1:])
        for name, value in own.items()
    )  # fmt: skip
