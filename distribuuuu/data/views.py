"""Transforms of an image that has several views, or that change with the epoch."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from distribuuuu.data.decode import LazyImage
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import Size, Transform


@dataclass(frozen=True)
class Views(Transform):
    """Several transforms of one image, which is decoded once; the first gives what it gives alone."""

    transforms: tuple[Transform, ...]

    def __str__(self) -> str:
        return "; ".join(f"view {number}: {view}" for number, view in enumerate(self.transforms, 1))

    @property
    def views(self) -> tuple[Transform, ...]:
        """The transforms."""
        return self.transforms

    def __call__(self, image: LazyImage, rng: SampleRNG) -> tuple[torch.Tensor, ...]:
        """Return uint8 (3, height, width) of each view."""
        decoded, rngs = LazyImage(image.pixels()), rng.split(len(self.transforms))
        return tuple(view(decoded, own) for view, own in zip(self.transforms, rngs, strict=True))

    def at_size(self, size: Size) -> "Views":
        """Return the same views with outputs of another size."""
        return Views(tuple(view.at_size(size) for view in self.transforms))


@dataclass(frozen=True)
class EpochTransforms(Transform):
    """Transforms that depend on the epoch: that of each stage, at the image size of each epoch.

    Attributes:
        stages: by its first epoch, from 0, the transform of each stage, in order.
        im_size_at: function from the epoch to the side of its images, in pixels; None: that of the transform.
    """

    stages: Mapping[int, Transform]
    im_size_at: Callable[[int], int] | None = None

    def __str__(self) -> str:
        return str(self.stages[0])

    @property
    def views(self) -> tuple[Transform, ...]:
        """The views of the first stage."""
        return self.stages[0].views

    def at_epoch(self, epoch: int) -> Transform:
        """Return the transform of an epoch."""
        transform = self.stages[max(first for first in self.stages if first <= epoch)]
        return transform.at_size(self.im_size_at(epoch)) if self.im_size_at else transform

    def __call__(self, image: LazyImage, rng: SampleRNG) -> torch.Tensor:
        """Unused: a sample is transformed by the transform of its epoch."""
        raise TypeError("a transform with stages is called by way of at_epoch")


def progressive_im_size(epoch: int, start: int, end: int, first: float, last: float, multiple: int) -> int:
    """Return the side of an epoch's images, in pixels: linear in the epoch, to the nearest multiple (as in ffcv).

    It is `start` up to the epoch `first`, and `end` from the epoch `last`; epochs count from 0.
    """
    progress = min(1.0, max(0.0, (epoch - first) / (last - first)))
    if progress in (0.0, 1.0):
        return end if progress else start
    return min(end, max(start, round((start + (end - start) * progress) / multiple) * multiple))


def build_im_size(cfg) -> Callable[[int], int] | None:
    """Return a function from the epoch to the side of its images; None if it is always TRAIN.IM_SIZE."""
    train = cfg.TRAIN
    if not train.IM_SIZE_START:
        return None
    first, last = train.IM_SIZE_EPOCHS
    sides = {"start": train.IM_SIZE_START, "end": train.IM_SIZE, "multiple": train.IM_SIZE_MULTIPLE}
    return functools.partial(progressive_im_size, **sides, first=first, last=last)
