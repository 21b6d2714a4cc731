"""Metrics: their base classes, the registered metrics, and `build_metrics`.

A new metric is one class in this file or in a new file of this package. It is decorated with
`@METRICS.register("name")` and selected by TRAIN.METRICS or TEST.METRICS. Most metrics derive from `SumMetric`. The
value appears in the table on the terminal, metrics.jsonl, TensorBoard, results.json and the result tables.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from distribuuuu.config import ConfigError
from distribuuuu.config.registry import METRICS

# Scores that are sorted at a time, which bounds the memory of the average precision.
_MAX_SORTED = 2**24
# Bins of the expected calibration error.
NUM_BINS = 15


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
    _ranked: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def num_images(self) -> int:
        """N."""
        return self.targets.shape[0]

    def detach(self) -> "StepOutput":
        """Return it without gradients; on CUDA a copy, since the replay of a CUDA graph writes to the same memory."""
        keep = (lambda value: value.detach().clone()) if self.loss.is_cuda else torch.Tensor.detach
        sums = {name: keep(torch.as_tensor(value)) for name, value in self.sums.items()}
        return StepOutput(keep(self.loss), keep(self.logits), keep(self.targets), sums)

    def ranked(self, k: int) -> torch.Tensor:
        """Return the classes with the k largest logits, the largest first: int64 (N, k); computed once."""
        if k not in self._ranked:
            self._ranked[k] = rank_classes(self.logits, k)
        return self._ranked[k]


def rank_classes(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the classes with the k largest scores (N, classes), the largest first: int64 (N, k)."""
    return scores.topk(min(k, scores.shape[1])).indices


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
    """Return metrics by name, in the order of the names.

    Args:
        key: the option that lists the names, for messages.
        names: registered names.
        num_classes: columns of the logits.
        topk: TRAIN.TOPK.
        multilabel: whether an image may have several labels.

    Raises:
        ConfigError: a metric is not defined for this kind of targets.
    """
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
        """Return e.g. 'top5'."""
        return f"top{self.topk}"

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
        """Return the number of hits."""
        hits = self.hits(output)
        return (hits.any(1) if output.targets.ndim == 2 else hits).sum()

    def hits(self, output: StepOutput) -> torch.Tensor:
        """Return bool (N, k): whether the class at each rank is the label, or one of several."""
        ranked, targets = output.ranked(self.topk), output.targets
        return targets.gather(1, ranked).bool() if targets.ndim == 2 else ranked.eq(targets.unsqueeze(1))


@METRICS.register("top1")
class Top1(TopK):
    """Accuracy: share of the images whose label has the largest logit; ties are ordered as in `topk`."""

    def label(self, name: str) -> str:
        """Return 'top1'."""
        return name

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
        """Return the number of hits."""
        return self.hits(output)[:, 0].sum()


class _ConfusionMetric(SumMetric):
    """A metric computed from true positives, predicted positives and positives of each class: sums (3, classes).

    The predicted class is the one with the largest logit. With several labels per image, every class with a logit
    above 0, a probability above 0.5, is predicted.
    """

    for_multilabel = is_count = True

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


def class_recalls(sums: torch.Tensor) -> torch.Tensor:
    """Return the recall of each class from float64 counts (3, classes) of hits, predictions and labels; NaN for 0/0."""
    return sums[0] / sums[2]


def class_f1_scores(sums: torch.Tensor) -> torch.Tensor:
    """Return the F1 score of each class, 2 TP / (2 TP + FP + FN), from counts as for `class_recalls`."""
    return 2 * sums[0] / (sums[1] + sums[2])


@METRICS.register("macro_recall")
class MacroRecall(_ConfusionMetric):
    """Balanced accuracy as in scikit-learn: the recall, averaged over the classes with at least one image."""

    def value(self, sums: torch.Tensor, count: float) -> float:
        """Return the mean recall in percent; NaN without images."""
        recalls = class_recalls(sums)
        return 100 * recalls[~recalls.isnan()].mean().item()


