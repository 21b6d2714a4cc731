"""Models that fail or hang in a step, also in python tests/support/failing_models.py tools/train_net.py [FLAGS] ..."""

import os
import runpy
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from distribuuuu.config.registry import MODELS

# Forward passes in training mode before the first step: one of the dry run, and two that warm up the buckets of DDP.
NUM_DRY_RUN_PASSES = 1
NUM_WARM_UP_PASSES = 2


class FaultyModel(nn.Sequential):
    """A small model that calls a function in the forward pass of a training step, from 1, of a rank (-1: all)."""

    def __init__(self, num_classes: int, fault: Callable[[nn.Module], object], step: int, rank: int):
        super().__init__(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))
        self.fault, self.num_passes = fault, 0
        own_rank = int(os.environ.get("RANK", -1))
        num_before = NUM_DRY_RUN_PASSES + NUM_WARM_UP_PASSES * (own_rank >= 0)
        self.faulty_pass = step + num_before if rank in (-1, own_rank) else 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.num_passes += self.training
        if self.training and self.num_passes == self.faulty_pass:
            self.fault(self)
        return super().forward(images)


class Idle(nn.Module):
    """A model with a layer that its forward pass does not use."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.used = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))
        self.idle = nn.Linear(5, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.used(images)


@MODELS.register
def failing(num_classes: int, step: int = 3, rank: int = 1) -> nn.Module:
    """Return a model that raises an exception."""

    def fail(model):
        raise ArithmeticError("the flux has run out")

    return FaultyModel(num_classes, fail, step, rank)


@MODELS.register
def sleepy(num_classes: int, seconds: float, step: int = 1, rank: int = -1) -> nn.Module:
    """Return a model that sleeps in one step."""
    return FaultyModel(num_classes, lambda model: time.sleep(seconds), step, rank)


@MODELS.register
def exploding(num_classes: int, step: int = 6, rank: int = -1) -> nn.Module:
    """Return a model whose weights become NaN."""

    def explode(model):
        for weight in model.parameters():
            nn.init.constant_(weight, float("nan"))

    return FaultyModel(num_classes, explode, step, rank)


@MODELS.register
def hungry(num_classes: int, step: int = 3, rank: int = -1) -> nn.Module:
    """Return a model that allocates more memory than a process can address."""
    return FaultyModel(num_classes, lambda model: torch.empty(2**52), step, rank)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
