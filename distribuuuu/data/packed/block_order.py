"""Blocks of neighboring images of a pack, and orders that read each block once."""

from typing import TYPE_CHECKING, Any

import numpy as np

from distribuuuu.data.datasets.index import Arrays
from distribuuuu.data.packed.format import HEADER_SIZE

if TYPE_CHECKING:
    import torch

# Size of a block in bytes: the unit of reading over a network.
BLOCK_BYTES = 2 << 20
# Blocks within which images are shuffled.
WINDOW = 1024


def block_starts(columns: Arrays) -> np.ndarray:
    """Return the first image of each block, ascending: int64 (blocks,).

    A block has the records that begin in the same BLOCK_BYTES of a shard.
    """
    cell = (columns["shard"].astype(np.int64) << 40) + (columns["offset"] - HEADER_SIZE) // BLOCK_BYTES
    return np.flatnonzero(np.diff(cell, prepend=-1))


class BlockShuffle:
    """Orders of images that visit each block within a short time.

    The blocks are put into a random order. Then each image moves back by a random distance of at most `window` blocks.

    Args:
        images: the pack.
        window: in blocks, by default WINDOW; fewer blocks are shuffled as a whole.
    """

    def __init__(self, images: Any, window: int | None = None):
        import torch

        self._starts, self._window = torch.from_numpy(block_starts(images.columns)), window or WINDOW

    def draw(self, num: int, generator: "torch.Generator") -> "torch.Tensor":
        """Return the indices of all `num` images: int64 (num,)."""
        import torch  # not above: the checks before a run import this file

        num_blocks = len(self._starts)
        if num_blocks <= self._window:
            return torch.randperm(num, generator=generator)
        blocks = torch.randperm(num_blocks, generator=generator)
        lengths = torch.diff(self._starts, append=torch.tensor([num]))[blocks]
        positions = torch.arange(num)
        images = positions + (self._starts[blocks] - lengths.cumsum(0) + lengths).repeat_interleave(lengths)
        delays = torch.rand(num, dtype=torch.float64, generator=generator) * (num * self._window / num_blocks)
        return images[(positions + delays).argsort(stable=True)]
