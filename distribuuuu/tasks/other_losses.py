"""Losses other than cross-entropy, loaded when LOSS.NAME or the kind of targets asks for one: see losses.py."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from distribuuuu.config.registry import LOSSES
from distribuuuu.tasks.losses import Loss


@LOSSES.register("bce")
class BinaryCrossEntropy(Loss):
    """Binary cross-entropy of each class, as in ResNet strikes back (Wightman et al., arXiv 2110.00476) and timm.

    With weights, the positive and the negative term of a class are both multiplied by the weight of that class.

    Args:
        smoothing: see `Loss`; applied before the threshold.
        threshold: targets above it become 1 and all others 0, e.g. all classes of a mixture with 0, as in DeiT-III;
            None: targets are not changed.
        positive: a factor of the positive term, for all classes or for each; empty: none.
    """

    positive: torch.Tensor | None

    def __init__(
        self,
        smoothing: float = 0.0,
        weights: Sequence[float] = (),
        threshold: float | None = None,
        positive: Sequence[float] = (),
    ):
        super().__init__(smoothing, weights)
        factors = torch.tensor(positive, dtype=torch.float32) if positive else None
        self.register_buffer("positive", factors, persistent=False)
        self.threshold = threshold

    def forward(self, logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Return the mean loss (), or the loss of each image (N,)."""
        logits = self.upcast(logits)
        targets = self.smooth_targets(targets, logits)
        if self.threshold is not None:
            targets = targets.gt(self.threshold).to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(
            logits, targets, self.weights, reduction="none", pos_weight=self.positive
        )
        return losses.mean() if reduction == "mean" else losses.mean(dim=1)


@LOSSES.register("focal")
class Focal(Loss):
    """Focal loss: cross-entropy with the factor (1 - p) ** gamma (Lin et al., arXiv 1708.02002).

    The paper's form is for the sigmoid. This is its softmax form: -sum over classes of target * (1 - p) ** gamma *
    log p. The paper's alpha is `weights`.

    Args:
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
