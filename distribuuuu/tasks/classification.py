"""Classification with one label or several labels per image."""

from collections.abc import Sequence

import torch
from torch import nn

from distribuuuu.config.registry import TASKS
from distribuuuu.data.batch_plan import BatchPlan, check_accumulation
from distribuuuu.data.mixup import build_mixer
from distribuuuu.optim.precision import Precision
from distribuuuu.tasks.base import StepKey, Task
from distribuuuu.tasks.losses import build_loss
from distribuuuu.tasks.metrics import StepOutput, hard_labels


@TASKS.register("classification")
class Classification(Task):
    """One label per image: LOSS.NAME on images mixed by Mixup or CutMix in training, cross-entropy in evaluation."""

    def __init__(self, cfg, classes: Sequence[str], device: torch.device, precision: Precision):
        super().__init__(cfg, classes, device, precision)
        self.eval_criterion = build_loss(cfg, train=False)

    def prepare_training(self, plan: BatchPlan) -> None:
        """Build the mixer and the loss."""
        check_accumulation(self.cfg, plan)
        self.mix = build_mixer(self.cfg, plan)
        self.criterion = build_loss(self.cfg).to(self.device)

    def train_step(self, model: nn.Module, images: torch.Tensor, targets: torch.Tensor, key: StepKey) -> StepOutput:
        """Return the training loss of a micro-batch and the inputs of the metrics."""
        images, targets = self.mix(images, targets, *key)
        with self.autocast():
            logits = model(images)
        return StepOutput(self.compute_loss(images, logits, targets), logits.detach(), self.metric_targets(targets))

    def compute_loss(self, images: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean training loss ()."""
        return self.criterion(logits, targets)

    def eval_step(self, model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> StepOutput:
        """Return the evaluation loss of a batch and the inputs of the metrics.

        TEST.FLIP averages the logits of each image and its mirror image.
        """
        with self.autocast():
            logits = model(images)
            if self.cfg.TEST.FLIP:  # a compiled model's second output may overwrite its first
                logits = (logits.clone() + model(images.flip(-1))) / 2
        return StepOutput(self.eval_criterion(logits, targets), logits, self.metric_targets(targets))

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
