"""LOSS.CLASS_WEIGHTS and LOSS.POSITIVE_WEIGHT: by name, or by the number of training images of each class."""

import json
import logging
from collections.abc import Sequence

import torch

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import did_you_mean, first_few
from distribuuuu.data.datasets.base import ImageDataset

logger = logging.getLogger(__name__)


def count_labels(images: ImageDataset) -> torch.Tensor:
    """Return the number of images of each class: int64 (classes,)."""
    if images.targets == "labels":
        rows = (torch.as_tensor(images.label(index)) for index in range(len(images)))
        return sum((row.ge(0.5).long() for row in rows), torch.zeros(len(images.classes), dtype=torch.int64))
    labels = torch.tensor([int(images.label(index)) for index in range(len(images))], dtype=torch.int64)
    return labels.bincount(minlength=len(images.classes))


def compute_class_weights(class_counts: torch.Tensor) -> torch.Tensor:
    """Return the weight of each class, in proportion to 1 / n for n images, float32 (classes,).

    The mean over the classes with images is 1. A class without images has the weight 1.
    """
    present = class_counts.gt(0)
    inverse = 1 / class_counts[present].double()
    weights = torch.ones(len(class_counts), dtype=torch.float64)
    weights[present] = inverse / inverse.mean()
    return weights.float()


def find_class_weights(key: str, value: str | Sequence[float], images: ImageDataset | None) -> Sequence[float]:
    """Return the numbers of LOSS.CLASS_WEIGHTS or LOSS.POSITIVE_WEIGHT for each class; log those of auto.

    Without `images`, `auto` and numbers by name give none. A name that is that of no class is a ConfigError.
    """
    if not isinstance(value, str):
        return value
    if images is None:
        return ()
    if value.startswith("{"):
        given = json.loads(value)
        unknown = [f"{name}{did_you_mean(name, images.classes)}" for name in given if name not in images.classes]
        if unknown:
            raise ConfigError(Problem(key, f"names classes that the data lacks: {first_few(unknown)}"))
        if not any(numbers := [float(given.get(name, 1)) for name in images.classes]):
            raise ConfigError(Problem(key, "expected 0 or more, not all 0"))
        return numbers
    counts = count_labels(images)
    if key == "LOSS.POSITIVE_WEIGHT":
        weights = torch.where(counts > 0, (len(images) - counts) / counts.clamp(min=1), 1.0)
    else:
        weights = compute_class_weights(counts)
    order = weights.argsort(stable=True).tolist()
    shown = [f"{images.classes[label]} {weights[label]:.4g} ({counts[label]:,} images)" for label in order]
    logger.info("%s %s: %s", key, value, first_few(shown, num=20))
    if empty := [name for name, count in zip(images.classes, counts.tolist(), strict=True) if not count]:
        logger.warning("%s %s: weight 1 for classes without training images: %s", key, value, first_few(empty))
    return weights.tolist()
