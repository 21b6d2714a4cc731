"""Progressive resizing: small training images at first, which are fast, large ones at last, as evaluated."""

from collections.abc import Callable


def grow(epoch: int, start: int, end: int, first: float, last: float, multiple: int) -> int:
    """Return the side of an epoch's images, in pixels, as in ffcv: along a line, to the nearest multiple.

    Args:
        epoch: from 0.
        start, end: the side up to epoch `first`, and from epoch `last` on.
        first, last: epochs between which it grows.
        multiple: what the sides in between are multiples of, as far as `start` and `end` leave room.
    """
    done = min(1.0, max(0.0, (epoch - first) / (last - first)))
    if done in (0.0, 1.0):
        return end if done else start
    return min(end, max(start, round((start + (end - start) * done) / multiple) * multiple))


def build_im_size(cfg) -> Callable[[int], int] | None:
    """Return im_size_at(epoch), a function of nothing else; None where the side stays TRAIN.IM_SIZE."""
    train = cfg.TRAIN
    if not train.IM_SIZE_START:
        return None
    start, end, epochs, multiple = train.IM_SIZE_START, train.IM_SIZE, train.IM_SIZE_EPOCHS, train.IM_SIZE_MULTIPLE

    def im_size_at(epoch: int) -> int:
        return grow(epoch, start, end, *epochs, multiple)

    return im_size_at
