"""Geometry: where in an image each pixel of a view comes from, for a task that needs it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from distribuuuu.config.derived import Size, height_and_width
from distribuuuu.data.decode import LazyImage
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import MAX_ASPECT


class Geometry(NamedTuple):
    """Origin of the pixels of a view, so that dense targets, e.g. masks, can follow them.

    Attributes:
        box: top, left, height and width of the crop, float32 (N, 4), in pixels of the image; it may extend beyond it.
        flipped: whether the crop was then flipped horizontally and vertically, bool (N, 2).
        size: height and width of the image in pixels, int64 (N, 2).
    """

    box: torch.Tensor
    flipped: torch.Tensor
    size: torch.Tensor


def as_geometry(found: Sequence[Any], num_views: int) -> Geometry | tuple[Geometry, ...]:
    """Return the geometry of N samples as in `Batch.geometry`; zeros for a broken image."""
    views = [[one[view] if one and num_views > 1 else one for one in found] for view in range(num_views)]
    rows = [torch.tensor([one or (0,) * 8 for one in view], dtype=torch.float32) for view in views]
    parts = tuple(Geometry(row[:, :4], row[:, 4:6].bool(), row[:, 6:].long()) for row in rows)
    return parts if num_views > 1 else parts[0]


def record_geometry(
    rng: SampleRNG, image: LazyImage, resized: Sequence[int], corner: Sequence[float], size: Size,
    flips: Sequence[bool] = (False, False), ends: bool = True
) -> None:  # fmt: skip
    """Record a crop of `size` at a corner (top, left) of the resized image, after `crop_ends`; see `Geometry`."""
    height, width = image.size
    cut = [max(0, height - MAX_ASPECT * width) // 2, max(0, width - MAX_ASPECT * height) // 2] if ends else [0, 0]
    scales = [(side - 2 * end) / new for side, end, new in zip((height, width), cut, resized, strict=True)]
    starts = [end + first * scale for end, first, scale in zip(cut, corner, scales, strict=True)]
    lengths = [side * scale for side, scale in zip(height_and_width(size), scales, strict=True)]
    rng.geometry = *starts, *lengths, *flips, height, width
