"""A batch on the device, as loaders yield it and as tasks receive it."""

from typing import NamedTuple

import torch


class Batch(NamedTuple):
    """Images with their targets. Read the fields by name: further ones may follow.

    Attributes:
        images: normalized, float32 (N, C, H, W).
        targets: int64 (N,), or float32 (N, classes) where an image has several labels.
        index: the index of each image in the data set, int64 (N,); None if it is unknown, e.g. in a measurement.
    """

    images: torch.Tensor
    targets: torch.Tensor
    index: torch.Tensor | None = None  # type: ignore[assignment]  # in place of the method of tuples
