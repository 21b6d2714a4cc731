"""Accumulation of the loss and the metrics on the device, and their exact reduction over the processes."""

import math
from collections.abc import Mapping, Sequence

import torch

from distribuuuu.config import ConfigError
from distribuuuu.distributed.comm import gather_rows, scaled_all_reduce
from distribuuuu.tasks.metrics import Metric, ScoreMetric, StepOutput, SumMetric, join, one_hot

# Logits of a process that a checkpoint stores at most, 20 MiB; with more, a resumed run starts a new accumulation.
_MAX_SAVED = 2**22
# Batches that are kept until their metrics are computed together, and their logits at most.
_MAX_PENDING, _MAX_PENDING_LOGITS = 64, 2**20


class NonFiniteLoss(ConfigError):
    """The training loss is infinite or NaN; raised by every process at the same read of the meter."""

    on_all_processes = True

    def located(self, position: str, remedy: str) -> "NonFiniteLoss":
        """Return the error with the position in the run and a remedy besides a lower learning rate."""
        return NonFiniteLoss(f"{self} {position}; fix: lower OPTIM.BASE_LR, lengthen OPTIM.WARMUP_EPOCHS, or {remedy}")


def check_finite(metrics: dict[str, float]) -> dict[str, float]:
    """Return the values that a meter has read, unchanged.

    Raises:
        NonFiniteLoss: the mean loss is infinite or NaN.
    """
    if not math.isfinite(metrics["loss"]):
        raise NonFiniteLoss(f"the training loss is {metrics['loss']}")
    return metrics


class Meter:
    """Number of images, mean loss and metrics over all batches since the last read.

    All sums are in one tensor on the device: `update` does not synchronize, and `read` needs one collective for them.
    Sums are added over the processes before they are divided, so every image has the same weight. Several batches are
    added at a time: right after a step, each small operation takes long.

    Args:
        metrics: metrics by name.
        num_classes: columns of the logits.
        device: the device of the batches.
    """

    def __init__(self, metrics: Mapping[str, Metric], num_classes: int, device: torch.device):
        self._sum_metrics = {name: metric for name, metric in metrics.items() if isinstance(metric, SumMetric)}
        self._score_metrics = {name: metric for name, metric in metrics.items() if isinstance(metric, ScoreMetric)}
        self._names = list(metrics)
        # MPS has no float64; a float32 sum is exact for counts below 2^24.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        num_sums = 2 + sum(math.prod(metric.shape) for metric in self._sum_metrics.values())
        self._sums = torch.zeros(num_sums, dtype=dtype, device=device)
        no_scores = torch.empty(0, num_classes, device=device)
        self._no_scores = no_scores, no_scores.to(torch.uint8)
        self._scores = [self._no_scores]
        self._pending: list[StepOutput] = []

    def update(self, output: StepOutput) -> None:
        """Add one batch."""
        self._pending.append(output.detach())
        num = len(self._pending)
        if self._score_metrics or num == _MAX_PENDING or num * output.logits.numel() >= _MAX_PENDING_LOGITS:
            self._add_pending()

    @torch.no_grad()
    def _add_pending(self) -> None:
        """Add the pending batches to the sums: counts at once, other values one after the other, as they round."""
        pending, self._pending = self._pending, []
        joined = join(pending)
        count, loss, parts = self._split(self._sums)
        count += sum(output.num_images for output in pending)
        for output in pending:
            loss.add_(output.loss, alpha=output.num_images)
        for name, metric in self._sum_metrics.items():
            for output in joined if metric.is_count else pending:
                parts[name].add_(metric.batch_sums(output))
        for output in joined if self._score_metrics else ():
            self._scores.append((output.logits.float(), one_hot(output.targets, output.logits.shape[1])))

    def read(self) -> dict[str, float]:
        """Return count, loss and metrics over all processes, and reset. Every process must call it."""
        self._add_pending()
        sums, scores = self._sums.clone(), self._scores
        self._sums.zero_()
        self._scores = [self._no_scores]
        scaled_all_reduce([sums], scale=1.0)
        count, loss, parts = self._split(sums.cpu())
        num = count.item()
        values = {name: metric.value(parts[name], num) for name, metric in self._sum_metrics.items()}
        if self._score_metrics:
            logits, targets = (gather_rows(torch.cat(parts)) for parts in zip(*scores, strict=True))
            values |= {name: metric.value(logits, targets) for name, metric in self._score_metrics.items()}
        # The two divisions round differently; both are kept, so that recorded results stay bitwise the same.
        mean_loss = loss.item() / (num or math.nan) if self._score_metrics else loss.item() * (1 / (num or math.nan))
        return {"count": int(num), "loss": mean_loss, **{name: values[name] for name in self._names}}

    def _split(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return views of all sums: the number of images (), the loss (), and those of each metric."""
        shapes = {name: metric.shape for name, metric in self._sum_metrics.items()}
        count, loss, *parts = sums.split([1, 1, *map(math.prod, shapes.values())])
        views = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return count.view(()), loss.view(()), views

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the sums and logits of this process since the last read; zeros if the logits exceed `_MAX_SAVED`."""
        self._add_pending()
        if not self._score_metrics:
            return {"sums": self._sums.cpu()}
        is_small = sum(logits.numel() for logits, _ in self._scores) <= _MAX_SAVED
        sums, parts = (self._sums, self._scores) if is_small else (torch.zeros_like(self._sums), [self._no_scores])
        logits, targets = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
        return {"sums": sums.cpu(), "scores": logits, "applies": targets}

    def load_state_dict(self, states: Sequence[dict[str, torch.Tensor]]) -> None:
        """Replace the accumulated values by the sum of the states of some processes; without states, by zeros.

        States of other metrics or other classes are ignored.
        """
        self._pending = []
        self._sums.zero_()
        self._scores = [self._no_scores]
        empty = self.state_dict()
        for state in states:
            if not _is_compatible(state, empty):
                continue
            self._sums += state["sums"].to(self._sums)
            if self._score_metrics:
                device = self._sums.device
                self._scores.append((state["scores"].to(device), state["applies"].to(device)))


def _is_compatible(state: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> bool:
    """Return whether a saved state has the names, types and shapes (except the number of rows) of a meter's own."""
    return state.keys() == own.keys() and all(
        isinstance(state[name], torch.Tensor) and state[name].dtype == value.dtype
        and (state[name].dim(), state[name].shape[-1:]) == (value.dim(), value.shape[-1:])
        for name, value in own.items()
    )  # fmt: skip
