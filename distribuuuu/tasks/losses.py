"""Losses, from logits and targets to the mean over the images.

A criterion takes logits (N, classes) of any float type and targets: int64 labels (N,), soft targets (N, classes) of any
float type, or for cross-entropy uint8 (N, classes), 1 for each right class. It returns the mean loss () of the N images
in float32 or wider; those of the package return the loss of each image (N,) with `reduction="none"`. The divisor is N
for any class weights, not the sum of the weights in the batch. The loss and the gradients averaged over the
micro-batches of all processes are therefore those of the global batch.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distribuuuu.config.derived import class_weight_beta
from distribuuuu.config.errors import first_few
from distribuuuu.config.registry import LOSSES, dataset_class
from distribuuuu.config.settings import build_settings
from distribuuuu.data.datasets.base import ImageDataset

logger = logging.getLogger(__name__)

# Classes up to which the log shows the weight of each.
_SHOWN_CLASSES = 20


class Loss(nn.Module):
    """Base class of losses: precision, label smoothing and class weights.

    Args:
        smoothing: share of each label or soft target that is spread evenly over all classes (Szegedy et al.,
            arXiv 1512.00567). Mixup and CutMix must not smooth the targets again.
        weights: a factor for each class; empty: no weights.
        settings: LOSS.KWARGS, an instance of the dataclass `Settings` that a subclass declares.
    """

    weights: torch.Tensor | None

    def __init__(self, smoothing: float = 0.0, weights: Sequence[float] = (), settings: Any = None):
        super().__init__()
        self.smoothing, self.settings = smoothing, settings
        factors = torch.tensor(weights, dtype=torch.float32) if weights else None
        self.register_buffer("weights", factors, persistent=False)  # as in the config, also after a resume

    def prepare(self, class_counts: torch.Tensor) -> None:
        """Prepare for the training set.

        Args:
            class_counts: images of each class, int64 (classes,); of several labels, the images that have each.
        """

    def begin_epoch(self, epoch: int) -> str | None:
        """Prepare for an epoch, from 0; return the name of its stage, or None; see `Task.begin_epoch`."""

    @staticmethod
    def upcast(logits: torch.Tensor) -> torch.Tensor:
        """Return the logits in float32, or unchanged if their type is wider."""
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def smooth_targets(self, targets: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return labels or soft targets as smoothed soft targets with the shape and type of the logits."""
        spread = self.smoothing / logits.shape[1]
        if targets.is_floating_point():
            return targets.to(logits.dtype) * (1 - self.smoothing) + spread
        return torch.full_like(logits, spread).scatter_(1, targets.unsqueeze(1), 1 - self.smoothing + spread)


@LOSSES.register("cross_entropy")
class CrossEntropy(Loss):
    """Softmax cross-entropy of torch.

    With weights, the term of each class is multiplied by the weight of that class. For labels torch then divides by
    the sum of the weights. Here the divisor is the number of images, as in torch for soft targets.
    """

    def forward(self, logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Return the mean loss (), or the loss of each image (N,)."""
        logits = self.upcast(logits)
        if targets.dtype == torch.uint8:  # several classes are right: equal shares
            targets = targets / targets.sum(dim=1, keepdim=True)
        targets = targets.to(logits.dtype) if targets.is_floating_point() else targets
        if self.weights is None:
            return F.cross_entropy(logits, targets, label_smoothing=self.smoothing, reduction=reduction)
        weights = self.weights.to(logits.dtype)
        if reduction == "none":
            return F.cross_entropy(logits, targets, weights, reduction="none", label_smoothing=self.smoothing)
        total = F.cross_entropy(logits, targets, weights, reduction="sum", label_smoothing=self.smoothing)
        return total / len(logits)


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


def find_class_weights(cfg, images: ImageDataset | None) -> Sequence[float]:
    """Return LOSS.CLASS_WEIGHTS as a number for each class, logged if it is auto; without `images`, auto is empty."""
    value = cfg.LOSS.CLASS_WEIGHTS
    if not isinstance(value, str):
        return value
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


def build_loss(cfg, train: bool = True, images: ImageDataset | None = None) -> Loss:
    """Return the criterion: LOSS.NAME for training, cross-entropy (binary for several labels) for evaluation.

    `images` is the training set, from whose labels LOSS.CLASS_WEIGHTS auto is computed.

    Evaluation losses are therefore comparable between runs with different training losses. The criterion must be moved
    to the device, because class weights are a buffer.
    """
    if not train:
        return BinaryCrossEntropy() if dataset_class(cfg).targets == "labels" else CrossEntropy()
    loss = cfg.LOSS
    family = LOSSES.get(loss.NAME)
    options: dict[str, dict[str, Any]] = {
        "bce": {"threshold": loss.BCE_TARGET_THRESHOLD, "sum_classes": loss.BCE_REDUCTION == "sum"},
        "focal": {"gamma": loss.FOCAL_GAMMA},
    }
    if hasattr(family, "Settings"):
        options[loss.NAME] = {"settings": build_settings(cfg, "LOSS.KWARGS", family)}
    return family(loss.LABEL_SMOOTHING, find_class_weights(cfg, images), **options.get(loss.NAME, {}))
