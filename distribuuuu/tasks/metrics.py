"""Metrics, accumulated on the device and reduced exactly: sums are added over the processes, then divided.

A new metric is one class here or in a file of its own in this package, decorated with `@METRICS.register("name")` and
named in TRAIN.METRICS or TEST.METRICS. Most derive from `SumMetric`. Its value appears in the table on the terminal,
metrics.jsonl, TensorBoard, results.json and the result tables.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from distribuuuu.config import ConfigError
from distribuuuu.config.registry import METRICS
from distribuuuu.distributed.comm import gather_rows, scaled_all_reduce

# Scores that are sorted at a time: it bounds the memory that the average precision takes.
_MAX_SORTED = 2**24
# Scores of a process that a checkpoint keeps, 20 MiB; with more, the accumulation restarts after a resume.
_MAX_SAVED = 2**22


class NonFiniteLoss(ConfigError):
    """The training loss was infinite or NaN since the last read; every process raises it at the same read."""

    on_all_processes = True

    def located(self, where: str, remedy: str) -> "NonFiniteLoss":
        """Return the error with the position and what can be done besides a lower learning rate."""
        return NonFiniteLoss(f"{self} {where}; fix: lower OPTIM.BASE_LR, lengthen OPTIM.WARMUP_EPOCHS, or {remedy}")


def check_finite(metrics: dict[str, float]) -> dict[str, float]:
    """Return what a meter has read.

    Raises:
        NonFiniteLoss: the mean loss is infinite or NaN.
    """
    if not math.isfinite(metrics["loss"]):
        raise NonFiniteLoss(f"the training loss is {metrics['loss']}")
    return metrics


@dataclass
class StepOutput:
    """What a step computes from a micro-batch of N images.

    Attributes:
        loss: the mean loss ().
        logits: (N, classes), or whatever the task's metrics compare with the targets; it is not differentiated again.
        targets: int64 labels (N,), or uint8 (N, classes) where an image has several labels.
        sums: sums over the N images of further quantities, by name, for metrics of the class `Mean`.
    """

    loss: torch.Tensor
    logits: torch.Tensor
    targets: torch.Tensor
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    _ranked: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def num_images(self) -> int:
        """N."""
        return len(self.targets)

    def ranked(self, k: int) -> torch.Tensor:
        """Return the classes with the k largest logits, the largest first: int64 (N, k); computed once."""
        if k not in self._ranked:
            self._ranked[k] = self.logits.topk(min(k, self.logits.shape[1])).indices
        return self._ranked[k]


class Metric:
    """Base class of metrics. Values are percentages by convention, e.g. 76.1.

    Args:
        num_classes: columns of the logits.
        topk: TRAIN.TOPK.
    """

    # Whether the greatest value is the best one, for the best checkpoint.
    higher_is_better = True
    # The targets it is defined for: one label per image, several labels per image, or both.
    for_labels, for_multilabel = True, False

    def __init__(self, num_classes: int, topk: int = 1):
        self.num_classes = num_classes
        self.topk = min(topk, num_classes)

    def label(self, name: str) -> str:
        """Return the display name of the metric that is registered as `name`."""
        return name


class SumMetric(Metric):
    """A metric whose value follows from sums over the images, e.g. the number of correct answers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the sums; () for a single one."""
        return ()

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
        """Return the sums over one batch, of `shape`; must not wait for the device."""
        raise TypeError(f"{type(self).__name__} defines no batch_sums")

    def value(self, sums: torch.Tensor, count: float) -> float:
        """Return the value from the sums over all `count` images, float64 on the CPU; by default their percentage."""
        return 100 * sums.item() * (1 / count if count else math.nan)


class ScoreMetric(Metric):
    """A metric that needs the logits of all images at once, such as a ranking of them."""

    def value(self, logits: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the value from float32 logits (N, classes) and uint8 targets (N, classes) of all images."""
        raise TypeError(f"{type(self).__name__} defines no value")


