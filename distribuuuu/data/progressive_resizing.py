"""Progressive resizing: the side of the training images grows over the epochs."""

import functools
from collections.abc import Callable


def progressive_im_size(epoch: int, start: int, end: int, first: float, last: float, multiple: int) -> int:
    """Return the side of an epoch's images, in pixels: linear in the epoch, to the nearest multiple (as in ffcv).

    Args:
        epoch: from 0.
        start, end: the side up to epoch `first`, and from epoch `last`.
        first, last: epochs between which the side grows.
        multiple: sides in between are multiples of it, within `start` and `end`.
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
