"""Losses other than cross-entropy, and LOSS.CLASS_WEIGHTS auto: loaded when an option or the targets ask for one."""

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from distribuuuu.config.derived import class_weight_beta
from distribuuuu.config.errors import first_few
from distribuuuu.config.registry import LOSSES
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.tasks.losses import Loss

logger = logging.getLogger(__name__)

# Classes up to which the log shows the weight of each.
_SHOWN_CLASSES = 20


@LOSSES.register("bce")
class BinaryCrossEntropy(Loss):
    """Binary cross-entropy of each class, as in ResNet strikes back (Wightman et al., arXiv 2110.00476) and timm.

    With weights, the positive and the negative term of a class are both multiplied by the weight of that class.

    Args:
        smoothing: see `Loss`; applied before the threshold.
        weights: see `Loss`.
        threshold: targets above it become 1 and all others 0, e.g. all classes of a mixture with 0, as in DeiT-III;
            None: targets are not changed.
        sum_classes: sum over the classes, as in Composer, instead of their mean, as in timm. The sum is larger by the
            number of classes, which matters for optimizers whose step depends on the gradient's scale, e.g. SGD.
    """

    def __init__(
        self,
        smoothing: float = 0.0,
        weights: Sequence[float] = (),
        threshold: float | None = None,
        sum_classes: bool = False,
    ):
        super().__init__(smoothing, weights)
        self.threshold = threshold
        self.sum_classes = sum_classes

    def forward(self, logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Return the mean loss (), or the loss of each image (N,)."""
        logits = self.upcast(logits)
        targets = self.smooth_targets(targets, logits)
        if self.threshold is not None:
            targets = targets.gt(self.threshold).to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, targets, self.weights, reduction="none")
        if reduction == "none":
            return losses.sum(dim=1) if self.sum_classes else losses.mean(dim=1)
        return losses.sum(dim=1).mean() if self.sum_classes else losses.mean()


@LOSSES.register("focal")
class Focal(Loss):
    """Focal loss: cross-entropy with the factor (1 - p) ** gamma (Lin et al., arXiv 1708.02002).

    The paper's form is for the sigmoid. This is its softmax form: -sum over classes of target * (1 - p) ** gamma *
    log p. The paper's alpha is `weights`.

    Args:
        smoothing: see `Loss`.
        weights: see `CrossEntropy`.
        gamma: 0 is cross-entropy; higher values lower the loss of well-classified images.
    """

    def __init__(self, smoothing: float = 0.0, weights: Sequence[float] = (), gamma: float = 2.0):
        super().__init__(smoothing, weights)
        self.gamma = gamma

    def forward(self, logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Return the mean loss (), or the loss of each image (N,)."""
        logits = self.upcast(logits)
        log_p = F.log_softmax(logits, dim=1)
        # 1 - p, accurate near p = 1; clamped above 0, where the derivative of a power below 1 is infinite.
        one_minus_p = (-torch.expm1(log_p)).clamp_min(torch.finfo(logits.dtype).tiny)
        losses = -self.smooth_targets(targets, logits) * one_minus_p**self.gamma * log_p
        if self.weights is not None:
            losses = losses * self.weights
        return losses.sum(dim=1).mean() if reduction == "mean" else losses.sum(dim=1)


def count_labels(images: ImageDataset) -> torch.Tensor:
    """Return the number of images of each class: int64 (classes,)."""
    if images.targets == "labels":
        rows = (torch.as_tensor(images.label(index)) for index in range(len(images)))
        return sum((row.ge(0.5).long() for row in rows), torch.zeros(len(images.classes), dtype=torch.int64))
    labels = torch.tensor([int(images.label(index)) for index in range(len(images))], dtype=torch.int64)
    return labels.bincount(minlength=len(images.classes))


def compute_class_weights(class_counts: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the weight of each class by its number of images, float32 (classes,).

    The weight is in proportion to `(1 - beta) / (1 - beta ** n)`, the inverse of the effective number of n images (Cui
    et al., arXiv 1901.05555); with beta 1, its limit, to `1 / n`. The mean over the classes with images is 1. A class
    without images has the weight 1.
    """
    present = class_counts.gt(0)
    counts = class_counts[present].double()
    log_beta = torch.tensor(beta, dtype=torch.float64).log()
    effective = counts if beta == 1 else torch.expm1(counts * log_beta) / (beta - 1)  # accurate for beta near 1
    weights = torch.ones(len(class_counts), dtype=torch.float64)
    weights[present] = (1 / effective) / (1 / effective).mean()
    return weights.float()


def find_class_weights(value: str, images: ImageDataset | None) -> Sequence[float]:
    """Return the numbers of LOSS.CLASS_WEIGHTS auto for each class, and log them; without `images`, none."""
    if images is None or (beta := class_weight_beta(value)) is None:
        return ()
    counts = count_labels(images)
    weights = compute_class_weights(counts, beta)
    order = weights.argsort(stable=True).tolist()
    shown = [f"{images.classes[label]} {weights[label]:.4g} ({counts[label]:,} images)" for label in order]
    shown = shown if len(shown) <= _SHOWN_CLASSES else [shown[0], "...", shown[-1]]
    logger.info("LOSS.CLASS_WEIGHTS %s: %s", value, ", ".join(shown))
    if empty := [name for name, count in zip(images.classes, counts.tolist(), strict=True) if not count]:
        logger.warning("LOSS.CLASS_WEIGHTS %s: weight 1 for classes without training images: %s", value,
                       first_few(empty))  # fmt: skip
    return weights.tolist()
