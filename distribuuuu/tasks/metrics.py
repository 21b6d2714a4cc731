"""Metrics: their base classes, top-1 and top-k, and the meter that accumulates them exactly over batches and processes.

A new metric is one class in this file or in a new file of this package. It is decorated with
`@METRICS.register("name")` and selected by TRAIN.METRICS or TEST.METRICS. Most metrics derive from `SumMetric`. The
value appears in the table on the terminal, metrics.jsonl, TensorBoard, results.json and the result tables.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import NonFiniteError
from distribuuuu.config.registry import METRICS
from distribuuuu.distributed.comm import gather_objects, gather_rows, scaled_all_reduce

# Batches that are kept until their metrics are computed together, and their logits at most.
_MAX_PENDING, _MAX_PENDING_LOGITS = 64, 2**20
# Names of a row of metrics, and of columns of the table, that a task cannot use.
_RESERVED = ("count", "loss", "lr", "kind", "epoch", "step", "stage", "time", "seconds", "images_per_s", "img/s",
             "wait", "data", "eta_s", "eta", "skipped_steps")  # fmt: skip


@dataclass
class StepOutput:
    """Loss of a micro-batch of N images, and the inputs of the metrics, whose memory later steps do not change.

    Attributes:
        loss: the mean loss ().
        logits: (N, classes), or what the metrics of the task compare with the targets; no gradient flows through it.
        targets: int64 labels (N,), or uint8 (N, classes) where an image has several labels.
        sums: sums () over the N images of further quantities by name; their means are shown with the metrics.
    """

    loss: torch.Tensor
    logits: torch.Tensor
    targets: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def num_images(self) -> int:
        """N."""
        return self.targets.shape[0]

    def detach(self) -> "StepOutput":
        """Return it without gradients; on CUDA a copy, since the replay of a CUDA graph writes to the same memory."""
        keep = (lambda value: value.detach().clone()) if self.loss.is_cuda else torch.Tensor.detach
        sums = {name: keep(torch.as_tensor(value)) for name, value in self.sums.items()}
        return StepOutput(keep(self.loss), keep(self.logits), keep(self.targets), sums)


def rank_classes(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the classes with the k largest scores (N, classes), the largest first: int64 (N, k).

    Of equal scores, which bfloat16 often has, the first class counts, as in `argmax`; the order of `topk` is undefined.
    """
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k]


def join(outputs: Sequence[StepOutput]) -> Sequence[StepOutput]:
    """Return several batches as one, for counts; themselves if their shapes, e.g. the numbers of columns, differ."""
    if len({(output.logits.shape[1:], output.targets.shape[1:]) for output in outputs}) != 1:
        return outputs
    logits, targets = (torch.cat([getattr(output, name) for output in outputs]) for name in ("logits", "targets"))
    return [StepOutput(outputs[0].loss, logits, targets)]


class Metric:
    """Base class of metrics. Values are percentages by convention, e.g. 76.1.

    Args:
        num_classes: columns of the logits.
        topk: TRAIN.TOPK.
    """

    # Whether the best checkpoint is the one with the highest value.
    higher_is_better = True
    # Whether the metric is defined for one label per image, and for several labels per image.
    for_labels, for_multilabel = True, False

    def __init__(self, num_classes: int, topk: int = 1):
        self.num_classes = num_classes
        self.topk = min(topk, num_classes)

    def label(self, name: str) -> str:
        """Return the display name of the metric that is registered as `name`."""
        return name


class SumMetric(Metric):
    """A metric computed from sums over the images, e.g. the number of correct predictions."""

    # Whether the sums are counts: exact, so the meter may compute those of several batches at once.
    is_count = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the sums; () for a single sum."""
        return ()

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
        """Return the sums over one batch, a tensor of `shape`, without synchronizing with the device."""
        raise TypeError(f"{type(self).__name__} defines no batch_sums")

    def value(self, sums: torch.Tensor, count: float) -> float:
        """Return the value from the sums over all `count` images, float64 on the CPU; by default a percentage."""
        return 100 * sums.item() / count if count else math.nan  # one rounding: all of 372 are 100


class ScoreMetric(Metric):
    """A metric that needs the logits of all images at once, e.g. to rank them."""

    def value(self, logits: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the value from float32 logits (N, classes) and uint8 targets (N, classes) of all images."""
        raise TypeError(f"{type(self).__name__} defines no value")


class Mean(SumMetric):
    """Mean over the images of a quantity in `StepOutput.sums`; not a percentage.

    It is shown without this metric too; with it, it can select the best checkpoint.

    Args:
        key: the name of the quantity in `StepOutput.sums`.
        higher_is_better: whether the best checkpoint is the one with the highest value.
    """

    def __init__(self, key: str, higher_is_better: bool = True):
        super().__init__(num_classes=1)
        self.key = key
        self.higher_is_better = higher_is_better

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
        """Return the sum that the task computed."""
        return output.sums[self.key]

    def value(self, sums: torch.Tensor, count: float) -> float:
        """Return the mean."""
        return sums.item() / count if count else math.nan


def build_metrics(key: str, names: Sequence[str], num_classes: int, topk: int, multilabel: bool) -> dict[str, Metric]:
    """Return metrics by name, in the order of the names, which the option `key` lists."""
    metrics = {name: METRICS.get(name)(num_classes, topk) for name in names}
    flag = "for_multilabel" if multilabel else "for_labels"
    undefined = [name for name, metric in metrics.items() if not getattr(metric, flag)]
    if undefined:
        targets = "several labels per image" if multilabel else "one label per image"
        defined = ", ".join(name for name in METRICS.names() if getattr(METRICS.get(name), flag))
        raise ConfigError(f"{key}: got {', '.join(undefined)}; expected metrics of {targets}: {defined}")
    return metrics


