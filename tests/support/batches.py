"""Batches of a loader, read and compared."""

import torch

from distribuuuu.data.loader import build_loader
from distribuuuu.launch.detect import Launch

CPU = torch.device("cpu")


ALONE = Launch("alone")


def batches_of(cfg, train: bool = True) -> list[tuple[torch.Tensor, torch.Tensor]]:
    loader = build_loader(cfg, ALONE, CPU, train)
    return list(loader.batches_from(seed=5, epoch=1, first_step=1) if train else loader)


def assert_same_batches(one, other):
    assert len(one) == len(other) > 0
    for (images, labels), (others, other_labels) in zip(one, other, strict=True):
        assert torch.equal(images, others) and torch.equal(labels, other_labels)
