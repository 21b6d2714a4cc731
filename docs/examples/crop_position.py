"""Targets that follow the crop: a second head finds where the crop of each image was, beside the class.

The same boxes crop masks or maps of token labels, e.g. by `torchvision.ops.roi_align`.

    distribuuuu train --cfg docs/examples/crop_position.yaml
"""

import torch
import torch.nn.functional as F
from torch import nn

from distribuuuu.config.registry import TASKS
from distribuuuu.tasks.classification import Classification
from distribuuuu.tasks.metrics import StepOutput


class TwoOutputs(nn.Module):
    """A network with a second linear layer, which is used in training only."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.fc, self.position = backbone.fc, nn.Linear(backbone.fc.in_features, 4)
        self.backbone, backbone.fc = backbone, nn.Identity()

    def forward(self, images: torch.Tensor):
        features = self.backbone(images)
        return (self.fc(features), self.position(features)) if self.training else self.fc(features)


@TASKS.register("crop_position")
class CropPosition(Classification):
    """Classification with the squared error of the crop's top, left, height and width as parts of the image."""

    needs_geometry, num_outputs = True, None

    def adapt_model(self, model: nn.Module) -> nn.Module:
        return TwoOutputs(model)

    def train_step(self, model, batch, key) -> StepOutput:
        with self.autocast():
            logits, found = model(batch.images)
        box, flipped, size = batch.geometry
        place = box / size.repeat(1, 2)
        mirrored = 1 - place[:, :2] - place[:, 2:]  # of a flipped crop: the distance from the right and the bottom
        top_left = torch.where(flipped.flip(1), mirrored, place[:, :2])
        error = F.mse_loss(found.float(), torch.cat([top_left, place[:, 2:]], dim=1))
        loss = self.criterion(logits, batch.targets) + error
        sums = {"position_error": error.detach() * len(found)}
        return StepOutput(loss, logits.detach(), self.metric_targets(batch.targets), sums)

    def predict_step(self, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        """Return the logits, which the model returns in evaluation mode."""
        return super().predict_step(model, images)
