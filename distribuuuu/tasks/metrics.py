"""Exact counters that stay on the device: sums are kept there, reduced over the processes on read, then divided.

A checkpoint holds them too: a row of metrics is the same whether or not the run was resumed within it.
"""

import math
from collections.abc import Sequence

import torch

from distribuuuu.config import ConfigError
from distribuuuu.config.registry import dataset_class
from distribuuuu.distributed.comm import gather_rows, scaled_all_reduce

# Scores that are sorted at a time: it bounds the memory that the average precision takes.
_MOST_SCORES = 2**24
# Scores of a process that a checkpoint keeps, 20 MiB; a row of more begins anew after a resume.
_MOST_SAVED = 2**22


class NonFiniteLoss(ConfigError):
    """A loss was infinite or not a number since the read before; every process sees it at the same read."""

    on_all_processes = True

    def located(self, where: str, remedy: str) -> "NonFiniteLoss":
        """Return the error that says where it was and what can be done beside a lower learning rate."""
        return NonFiniteLoss(f"{self} {where}; fix: lower OPTIM.BASE_LR, lengthen OPTIM.WARMUP_EPOCHS, or {remedy}")


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Return what a meter read.

    Raises:
        NonFiniteLoss: the mean loss is infinite or not a number.
    """
    if not math.isfinite(metrics["loss"]):
        raise NonFiniteLoss(f"the training loss is {metrics['loss']}")
    return metrics


def build_meter(cfg, device: torch.device) -> "ClassificationMeter | MultilabelMeter":
    """Return the counters for TRAIN.TOPK; with fewer classes, for their number; those of several labels an image."""
    if dataset_class(cfg).multilabel:
        return MultilabelMeter(cfg.MODEL.NUM_CLASSES, device)
    return ClassificationMeter(min(cfg.TRAIN.TOPK, cfg.MODEL.NUM_CLASSES), device)


def metric_names(cfg) -> dict[str, str]:
    """Return the percentages that the meter of a config reads: name -> what it is called; the first is to be great."""
    if dataset_class(cfg).multilabel:
        return {"map": "map"}
    return {"top1": "top1", "topk": f"top{min(cfg.TRAIN.TOPK, cfg.MODEL.NUM_CLASSES)}"}


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

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what this process has counted since the last read."""
        return {"sums": self._sums.cpu()}

    def load_state_dict(self, parts: Sequence[dict[str, torch.Tensor]]) -> None:
        """Go on from what processes have counted, in place of what this one has; no parts: from nothing."""
        self._sums.zero_()
        for part in parts:
            self._sums += part["sums"].to(self._sums)


class MultilabelMeter:
    """Loss and mean average precision over everything seen since the last reset, where an image has several labels.

    Average precision ranks all images by their scores: every logit is kept on the device until the read, 5 bytes for
    each class of each image, and on a read every process gets those of all.

    Args:
        num_classes: columns of the logits.
        device: where everything is kept.
    """

    def __init__(self, num_classes: int, device: torch.device):
        self._nothing = (torch.empty(0, num_classes, device=device),
                         torch.empty(0, num_classes, dtype=torch.uint8, device=device))  # fmt: skip
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums = torch.zeros(2, dtype=dtype, device=device)  # count, loss * count
        self._batches = [self._nothing]

    @torch.no_grad()
    def update(self, loss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Add one batch: its mean loss (), logits (N, classes), targets (N, classes) of 0 to 1. Waits for nothing.

        Of a target between, as mixed images have, a class applies from a half on.
        """
        self._sums[0] += len(targets)
        self._sums[1].add_(loss.detach(), alpha=len(targets))
        # Copies: a compiled model may write its next logits to the same memory.
        self._batches.append((logits.detach().to(torch.float32, copy=True), targets.ge(0.5).to(torch.uint8)))

    def read(self) -> dict[str, float]:
        """Return count, loss and map (percent) over all processes, and reset. Every process must call it.

        map is the mean over the classes that apply to an image at all; not a number when there is none.
        """
        sums, batches = self._sums.clone(), self._batches
        self._sums.zero_()
        self._batches = [self._nothing]
        scaled_all_reduce([sums], scale=1.0)
        scores, applies = (gather_rows(torch.cat(parts)) for parts in zip(*batches, strict=True))
        count, loss = sums.tolist()
        precisions = average_precisions(scores, applies)
        mean = precisions[~precisions.isnan()].mean()
        return {"count": int(count), "loss": loss / count if count else float("nan"), "map": 100 * float(mean)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what this process has counted since the last read; nothing if that is more than `_MOST_SAVED`."""
        is_small = sum(scores.numel() for scores, _ in self._batches) <= _MOST_SAVED
        sums, batches = (self._sums, self._batches) if is_small else (torch.zeros_like(self._sums), [self._nothing])
        scores, applies = (torch.cat(parts).cpu() for parts in zip(*batches, strict=True))
        return {"sums": sums.cpu(), "scores": scores, "applies": applies}

    def load_state_dict(self, parts: Sequence[dict[str, torch.Tensor]]) -> None:
        """Go on from what processes have counted, in place of what this one has; no parts: from nothing."""
        self._sums.zero_()
        self._batches = [self._nothing]
        for part in parts:
            self._sums += part["sums"].to(self._sums)
            self._batches.append((part["scores"].to(self._sums.device), part["applies"].to(self._sums.device)))


def average_precisions(scores: torch.Tensor, applies: torch.Tensor) -> torch.Tensor:
    """Return the average precision of each class, (classes,), of 1.0; not a number for a class that never applies.

    The sum over thresholds of (recall - recall of the threshold before) * precision, as scikit-learn's
    `average_precision_score` defines it: images of the same score share a threshold. No order of the images matters.

    Args:
        scores: float32 (N, classes); those that are not a number rank last.
        applies: (N, classes), 1 where a class applies and else 0.
    """
    num = max(1, _MOST_SCORES // max(1, len(scores)))
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