class Mean(SumMetric):
    """Mean over the images of what a task reports in `StepOutput.sums` under a name; not a percentage.

    Args:
        key: the name in `StepOutput.sums`.
        higher_is_better: whether the greatest value is the best one.
    """

    def __init__(self, key: str, higher_is_better: bool = True):
        super().__init__(num_classes=1)
        self.key = key
        self.higher_is_better = higher_is_better

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
        """Return the task's sum."""
        return output.sums[self.key].detach()

    def value(self, sums: torch.Tensor, count: float) -> float:
        """Return the mean."""
        return sums.item() / count if count else math.nan


# ------------------------------------------------------------------------------------- accumulation


class Meter:
    """Number of images, mean loss and metrics over everything since the last read; waits for nothing until then.

    All sums lie in one tensor on the device, which is reduced by one collective on a read.

    Args:
        metrics: by name.
        num_classes: columns of the logits.
        device: where the sums are kept.
    """

    def __init__(self, metrics: Mapping[str, Metric], num_classes: int, device: torch.device):
        self._sum_metrics = {name: metric for name, metric in metrics.items() if isinstance(metric, SumMetric)}
        self._score_metrics = {name: metric for name, metric in metrics.items() if isinstance(metric, ScoreMetric)}
        self._names = list(metrics)
        sizes = [math.prod(metric.shape) for metric in self._sum_metrics.values()]
        # MPS has no float64; a float32 sum is exact for counts below 2^24.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums = torch.zeros(2 + sum(sizes), dtype=dtype, device=device)
        self._count, self._loss = self._sums[:2].unbind()
        views = self._sums[2:].split(sizes) if sizes else ()
        self._views = [view.view(metric.shape) for view, metric in zip(views, self._sum_metrics.values(), strict=True)]
        no_scores = torch.empty(0, num_classes, device=device)
        self._no_scores = no_scores, no_scores.to(torch.uint8)
        self._scores = [self._no_scores]

    @torch.no_grad()
    def update(self, output: StepOutput) -> None:
        """Add one batch."""
        self._count += output.num_images
        self._loss.add_(output.loss.detach(), alpha=output.num_images)
        for metric, sums in zip(self._sum_metrics.values(), self._views, strict=True):
            sums.add_(metric.batch_sums(output))
        if self._score_metrics:
            # Copies: a compiled model may write its next logits to the same memory.
            logits = output.logits.detach().to(torch.float32, copy=True)
            self._scores.append((logits, one_hot(output.targets, logits.shape[1])))

    def read(self) -> dict[str, float]:
        """Return count, loss and the metrics over all processes, and reset; every process must call it."""
        sums, scores = self._sums.clone(), self._scores
        self._sums.zero_()
        self._scores = [self._no_scores]
        scaled_all_reduce([sums], scale=1.0)
        sums = sums.cpu()
        count, loss = sums[:2].tolist()
        values = self._read_sums(sums[2:], count)
        if self._score_metrics:
            logits, targets = (gather_rows(torch.cat(parts)) for parts in zip(*scores, strict=True))
            values |= {name: metric.value(logits, targets) for name, metric in self._score_metrics.items()}
        # The two round differently; each stays as it was when the figures in use today were recorded.
        mean_loss = loss / (count or math.nan) if self._score_metrics else loss * (1 / (count or math.nan))
        return {"count": int(count), "loss": mean_loss, **{name: values[name] for name in self._names}}

    def _read_sums(self, sums: torch.Tensor, count: float) -> dict[str, float]:
        values, start = {}, 0
        for name, metric in self._sum_metrics.items():
            end = start + math.prod(metric.shape)
            values[name] = metric.value(sums[start:end].view(metric.shape), count)
            start = end
        return values

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what this process has accumulated since the last read; nothing if that is more than `_MAX_SAVED`."""
        if not self._score_metrics:
            return {"sums": self._sums.cpu()}
        is_small = sum(logits.numel() for logits, _ in self._scores) <= _MAX_SAVED
        sums, parts = (self._sums, self._scores) if is_small else (torch.zeros_like(self._sums), [self._no_scores])
        logits, targets = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
        return {"sums": sums.cpu(), "scores": logits, "applies": targets}

    def load_state_dict(self, parts: Sequence[dict[str, torch.Tensor]]) -> None:
        """Continue from what processes have accumulated, in place of what this one has; no parts: from nothing.

        Parts of other metrics or classes are ignored.
        """
        self._sums.zero_()
        self._scores = [self._no_scores]
        own = self.state_dict()
        for part in parts:
            if not _is_alike(part, own):
                continue
            self._sums += part["sums"].to(self._sums)
            if self._score_metrics:
                device = self._sums.device
                self._scores.append((part["scores"].to(device), part["applies"].to(device)))


def _is_alike(part: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> bool:
    """Tell whether a saved state has the names, types and shapes, except for the number of rows, of a meter's own."""
    return part.keys() == own.keys() and all(
        isinstance(part[name], torch.Tensor) and part[name].dtype == value.dtype
        and (part[name].dim(), part[name].shape[-1:]) == (value.dim(), value.shape[-1:])
        for name, value in own.items()
    )  # fmt: skip


