"""Models that fail or hang in a step, also in python tests/support/failing_models.py tools/train_net.py [FLAGS] ..."""

import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

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
        own_rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", -1)))
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
def signaled(num_classes: int, signum: int, step: int = 1, rank: int = -1) -> nn.Module:
    """Return a model whose process sends itself a signal in one step."""
    return FaultyModel(num_classes, lambda model: os.kill(os.getpid(), signum), step, rank)


@MODELS.register
def sleepy(num_classes: int, seconds: float, step: int = 1, rank: int = -1) -> nn.Module:
    """Return a model that sleeps in one step."""
    return FaultyModel(num_classes, lambda model: time.sleep(seconds), step, rank)


@MODELS.register
def hungry(num_classes: int, step: int = 3, rank: int = -1) -> nn.Module:
    """Return a model that allocates more memory than a process can address."""
    return FaultyModel(num_classes, lambda model: torch.empty(2**52), step, rank)


def fault_words(fault: str, rank: int) -> tuple[object, ...]:
    """Return the options of a run in which a process is killed, stopped or hung in the fourth step."""
    signum = {"killed": signal.SIGKILL.value, "stopped": signal.SIGSTOP.value}.get(fault)
    kind = ("signaled", "MODEL.KWARGS.signum", signum) if signum else ("sleepy", "MODEL.KWARGS.seconds", 600)
    model = ("MODEL.ARCH", *kind, "MODEL.KWARGS.step", 4, "MODEL.KWARGS.rank", rank)
    return (*model, "DIST.TIMEOUT_S", 6, "DIST.STARTUP_TIMEOUT_S", 60)


def assert_fault_is_reported(out_dir: Path, fault: str, rank: int, num: int) -> None:
    """Check what such a run of several processes has printed, and the stacks of those that have stalled."""
    text = Path(f"{out_dir}.console").read_text()
    if fault == "killed":
        assert len(re.findall(rf"process {rank}( on \S+)? died after (its start|epoch 1, step)", text)) == 1
        return
    assert text.count("no process has made a step for 6 s (DIST.TIMEOUT_S), all stop; stacks: ") == 1
    silent = rf"process {rank}( on \S+:|, which hosts the store,) does not respond"
    assert bool(re.search(silent, text)) == (fault == "stopped")
    for number in {*range(num)} - ({rank} if fault == "stopped" else set()):
        place = rf"process {number} on \S+: no step for \d+ s after epoch 1, step 3\n"
        assert re.search(place, text) or "process 0, which hosts the store, does not respond" in text
        stacks = (out_dir / "stacks" / f"rank_{number}.txt").read_text()
        assert "after epoch 1, step 3" in stacks and ("in <lambda>" if number == rank else "backward") in stacks


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
