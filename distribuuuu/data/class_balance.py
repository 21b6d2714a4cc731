"""Training on classes of very different sizes: how often each is drawn (Kang et al., arXiv 1910.09217)."""

from collections.abc import Sequence

import torch

from distribuuuu.data.datasets.base import ImageDataset

# A class of n images is drawn as often as n to this power says.
POWERS = {"balanced": 0.0, "sqrt": 0.5}


class ClassBalance:
    """Draws images with replacement: a class as often as its weight says, and of its images each as often as any other.

    Args:
        labels: the class of each image, from 0.
        power: a class of n images has the weight `n ** power`: 0 makes all classes equal, 1 all images. A class without
            images is never drawn.
    """

    def __init__(self, labels: Sequence[int], power: float):
        labels = torch.as_tensor(labels, dtype=torch.int64)
        self._counts = torch.bincount(labels)
        weights = torch.where(self._counts > 0, self._counts.double() ** power, 0.0)
        bounds = weights.cumsum(0)
        self._bounds = bounds / bounds[-1]
        # The images by class, and where each class begins among them.
        self._images = labels.argsort(stable=True)
        self._begins = self._counts.cumsum(0) - self._counts

    def draw(self, num: int, generator: torch.Generator) -> torch.Tensor:
        """Return the numbers of `num` images: int64 (num,)."""
        of_class, of_image = torch.rand(2, num, dtype=torch.float64, generator=generator)
        chosen = torch.searchsorted(self._bounds, of_class, right=True)  # skips classes of no width
        counts = self._counts[chosen]
        within = torch.minimum((of_image * counts).long(), counts - 1)
        return self._images[self._begins[chosen] + within]


def build_balance(cfg, images: ImageDataset) -> ClassBalance | None:
    """Return what draws as DATA.SAMPLING says; None for `uniform`, where each image comes once."""
    if cfg.DATA.SAMPLING not in POWERS:
        return None
    assert not images.multilabel  # a conflict within the config
    return ClassBalance([images.label(index) for index in range(len(images))], POWERS[cfg.DATA.SAMPLING])
