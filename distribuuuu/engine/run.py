"""The objects of a training run."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.config import Config
from distribuuuu.data.loader import Loader, TrainLoader
from distribuuuu.data.workers import Pass
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


def expected_passes(run: Run) -> Iterator[Pass]:
    """Return the passes over the data after the steps of this epoch, if the run is not rolled back."""
    train, plan, seed, num_kinds = run.train_loader, run.train_loader.plan, run.state.stream_seed, len(run.state.models)
    samples, sampler, evaluation = train.samples, train.sampler, Pass(run.val_loader.samples, run.val_loader.sampler)
    num_precise = -(-run.cfg.MODEL.PRECISE_BN // plan.global_batch) * plan.accum_steps
    epochs = range(run.state.epoch, run.cfg.OPTIM.MAX_EPOCH)

    def passes() -> Iterator[Pass]:  # without the loaders, whose workers keep it
        for epoch in epochs:
            steps = replace(sampler, seed=seed, epoch=epoch, first_step=0)
            if epoch > epochs[0]:
                yield Pass(samples, steps)
            precise = [Pass(samples, steps, num_precise)] if num_precise else []
            yield from [*precise, evaluation] * num_kinds

    return passes()