def build_metrics(key: str, names: Sequence[str], num_classes: int, topk: int, multilabel: bool) -> dict[str, Metric]:
    """Return metrics by name, in the order of the names.

    Args:
        key: the option that names them, for messages.
        names: registered names.
        num_classes: columns of the logits.
        topk: TRAIN.TOPK.
        multilabel: whether an image may have several labels.

    Raises:
        ConfigError: a metric is not defined for the targets.
    """
    metrics = {name: METRICS.get(name)(num_classes, topk) for name in names}
    kind = "for_multilabel" if multilabel else "for_labels"
    wrong = [name for name, metric in metrics.items() if not getattr(metric, kind)]
    if wrong:
        data = "several labels per image" if multilabel else "one label per image"
        suited = [name for name in METRICS.names() if getattr(METRICS.get(name), kind)]
        raise ConfigError(f"{key}: {', '.join(wrong)} is not defined for data of {data}; use {', '.join(suited)}")
    return metrics


def display_names(metrics: Mapping[str, Metric]) -> dict[str, str]:
    """Return the display name of each metric, e.g. {"topk": "top5"}."""
    return {name: metric.label(name) for name, metric in metrics.items()}


def hard_labels(targets: torch.Tensor) -> torch.Tensor:
    """Return int64 labels (N,) of labels or of soft targets (N, classes): the class with the largest share."""
    return targets.argmax(dim=1) if targets.is_floating_point() else targets


