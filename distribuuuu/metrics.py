"""Exact counters that stay on the device: sums are kept there, reduced over the processes on read, then divided."""

import math

import torch

from distribuuuu.config import ConfigError
from distribuuuu.distributed import scaled_all_reduce


class NonFiniteLoss(ConfigError):
    """A loss was infinite or not a number since the read before; every process sees it at the same read."""

    on_all_processes = True

    def located(self, where: str) -> "NonFiniteLoss":
        """Return the error that says where it was and what can be done."""
        remedy = "lower OPTIM.BASE_LR, lengthen OPTIM.WARMUP_EPOCHS, or set TRAIN.ON_NAN rollback"
        return NonFiniteLoss(f"{self} {where}; {remedy}")


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Return what a meter read.

    Raises:
        NonFiniteLoss: the mean loss is infinite or not a number.
    """
    if not math.isfinite(metrics["loss"]):
        raise NonFiniteLoss(f"the training loss is {metrics['loss']}")
    return metrics


def build_meter(cfg, device: torch.device) -> "ClassificationMeter":
    """Return the counters for TRAIN.TOPK; with fewer classes, for their number."""
    return ClassificationMeter(min(cfg.TRAIN.TOPK, cfg.MODEL.NUM_CLASSES), device)


class ClassificationMeter:
    """Loss, top-1 and top-k over everything seen since the last reset.

    Args:
        topk: the k of top-k, at most the number of classes.
        device: where the sums are kept.
    """

    def __init__(self, topk: int, device: torch.device):
        self.topk = topk
        # MPS has no float64; a float32 sum is exact for counts below 2^24.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        # count, loss * count, correct at 1, correct at k
        self._sums = torch.zeros(4, dtype=dtype, device=device)
        self._count, self._loss, self._top1, self._topk = self._sums.unbind()

    @torch.no_grad()
    def update(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add one batch: its mean loss (), logits (N, classes), labels (N,) or soft targets (N, classes).

        The label of a soft target is the class with the greatest share. Waits for nothing.
        """
        labels = labels.argmax(dim=1) if labels.is_floating_point() else labels
        hits = logits.topk(self.topk).indices.eq(labels.unsqueeze(1))
        self._count += len(labels)
        self._loss.add_(loss.detach(), alpha=len(labels))
        self._top1.add_(hits[:, 0].sum())
        self._topk.add_(hits.sum())

    def read(self) -> dict[str, float]:
        """Return count, loss, top1 and topk (percent) over all processes, and reset. Every process must call it."""
        sums = self._sums.clone()
        self._sums.zero_()
        scaled_all_reduce([sums], scale=1.0)
        count, loss, top1, topk = sums.tolist()
        share = 1 / count if count else float("nan")
        return {"count": int(count), "loss": loss * share, "top1": 100 * top1 * share, "topk": 100 * topk * share}
