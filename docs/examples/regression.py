"""A task that does not classify: the number of a class as a value, by the squared error.

Its scores are those of predictions.npz and `predict`; its metric selects the best weights.

    distribuuuu train --cfg docs/examples/regression.yaml
"""

import torch.nn.functional as F

from distribuuuu.config.registry import DATASETS, METRICS, TASKS
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.tasks.base import Task
from distribuuuu.tasks.metrics import StepOutput, SumMetric


@DATASETS.register("shape_numbers")
class ShapeNumbers(ImageDataset):
    """The shapes, each with the number of its class as a float."""

    num_classes, has_splits, targets, classes = 1, False, "structured", ("number",)

    def __init__(self, images: ImageDataset):
        self.images = images

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> ImageDataset:
        return cls(DATASETS.get("shapes").from_cfg(cfg, train))

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> bytearray:
        return self.images.read(index)

    def label(self, index: int) -> float:
        return float(self.images.label(index))


@METRICS.register("mae")
class MeanAbsoluteError(SumMetric):
    higher_is_better = False

    def batch_sums(self, output: StepOutput):
        return (output.logits[:, 0] - output.targets).abs().sum()

    def value(self, sums, count: float) -> float:
        return sums.item() / count


@TASKS.register("regression")
class Regression(Task):
    default_metrics = ("mae",)

    def train_step(self, model, batch, key) -> StepOutput:
        with self.autocast():
            scores = model(batch.images).float()
        return StepOutput(F.mse_loss(scores[:, 0], batch.targets), scores.detach(), batch.targets)

    def eval_step(self, model, batch) -> StepOutput:
        scores = self.predict_step(model, batch.images).float()
        return StepOutput(F.mse_loss(scores[:, 0], batch.targets), scores.detach(), batch.targets)
