"""FixMatch (Sohn et al., arXiv 2001.07685): learn from 100 labels and many unlabeled images.

Measured on shapes, three seeds: top-1 12.8, 14.6, 13.6 %; without the unlabeled images 15.6, 16.6, 13.8 %.
No gain: with ten labels of each class, both stay little above chance, 10 %.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distribuuuu.config.registry import DATASETS, TASKS
from distribuuuu.config.settings import setting
from distribuuuu.data.batch import Batch
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.tasks.base import StepKey
from distribuuuu.tasks.classification import Classification
from distribuuuu.tasks.metrics import StepOutput


@DATASETS.register("few_shapes")
class FewShapes(ImageDataset):
    """The first ten training images of each shape, as often as needed for the steps of an epoch."""

    num_classes, has_splits = 10, False

    def __init__(self, images: ImageDataset, rows: Sequence[int]):
        self.images, self.rows, self.classes = images, rows, images.classes
        self.labels = [images.label(row) for row in rows]

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> ImageDataset:
        """Return the training or the evaluation set."""
        images = DATASETS.get("shapes").from_cfg(cfg, train)
        if not train:
            return images
        num = len(images) // 10  # images of a class, which follow each other
        return cls(images, [row - row % num + row % 10 for row in range(len(images))])

    def read(self, index: int) -> bytearray:
        """Return the bytes of an image."""
        return self.images.read(self.rows[index])


@TASKS.register("fixmatch")
class FixMatch(Classification):
    """Cross-entropy of labeled images, and of strongly augmented ones with the class of their weak augmentation."""

    @dataclass
    class Settings:
        threshold: float = setting(0.95, "least probability of a pseudo-label", least=0, most=1)
        weight: float = setting(1.0, "weight of the loss of unlabeled images", least=0)
        ratio: int = setting(3, "unlabeled images for each labeled one", least=1)

    @classmethod
    def extra_loaders(cls, cfg) -> Mapping[str, Mapping[str, Any]]:
        """Return the loader of all shapes, whose labels are not used."""
        ratio = cfg.TASK.KWARGS.get("ratio", cls.Settings.ratio)
        return {"unlabeled": {"DATA.NAME": "shapes", "TRAIN.BATCH_SIZE": ratio * cfg.TRAIN.BATCH_SIZE}}

    @classmethod
    def views(cls, cfg, loader: str = "train") -> Sequence[Mapping[str, Any]]:
        """Return a weak and a strong view of unlabeled images."""
        return [{}, {"AUG.POLICY": "randaugment"}] if loader == "unlabeled" else [{}]

    def train_step(self, model: nn.Module, batch: Batch, key: StepKey) -> StepOutput:
        """Return both losses; the fraction of images with a pseudo-label is shown as `used`."""
        weak, strong = batch.extra["unlabeled"].images
        num = len(batch.images)
        with self.autocast():
            labeled, of_weak, of_strong = model(torch.cat([batch.images, weak, strong])).float().split(
                [num, len(weak), len(strong)])  # fmt: skip
        probability, chosen = of_weak.detach().softmax(dim=1).max(dim=1)
        is_sure = probability.ge(self.settings.threshold).float()
        unlabeled_loss = (F.cross_entropy(of_strong, chosen, reduction="none") * is_sure).mean()
        loss = self.criterion(labeled, batch.targets) + self.settings.weight * unlabeled_loss
        sums = {"used": is_sure.mean() * num, "unlabeled_loss": unlabeled_loss.detach() * num}
        return StepOutput(loss, labeled.detach(), self.metric_targets(batch.targets), sums)