def display_names(metrics: Mapping[str, Metric]) -> dict[str, str]:
    """Return the display name of each metric, e.g. {"topk": "top5"}."""
    return {name: metric.label(name) for name, metric in metrics.items()}


def hard_labels(targets: torch.Tensor) -> torch.Tensor:
    """Return int64 labels (N,) for soft targets: the class with the largest share; return other targets unchanged."""
    return targets.argmax(dim=1) if targets.is_floating_point() else targets


def one_hot(targets: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return labels (N,), or targets (N, classes) that are 0 or 1, as uint8 (N, classes)."""
    if targets.ndim == 2:
        return targets.to(torch.uint8)
    return targets.unsqueeze(1).eq(torch.arange(num_classes, device=targets.device)).to(torch.uint8)


@METRICS.register("topk")
class TopK(SumMetric):
    """Share of the images whose label is among the k classes with the largest logits; k is TRAIN.TOPK."""

    is_count = True

    def label(self, name: str) -> str:
        return f"top{self.topk}"

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
        return self.hits(output).sum()

    def hits(self, output: StepOutput) -> torch.Tensor:
        """Return bool (N, k): whether the class at each rank is the label."""
        return rank_classes(output.logits, self.topk).eq(output.targets.unsqueeze(1))


@METRICS.register("top1")
class Top1(TopK):
    """Accuracy: share of the images whose label has the largest logit; ties are ordered as in `topk`."""

    def label(self, name: str) -> str:
        return name

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
        return self.hits(output)[:, 0].sum()


def check_loss(metrics: dict[str, float]) -> dict[str, float]:
    """Return the values that a meter has read, unchanged.

    Raises:
        NonFiniteError: the mean loss is infinite or NaN, of at least one image; on every process at the same read.
    """
    if metrics.get("count", 1) and not math.isfinite(metrics["loss"]):
        raise NonFiniteError(f"the training loss is {metrics['loss']}")
    return metrics


def _check_shape(metric: SumMetric, sums: torch.Tensor) -> torch.Tensor:
    """Return the sums of a batch; raise ConfigError if a metric of the user returns another shape than it has named."""
    if sums.shape != metric.shape:
        name = f"{type(metric).__name__}.batch_sums"
        raise ConfigError(f"{name}: got shape {tuple(sums.shape)}; expected {tuple(metric.shape)}, its `shape`")
    return sums


class Meter:
    """Number of images, mean loss, metrics, and means of other `StepOutput.sums`, over all batches since the last read.

    All sums are in one tensor on the device: `update` does not synchronize.
    Sums are added over the processes before they are divided, so every image has the same weight. Several batches are
    added at a time, because each small operation right after a step is slow.
    """

    def __init__(self, metrics: Mapping[str, Metric], num_classes: int, device: torch.device):
        self._sum_metrics = {name: metric for name, metric in metrics.items() if isinstance(metric, SumMetric)}
        self._score_metrics = {name: metric for name, metric in metrics.items() if isinstance(metric, ScoreMetric)}
        self._names = list(metrics)
        self._others: dict[str, torch.Tensor] = {}  # the sums of `StepOutput.sums` that no metric shows
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
            self.add_pending()

    @torch.no_grad()
    def add_pending(self) -> None:
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
        """Add sums that no metric shows."""
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

    def _reduce(self) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the sums over all processes on the CPU, and the other sums by name.

        The processes agree on the names, since one whose share of an evaluation is empty has found none.
        """
        names = list(dict.fromkeys(chain(*gather_objects(list(self._others)))))
        others = [self._others.get(name, self._sums.new_zeros(())) for name in names]
        sums = torch.cat([self._sums, *(total.view(1) for total in others)])
        scaled_all_reduce([sums], scale=1.0)
        own, *totals = sums.cpu().split([len(self._sums), *[1] * len(names)])
        return own, dict(zip(names, (total.item() for total in totals), strict=True))

    def read(self) -> dict[str, float]:
        """Return count, loss, metrics and other means over all processes, and reset. Every process must call it."""
        self.add_pending()
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
        values |= {name: total / (num or math.nan) for name, total in others.items()}
        return {"count": int(num), "loss": mean_loss, **{name: values[name] for name in (*self._names, *others)}}

    def _split(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return views of all sums: the number of images (), the loss (), and those of each metric."""
        shapes = {name: metric.shape for name, metric in self._sum_metrics.items()}
        count, loss, *parts = sums.split([1, 1, *map(math.prod, shapes.values())])
        views = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return count.view(()), loss.view(()), views

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and logits of this process since the last read."""
        self.add_pending()
        state: dict[str, Any] = {"sums": self._sums.cpu()}
        if self._others:
            state["others"] = {name: sums.cpu() for name, sums in self._others.items()}
        if self._score_metrics:
            state["scores"], state["applies"] = (torch.cat(part).cpu() for part in zip(*self._scores, strict=True))
        return state

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Replace the accumulated values by the sum of the states of some processes; without states, by zeros.

        States of other metrics or other classes are ignored.
        """
        self._pending, self._others = [], {}
        self._sums.zero_()
        self._scores = [self._no_scores]
        empty = self.state_dict()
        for saved in states:
            state = {name: value for name, value in saved.items() if name != "others"}
            if _describe(state) != _describe(empty):
                continue
            self._sums += state["sums"].to(self._sums)
            self._add_others(saved.get("others", {}))
            if self._score_metrics:
                device = self._sums.device
                self._scores.append((state["scores"].to(device), state["applies"].to(device)))


def _describe(state: dict[str, torch.Tensor]) -> dict[str, tuple]:
    """Return names, types and shapes, except the number of rows, of a meter's state."""
    return {name: (value.dtype, value.dim(), value.shape[-1:]) for name, value in state.items()}
