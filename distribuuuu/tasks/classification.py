"""Classification with one label or several labels per image."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from distribuuuu.config.derived import stage_without_augmentation
from distribuuuu.config.registry import TASKS
from distribuuuu.data.batch import Batch, pad_batch
from distribuuuu.data.batch_plan import BatchPlan, check_graphs
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.optim.precision import Precision
from distribuuuu.tasks.base import StepKey, Task
from distribuuuu.tasks.losses import Loss, build_loss
from distribuuuu.tasks.metrics import StepOutput, hard_labels, one_hot

# The names of the state of the loss begin with this.
_LOSS = "criterion."


@TASKS.register("classification")
class Classification(Task):
    """One label per image: LOSS.NAME on images mixed by Mixup or CutMix in training, cross-entropy in evaluation."""

    criterion: Any = None  # only in training
    mix: Any = None  # only with Mixup or CutMix

    def __init__(self, cfg, classes: Sequence[str], device: torch.device, precision: Precision):
        super().__init__(cfg, classes, device, precision)
        self.eval_criterion = build_loss(cfg, train=False)

    def prepare_training(self, plan: BatchPlan, images: ImageDataset, num_steps: int) -> None:
        """Build the mixer and the loss."""
        check_graphs(self.cfg, plan)
        if self.cfg.AUG.MIXUP or self.cfg.AUG.CUTMIX:
            from distribuuuu.data.mixup import build_mixer

            self.mix = build_mixer(self.cfg, plan)
        self.mix_end = min(stage_without_augmentation(self.cfg), default=math.inf)
        self.criterion = build_loss(self.cfg, images=images).to(self.device)
        if type(self.criterion).prepare is not Loss.prepare:
            from distribuuuu.tasks.class_weights import count_labels

            self.criterion.prepare(count_labels(images))

    def begin_epoch(self, epoch: int) -> str | None:
        """Prepare the loss for an epoch; return the name of its stage, if it has any."""
        return self.criterion.begin_epoch(epoch)

    def prepare_batch(self, batch: Batch, key: StepKey) -> Batch:
        """Return a micro-batch, mixed by Mixup or CutMix."""
        if not self.mix or key.epoch >= self.mix_end:
            return batch
        images, targets = self.mix(batch.images, batch.targets, *key)
        return Batch(images, targets, *batch[2:])

    def train_step(self, model: nn.Module, batch: Batch, key: StepKey) -> StepOutput:
        """Return the training loss of a micro-batch and the inputs of the metrics."""
        with self.autocast():
            logits = model(batch.images)
        loss = self.compute_loss(batch.images, logits, batch.targets)
        return StepOutput(loss, logits.detach(), self.metric_targets(batch.targets))

    def compute_loss(self, images: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean training loss ()."""
        return self.criterion(logits, targets)

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the evaluation loss of a batch and the inputs of the metrics."""
        images, num = batch.images, len(batch.images)
        if images.is_cuda or getattr(model, "_compiled_call_impl", None):
            # The last, short batch compiles nothing and measures no algorithms. A CPU would gain nothing.
            images = pad_batch(images, self.cfg.TEST.BATCH_SIZE)
        logits = self.predict_step(model, images)[:num]
        return StepOutput(self.eval_criterion(logits, batch.targets), logits, self.metric_targets(batch.targets))

    def wrong_output(self, batch: Batch, output: StepOutput) -> StepOutput | None:
        """Return logits of -1 for the labels of each image and of 1 for the other classes; None as TEST.BROKEN says."""
        if self.cfg.TEST.BROKEN == "left_out":
            return None
        targets = self.metric_targets(batch.targets)
        logits = 1 - 2 * one_hot(targets, len(self.classes)).to(output.logits.dtype)
        sums = {name: torch.zeros_like(value) for name, value in output.sums.items()}
        return StepOutput(self.eval_criterion(logits, batch.targets), logits, targets, sums)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss; a task that has more adds its own."""
        own = {} if self.criterion is None else self.criterion.state_dict()
        return {f"{_LOSS}{name}": value for name, value in own.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the loss; other entries are left to the task."""
        own = {name.removeprefix(_LOSS): value for name, value in state.items() if name.startswith(_LOSS)}
        if self.criterion is not None:
            self.criterion.load_state_dict(own)

    def metric_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the targets in the form of `StepOutput.targets`."""
        return hard_labels(targets)


@TASKS.register("multilabel")
class MultilabelClassification(Classification):
    """Any number of labels per image: targets (N, classes) from 0 to 1."""

    default_metrics = ("map",)
    multilabel = True

    def metric_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Return uint8 (N, classes): 1 where the target, which may be mixed, is at least 0.5."""
        return targets.ge(0.5).to(torch.uint8)
