"""Reading the batches of a loader, and comparing them."""

import torch

from distribuuuu.data.batch import Batch
from distribuuuu.data.loader import build_loader
from distribuuuu.launch.detect import Launch

CPU = torch.device("cpu")
ALONE = Launch("alone")


def batches_of(cfg, train: bool = True) -> list[Batch]:
    """Return the batches of one epoch."""
    loader = build_loader(cfg, ALONE, CPU, train)
    return list(loader.batches_from(seed=5, epoch=1, first_step=1) if train else loader)


def assert_same_batches(one, other):
    """Compare two lists of batches bit by bit; they must not be empty."""
    assert len(one) == len(other) > 0
    for (images, labels, *_), (others, other_labels, *_) in zip(one, other, strict=True):
        assert torch.equal(images, others) and torch.equal(labels, other_labels)
