"""The objects of a training run."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.config import Config
from distribuuuu.data.loader import Loader, TrainLoader
from distribuuuu.engine.state import TrainState
from distribuuuu.engine.stop import StopRequest
from distribuuuu.report.run_log import RunLog
from distribuuuu.tasks.base import Task


@dataclass
class Training:
    """The objects of a training step.

    Attributes:
        model: `state.model`, wrapped for several processes and compiled.
        lr_at: function from the epoch, e.g. 3.25, to the learning rate.
        clip: function that clips the gradients of parameters.
    """

    cfg: Config
    task: Task
    state: TrainState
    model: nn.Module
    train_loader: TrainLoader
    lr_at: Callable[[float], float]
    clip: Callable[[Iterable[torch.Tensor]], None]


@dataclass
class Run(Training):
    """The objects of a training run: those of its steps, and those around them."""

    val_loader: Loader
    checkpoints: CheckpointManager
    log: RunLog
    stop: StopRequest
