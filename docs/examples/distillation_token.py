"""The distillation token of DeiT (Touvron et al., arXiv 2012.12877): a second head that learns from a teacher.

distribuuuu train --cfg distillation_token.yaml DISTILL.WEIGHTS exp/teacher/best.pth.tar

Measured on the 500 evaluation images of shapes, 20 epochs (n = 3): top-1 23.4, 27.2 and 22.8 %; with the distillation
of the package and the same teacher 27.6, 25.2 and 23.8 %.
"""

import torch
import torch.nn.functional as F
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.registry import TASKS
from distribuuuu.data.batch import Batch
from distribuuuu.tasks.base import StepKey
from distribuuuu.tasks.distillation import Distillation
from distribuuuu.tasks.metrics import StepOutput


@TASKS.register("distillation_token")
class DistillationToken(Distillation):
    """The class token learns the labels, the distillation token the class that the teacher predicts.

    For models of timm that end with `_distilled`. In evaluation, they return the mean of both heads.
    """

    num_outputs = None  # in training, the model returns the logits of both heads

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Return the model, which then returns both heads in training."""
        if not hasattr(model, "set_distilled_training"):
            expected = "expected a model of timm that ends with _distilled; fix: set deit_tiny_distilled_patch16_224"
            raise ConfigError(Problem("MODEL.ARCH", f"got {self.cfg.MODEL.ARCH}; {expected}"), self.cfg.origins)
        model.set_distilled_training(True)
        return model

    def train_step(self, model: nn.Module, batch: Batch, key: StepKey) -> StepOutput:
        """Return the mean of both losses, and the loss of the distillation token by itself."""
        with torch.no_grad(), self.autocast():
            chosen = self.teacher(batch.images).argmax(dim=1)
        with self.autocast():
            logits, of_token = model(batch.images)
        token_loss = F.cross_entropy(of_token.float(), chosen)
        alpha = self.cfg.DISTILL.ALPHA
        loss = (1 - alpha) * self.criterion(logits, batch.targets) + alpha * token_loss
        sums = {"token_loss": token_loss.detach() * len(chosen)}
        return StepOutput(loss, logits.detach(), self.metric_targets(batch.targets), sums)

    def predict_step(self, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        """Return the mean of both heads, which the model returns in evaluation mode."""
        return super().predict_step(model, images)
