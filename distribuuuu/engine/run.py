"""The objects that a training run works with."""

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
    """What a training step needs.

    Attributes:
        model: the model of the state, wrapped for several processes and compiled.
        lr_at: epochs, e.g. 3.25, to the learning rate.
        clip: scales the gradients of parameters down.
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
    """A training run: what its steps need, and what surrounds them."""

    val_loader: Loader
    checkpoints: CheckpointManager
    log: RunLog
    stop: StopRequest