def one_hot(targets: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return labels (N,), or targets (N, classes) of 0 and 1, as uint8 (N, classes)."""
    if targets.ndim == 2:
        return targets.to(torch.uint8)
    return targets.unsqueeze(1).eq(torch.arange(num_classes, device=targets.device)).to(torch.uint8)


# ------------------------------------------------------------------------------------------ metrics


@METRICS.register("topk")
class TopK(SumMetric):
    """Share of the images whose label is among the k classes with the largest logits, k being TRAIN.TOPK."""

    def label(self, name: str) -> str:
        """Return e.g. 'top5'."""
        return f"top{self.topk}"

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
        """Return the number of hits."""
        return self.hits(output).sum()

    def hits(self, output: StepOutput) -> torch.Tensor:
        """Return bool (N, k): whether the class at each rank is the label."""
        return output.ranked(self.topk).eq(output.targets.unsqueeze(1))


@METRICS.register("top1")
class Top1(TopK):
    """Accuracy: share of the images whose label has the largest logit (of equal ones, the first that topk ranks)."""

    def label(self, name: str) -> str:
        """Return 'top1'."""
        return name

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
        """Return the number of hits."""
        return self.hits(output)[:, 0].sum()


class _ConfusionMetric(SumMetric):
    """A metric of each class's true positives, predicted positives and positives: sums (3, classes).

    The prediction for an image is the class with the largest logit; with several labels, each class with a logit above
    0, which is a probability above one half.
    """

    for_multilabel = True

    @property
    def shape(self) -> tuple[int, ...]:
        """(3, classes)."""
        return 3, self.num_classes

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
        """Return the counts of a batch."""
        logits, targets = output.logits, one_hot(output.targets, self.num_classes)
        is_multilabel = output.targets.ndim == 2
        predicted = logits.gt(0).to(torch.uint8) if is_multilabel else one_hot(logits.argmax(1), self.num_classes)
        return torch.stack([(predicted * targets).sum(0), predicted.sum(0), targets.sum(0)])


@METRICS.register("macro_recall")
class MacroRecall(_ConfusionMetric):
    """Balanced accuracy: the mean over the classes that occur of their recall (scikit-learn's balanced accuracy)."""

    def value(self, sums: torch.Tensor, count: float) -> float:
        """Return the mean recall in percent; NaN if no class occurs."""
        hits, _, positives = sums
        return 100 * (hits / positives)[positives > 0].mean().item()


@METRICS.register("macro_f1")
class MacroF1(_ConfusionMetric):
    """Mean over the classes of the F1 score, 2 TP / (2 TP + FP + FN); classes never seen nor predicted do not count."""

    def value(self, sums: torch.Tensor, count: float) -> float:
        """Return the mean F1 score in percent; NaN if there is no class."""
        hits, predicted, positives = sums
        total = predicted + positives
        return 100 * (2 * hits / total)[total > 0].mean().item()


@METRICS.register("ece")
class ExpectedCalibrationError(SumMetric):
    """Gap between confidence and accuracy, over 15 bins of equal width (Guo et al., arXiv 1706.04599): sums (3, 15)."""

    higher_is_better = False
    num_bins = 15

    @property
    def shape(self) -> tuple[int, ...]:
        """Images, sum of confidences and correct predictions of each bin."""
        return 3, self.num_bins

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
        """Return the sums of a batch; the confidence is the largest probability, in bins (low, high]."""
        confidence, predicted = F.softmax(output.logits.float(), dim=1).double().max(dim=1)
        bins = (confidence * self.num_bins).ceil().sub(1).clamp(0, self.num_bins - 1).long()
        rows = torch.stack([torch.ones_like(confidence), confidence, predicted.eq(output.targets).double()])
        return rows.new_zeros(self.shape).index_add_(1, bins, rows)

    def value(self, sums: torch.Tensor, count: float) -> float:
        """Return the mean gap in percent, weighted by the images of each bin."""
        _, confidence, correct = sums
        return 100 * (confidence - correct).abs().sum().item() / count if count else math.nan


@METRICS.register("map")
class MeanAveragePrecision(ScoreMetric):
    """Mean over the classes that occur of the average precision, see `average_precisions`."""

    for_multilabel = True

    def value(self, logits: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the mean in percent; NaN if no class occurs."""
        precisions = average_precisions(logits, targets)
        return 100 * float(precisions[~precisions.isnan()].mean())


def average_precisions(scores: torch.Tensor, applies: torch.Tensor) -> torch.Tensor:
    """Return the average precision of each class, (classes,), of 1.0; NaN for a class that never occurs.

    The sum over thresholds of (recall - recall of the threshold before) * precision, as scikit-learn's
    `average_precision_score` defines it: images of equal scores share a threshold, so their order does not matter.

    Args:
        scores: float32 (N, classes); NaN ranks last.
        applies: (N, classes), 1 where a class applies, else 0.
    """
    num = max(1, _MAX_SORTED // max(1, len(scores)))
    parts = zip(scores.split(num, dim=1), applies.split(num, dim=1), strict=True)
    return torch.cat([_average_precisions(*part) for part in parts])


def _average_precisions(scores: torch.Tensor, applies: torch.Tensor) -> torch.Tensor:
    scores = torch.where(scores.isnan(), -torch.inf, scores).T
    dtype = torch.float32 if scores.device.type == "mps" else torch.float64
    if not scores.shape[1]:
        return torch.full((len(scores),), torch.nan, dtype=dtype, device=scores.device)
    ranked, order = scores.sort(dim=1, descending=True)
    found = applies.T.gather(1, order).cumsum(1, dtype=torch.int64)
    is_threshold = torch.ones_like(ranked, dtype=torch.bool)  # the last image of each score
    is_threshold[:, :-1] = ranked[:, :-1] != ranked[:, 1:]
    before = torch.zeros_like(found)
    before[:, 1:] = torch.where(is_threshold, found, 0).cummax(1).values[:, :-1]
    precision = found.to(dtype) / torch.arange(1, found.shape[1] + 1, device=found.device)
    gained = torch.where(is_threshold, (found - before) * precision, 0)
    return gained.sum(1) / found[:, -1]
