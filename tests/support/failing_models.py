"""Run a tool with models that fail or sleep: python tests/support/failing_models.py tools/train_net.py ARGS..."""

import ctypes
import os
import runpy
import sys
import time

import torch
from torch import nn

from distribuuuu.config.registry import MODELS

# Passes in training mode that are made before the first step: a rehearsal, and in a group two to settle DDP's buckets.
NUM_BEFORE = 1
NUM_SETTLING = 2


class Odd(nn.Sequential):
    """A small net that does something odd in the forward pass of a step, on one process or on all (-1)."""

    def __init__(self, num_classes: int, oddity, step: int, rank: int):
        super().__init__(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))
        self.oddity, self.num_passes = oddity, 0
        own_rank = int(os.environ.get("RANK", -1))
        before = NUM_BEFORE + NUM_SETTLING * (own_rank >= 0)
        self.odd_pass = step + before if rank in (-1, own_rank) else 0

    def forward(self, images):
        self.num_passes += self.training
        if self.training and self.num_passes == self.odd_pass:
            self.oddity(self)
        return super().forward(images)


@MODELS.register
def failing(
    num_classes: int, step: int = 3, rank: int = 1, text: str = "the flux has run out", is_destroyable: bool = True
) -> nn.Module:
    """Return a net that raises an exception; without `is_destroyable` its process group waits for ever at its end."""

    def fail(model):
        if not is_destroyable:
            torch.distributed.destroy_process_group = lambda: time.sleep(600)
        raise ArithmeticError(text)

    return Odd(num_classes, fail, step, rank)


@MODELS.register
def sleepy(num_classes: int, seconds: float, step: int = 1, rank: int = -1) -> nn.Module:
    """Return a net that takes its time."""
    return Odd(num_classes, lambda model: time.sleep(seconds), step, rank)


@MODELS.register
def holding(num_classes: int, seconds: int, step: int = 2, rank: int = -1) -> nn.Module:
    """Return a net that holds the interpreter lock."""
    return Odd(num_classes, lambda model: ctypes.PyDLL(None).sleep(seconds), step, rank)


@MODELS.register
def exploding(num_classes: int, step: int = 6, rank: int = -1) -> nn.Module:
    """Return a net whose weights turn into NaN."""

    def explode(model):
        for weight in model.parameters():
            nn.init.constant_(weight, float("nan"))

    return Odd(num_classes, explode, step, rank)


@MODELS.register
def hungry(num_classes: int, step: int = 3, rank: int = -1) -> nn.Module:
    """Return a net that asks for more memory than a process can address."""
    return Odd(num_classes, lambda model: torch.empty(2**52), step, rank)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


class Idle(nn.Module):
    """A net with a layer that nobody calls."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.used = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))
        self.idle = nn.Linear(5, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.used(images)
