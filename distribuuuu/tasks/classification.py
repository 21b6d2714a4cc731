"""How a step is computed, beyond forward and backward: what the config says of rate, mixing, loss and clipping."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from distribuuuu.data.batch_plan import check_accumulation
from distribuuuu.data.loader import TrainLoader
from distribuuuu.data.mixup import Mixer, build_mixer
from distribuuuu.optim.optimizer import build_clipper, build_lr
from distribuuuu.optim.precision import Precision
from distribuuuu.tasks.distillation import Objective, build_objective


@dataclass(frozen=True)
class Recipe:
    """What training does with a batch.

    Attributes:
        lr_at: epochs, e.g. 3.25, to the learning rate.
        mix: blends the images of a batch, and their labels to soft targets.
        objective: (images, logits, targets) to the mean loss.
        clip: scales the gradients of parameters down.
    """

    lr_at: Callable[[float], float]
    mix: Mixer
    objective: Objective
    clip: Callable[[Iterable[nn.Parameter]], None]


def build_recipe(cfg, loader: TrainLoader, device: torch.device, precision: Precision) -> Recipe:
    """Return the recipe of a config for the steps of a loader.

    Raises:
        ConfigError: the batches cannot be mixed or accumulated, or the teacher cannot be had or knows other classes.
    """
    plan = loader.plan
    check_accumulation(cfg, plan)
    return Recipe(
        lr_at=build_lr(cfg, plan.global_batch),
        mix=build_mixer(cfg, plan),
        objective=build_objective(cfg, loader.images.classes, device, precision.autocast),
        clip=build_clipper(cfg),
    )