@METRICS.register("macro_f1")
class MacroF1(_ConfusionMetric):
    """F1 score averaged over the classes that are a label or a prediction at least once."""

    def value(self, sums: torch.Tensor, count: float) -> float:
        """Return the mean F1 score in percent; NaN without such a class."""
        scores = class_f1_scores(sums)
        return 100 * scores[~scores.isnan()].mean().item()


def calibration_sums(confidence: torch.Tensor, is_correct: torch.Tensor) -> torch.Tensor:
    """Return the images, the sum of confidences and the correct predictions of each bin (low, high].

    Args:
        confidence: probability of the predicted class, float64 (N,).
        is_correct: whether it is the label, bool (N,).

    Returns:
        float64 (3, NUM_BINS).
    """
    bins = (confidence * NUM_BINS).ceil().sub(1).clamp(0, NUM_BINS - 1).long()
    rows = torch.stack([torch.ones_like(confidence), confidence, is_correct.double()])
    return rows.new_zeros(3, NUM_BINS).index_add_(1, bins, rows)


@METRICS.register("ece")
class ExpectedCalibrationError(SumMetric):
    """Gap between confidence and accuracy in 15 bins of equal width (Guo et al., arXiv 1706.04599): sums (3, 15)."""

    higher_is_better = False

    @property
    def shape(self) -> tuple[int, ...]:
        """(3, bins)."""
        return 3, NUM_BINS

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
        """Return the sums of a batch; the confidence is the largest probability."""
        confidence, predicted = F.softmax(output.logits.float(), dim=1).double().max(dim=1)
        return calibration_sums(confidence, predicted.eq(output.targets))

    def value(self, sums: torch.Tensor, count: float) -> float:
        """Return the mean gap in percent, weighted by the number of images in each bin."""
        _, confidence, correct = sums
        return 100 * (confidence - correct).abs().sum().item() / count if count else math.nan


@METRICS.register("map")
class MeanAveragePrecision(ScoreMetric):
    """Average precision (see `average_precisions`), averaged over the classes with at least one image."""

    for_multilabel = True

    def value(self, logits: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the mean in percent; NaN if no class has an image."""
        precisions = average_precisions(logits, targets)
        return 100 * float(precisions[~precisions.isnan()].mean())


def average_precisions(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the average precision of each class, (classes,), from 0 to 1; NaN for a class without images.

    It is the sum over thresholds of (recall - recall at the previous threshold) * precision, as in scikit-learn's
    `average_precision_score`. Images with equal scores share a threshold, so their order does not matter.

    Args:
        scores: float32 (N, classes); NaN ranks last.
        targets: (N, classes), 1 for the classes of an image, else 0.
    """
    num = max(1, _MAX_SORTED // max(1, len(scores)))
    chunks = zip(scores.split(num, dim=1), targets.split(num, dim=1), strict=True)
    return torch.cat([_average_precisions(*chunk) for chunk in chunks])


def _average_precisions(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    scores = torch.where(scores.isnan(), -torch.inf, scores).T
    dtype = torch.float32 if scores.device.type == "mps" else torch.float64
    if not scores.shape[1]:
        return torch.full((len(scores),), torch.nan, dtype=dtype, device=scores.device)
    ranked, order = scores.sort(dim=1, descending=True)
    hits = targets.T.gather(1, order).cumsum(1, dtype=torch.int64)
    is_threshold = torch.ones_like(ranked, dtype=torch.bool)  # the last image of each score
    is_threshold[:, :-1] = ranked[:, :-1] != ranked[:, 1:]
    previous = torch.zeros_like(hits)
    previous[:, 1:] = torch.where(is_threshold, hits, 0).cummax(1).values[:, :-1]
    precision = hits.to(dtype) / torch.arange(1, hits.shape[1] + 1, device=hits.device)
    terms = torch.where(is_threshold, (hits - previous) * precision, 0)
    return terms.sum(1) / hits[:, -1]
