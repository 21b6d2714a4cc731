"""Losses: what a model's answers are off by, as one number.

A criterion takes logits (N, classes) of any float type and targets, which are labels (N,) of int64 or soft targets
(N, classes) of any float type, e.g. of mixed images. It returns the mean loss () of the N images, computed in float32
or better. The divisor is N whatever the class weights are, never the sum of the weights of the batch: so the mean
over the micro-batches of all processes is that of the global batch, and so are the gradients.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from distribuuuu.config.registry import LOSSES, dataset_class


class Loss(nn.Module):
    """What the losses share: precision, label smoothing and class weights.

    Args:
        smoothing: share of each target, soft ones too, that goes evenly to all classes (Szegedy et al.,
            arXiv 1512.00567); whoever mixes targets must not smooth them.
        weights: a factor for each class; empty: none.
    """

    def __init__(self, smoothing: float = 0.0, weights: Sequence[float] = ()):
        super().__init__()
        self.smoothing = smoothing
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float32) if weights else None)

    @staticmethod
    def precise(logits: torch.Tensor) -> torch.Tensor:
        """Return the logits in float32, or in their own type if that is wider."""
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def soften(self, targets: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return labels or soft targets as smoothed soft targets of the shape and type of the logits."""
        spread = self.smoothing / logits.shape[1]
        if targets.is_floating_point():
            return targets.to(logits.dtype) * (1 - self.smoothing) + spread
        return torch.full_like(logits, spread).scatter_(1, targets.unsqueeze(1), 1 - self.smoothing + spread)


@LOSSES.register("cross_entropy")
class CrossEntropy(Loss):
    """Cross-entropy with the softmax, that of torch.

    With weights, the term of each class is multiplied by the weight of that class. For labels torch then divides by
    the sum of the weights; here, as torch does for soft targets, the divisor is the number of images.
    """

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss ()."""
        logits = self.precise(logits)
        targets = targets.to(logits.dtype) if targets.is_floating_point() else targets
        if self.weights is None:
            return F.cross_entropy(logits, targets, label_smoothing=self.smoothing)
        weights = self.weights.to(logits.dtype)
        total = F.cross_entropy(logits, targets, weights, reduction="sum", label_smoothing=self.smoothing)
        return total / len(logits)


@LOSSES.register("bce")
class BinaryCrossEntropy(Loss):
    """A yes or no for each class, as in ResNet strikes back (Wightman et al., arXiv 2110.00476) and its code, timm.

    With weights, both the yes and the no of a class are multiplied by the weight of that class.

    Args:
        smoothing: as for every loss; it comes before the threshold.
        weights: as for every loss.
        threshold: targets above it become 1 and all others 0; 0: targets stay what they are.
        sum_classes: sum over the classes, as Composer does, not their mean, the habit of timm; the factor between the
            two, the number of classes, counts for every optimizer that does not scale its step by itself.
    """

    def __init__(
        self,
        smoothing: float = 0.0,
        weights: Sequence[float] = (),
        threshold: float = 0.0,
        sum_classes: bool = False,
    ):
        super().__init__(smoothing, weights)
        self.threshold = threshold
        self.sum_classes = sum_classes

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss ()."""
        logits = self.precise(logits)
        targets = self.soften(targets, logits)
        if self.threshold:
            targets = targets.gt(self.threshold).to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, targets, self.weights, reduction="none")
        return losses.sum(dim=1).mean() if self.sum_classes else losses.mean()


@LOSSES.register("focal")
class Focal(Loss):
    """Cross-entropy that makes little of what is well learnt: times (1 - p) ** gamma (Lin et al., arXiv 1708.02002).

    The paper's form for the sigmoid, carried over to the softmax: -sum over classes of target * (1 - p) ** gamma *
    log p. The paper's alpha is `weights`.

    Args:
        smoothing: as for every loss.
        weights: as for cross-entropy.
        gamma: 0 is cross-entropy; the greater, the less easy images count.
    """

    def __init__(self, smoothing: float = 0.0, weights: Sequence[float] = (), gamma: float = 2.0):
        super().__init__(smoothing, weights)
        self.gamma = gamma

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss ()."""
        logits = self.precise(logits)
        log_p = F.log_softmax(logits, dim=1)
        # 1 - p, exact near p = 1; kept above 0, where the slope of a power below 1 is infinite.
        one_minus_p = (-torch.expm1(log_p)).clamp_min(torch.finfo(logits.dtype).tiny)
        losses = -self.soften(targets, logits) * one_minus_p**self.gamma * log_p
        if self.weights is not None:
            losses = losses * self.weights
        return losses.sum(dim=1).mean()


def build_loss(cfg, train: bool = True) -> Loss:
    """Return the criterion: LOSS.NAME to train with, plain cross-entropy to evaluate with; binary for several labels.

    What evaluation reports so compares over all runs, whatever they trained with. Class weights have to be moved to
    the device, as a model has.
    """
    if not train:
        return BinaryCrossEntropy() if dataset_class(cfg).multilabel else CrossEntropy()
    loss = cfg.LOSS
    options = {
        "bce": {"threshold": loss.BCE_TARGET_THRESHOLD, "sum_classes": loss.BCE_REDUCTION == "sum"},
        "focal": {"gamma": loss.FOCAL_GAMMA},
    }
    return LOSSES.get(loss.NAME)(loss.LABEL_SMOOTHING, loss.CLASS_WEIGHTS, **options.get(loss.NAME, {}))
