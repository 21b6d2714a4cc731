"""Metrics of each class, of calibration and of ranking, loaded when TRAIN.METRICS or TEST.METRICS names one."""

import math

import torch
import torch.nn.functional as F

from distribuuuu.config.registry import METRICS
from distribuuuu.tasks.metrics import ScoreMetric, StepOutput, SumMetric, one_hot

# Scores that are sorted at a time, which bounds the memory of the average precision.
_MAX_SORTED = 2**24
# Bins of the expected calibration error.
NUM_BINS = 15


class _ConfusionMetric(SumMetric):
    """A metric computed from true positives, predicted positives and positives of each class: sums (3, classes).

    The predicted class is the one with the largest logit. With several labels per image, every class with a logit
    above 0, a probability above 0.5, is predicted.
    """

    for_multilabel = is_count = True

    @property
    def shape(self) -> tuple[int, ...]:
        return 3, self.num_classes

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
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


@METRICS.register("loss")
class MeanLoss(SumMetric):
    """Mean loss over the images, which is shown in any case; as the first metric, the lowest one selects the best."""

    higher_is_better, for_multilabel = False, True

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
        """Return the sum of the losses of a batch."""
        return output.loss.detach().double() * output.num_images

    def value(self, sums: torch.Tensor, count: float) -> float:
        """Return the mean; NaN without images."""
        return sums.item() / count if count else math.nan


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


@METRICS.register("ece")
class ExpectedCalibrationError(SumMetric):
    """Gap between confidence and accuracy in 15 bins of equal width (Guo et al., arXiv 1706.04599): sums (3, 15)."""

    higher_is_better = False

    @property
    def shape(self) -> tuple[int, ...]:
        return 3, NUM_BINS

    def batch_sums(self, output: StepOutput) -> torch.Tensor:
        """Return images, confidences and hits of each bin (low, high]; the confidence is the largest probability."""
        confidence, predicted = F.softmax(output.logits.float(), dim=1).double().max(dim=1)
        bins = (confidence * NUM_BINS).ceil().sub(1).clamp(0, NUM_BINS - 1).long()
        rows = torch.stack([torch.ones_like(confidence), confidence, predicted.eq(output.targets).double()])
        return rows.new_zeros(3, NUM_BINS).index_add_(1, bins, rows)

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
