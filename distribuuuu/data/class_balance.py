"""Class-balanced sampling: the images of an epoch are drawn with replacement, by their classes."""

from collections.abc import Sequence

import torch

# A class of n images is drawn in proportion to n to this power, by DATA.SAMPLING.
CLASS_POWERS = {"balanced": 0.0, "sqrt": 0.5}


class ClassBalance:
    """Class-balanced sampling with replacement (Kang et al., arXiv 1910.09217).

    A class is drawn in proportion to its weight, and the images of a class are equally likely.

    A class of n images has the weight `n ** power`, or 0 if n is 0: a power of 0 makes all classes equally likely, and
    1 all images.
    """

    def __init__(self, labels: Sequence[int], power: float):
        classes = torch.as_tensor(labels, dtype=torch.int64)
        self._counts = torch.bincount(classes)
        weights = torch.where(self._counts > 0, self._counts.double() ** power, 0.0)
        bounds = weights.cumsum(0)
        self._bounds = bounds / bounds[-1]
        # The images sorted by class, and the offset of each class among them.
        self._images = classes.argsort(stable=True)
        self._offsets = self._counts.cumsum(0) - self._counts

    def draw(self, num: int, generator: torch.Generator) -> torch.Tensor:
        """Return the indices of `num` images: int64 (num,)."""
        for_class, for_image = torch.rand(2, num, dtype=torch.float64, generator=generator)
        chosen = torch.searchsorted(self._bounds, for_class, right=True)  # skips classes of weight 0
        counts = self._counts[chosen]
        within = torch.minimum((for_image * counts).long(), counts - 1)
        return self._images[self._offsets[chosen] + within]
