"""Losses, from logits and targets to the mean over the images.

A criterion takes logits (N, classes) of any float type and targets: int64 labels (N,), soft targets (N, classes) of any
float type, or for cross-entropy uint8 (N, classes), 1 for each right class. It returns the mean loss () of the N images
in float32 or wider; those of the package return the loss of each image (N,) with `reduction="none"`. The divisor is N
for any class weights, not the sum of the weights in the batch. The loss and the gradients averaged over the
micro-batches of all processes are therefore those of the global batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distribuuuu.config.registry import LOSSES, dataset_class
from distribuuuu.config.settings import build_settings
from distribuuuu.data.datasets.base import ImageDataset


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
        targets = targets.to(logits.dtype) if targets.is_floating_point() else targets
        if self.weights is None:
            return F.cross_entropy(logits, targets, label_smoothing=self.smoothing, reduction=reduction)
        weights = self.weights.to(logits.dtype)
        if reduction == "none":
            return F.cross_entropy(logits, targets, weights, reduction="none", label_smoothing=self.smoothing)
        total = F.cross_entropy(logits, targets, weights, reduction="sum", label_smoothing=self.smoothing)
        return total / len(logits)


def build_loss(cfg, train: bool = True, images: ImageDataset | None = None) -> Loss:
    """Return the criterion: LOSS.NAME for training, cross-entropy (binary for several labels) for evaluation.

    `images` is the training set, from whose labels LOSS.CLASS_WEIGHTS auto is computed.

    Evaluation losses are therefore comparable between runs with different training losses. The criterion must be moved
    to the device, because class weights are a buffer.
    """
    if not train:
        return LOSSES.get("bce" if dataset_class(cfg).targets == "labels" else "cross_entropy")()
    loss = cfg.LOSS
    family = LOSSES.get(loss.NAME)
    weights, positive = loss.CLASS_WEIGHTS, loss.POSITIVE_WEIGHT
    if isinstance(weights, str) or isinstance(positive, str):
        from distribuuuu.tasks.class_weights import find_class_weights

        weights = find_class_weights("LOSS.CLASS_WEIGHTS", weights, images)
        positive = find_class_weights("LOSS.POSITIVE_WEIGHT", positive, images)
    # Losses with options of their own; a new loss declares `Settings`.
    bce = {"threshold": loss.BCE_TARGET_THRESHOLD, "positive": positive}
    options: dict[str, dict[str, Any]] = {"bce": bce, "focal": {"gamma": loss.FOCAL_GAMMA}}
    if hasattr(family, "Settings"):
        options[loss.NAME] = {"settings": build_settings(cfg, "LOSS.KWARGS", family)}
    return family(loss.LABEL_SMOOTHING, weights, **options.get(loss.NAME, {}))
