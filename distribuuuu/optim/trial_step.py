"""Trial step of an optimizer, which finds wrong values of OPTIM.KWARGS before the data is opened."""

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.registry import OPTIMIZERS
from distribuuuu.optim.named_optimizers import build_timm, check_arguments, find_optimizer

# The beginnings of the names of optimizers whose kernels run on a GPU only.
_GPU_ONLY = ("bnb", "fused")


def take_trial_step(cfg) -> None:
    """Take a step with a small model, before the data is opened; a registered optimizer may need its own model.

    Raises:
        ConfigError: a value of OPTIM.KWARGS has another type than its default, or the optimizer rejects it, when it is
            built or in its first step.
    """
    if cfg.OPTIM.NAME.lower().startswith(_GPU_ONLY):
        return
    constructor = find_optimizer(cfg)
    if problems := list(_type_problems(cfg, inspect.signature(constructor).parameters)):
        raise ConfigError(problems, cfg.origins)
    arguments = check_arguments(cfg, constructor)
    if cfg.OPTIM.NAME in OPTIMIZERS:
        return
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2))
        groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "weight_decay": cfg.OPTIM.WEIGHT_DECAY}]
        try:
            is_sgd = constructor is torch.optim.SGD
            optimizer = (torch.optim.SGD(groups, lr=0.1, momentum=cfg.OPTIM.MOMENTUM, **arguments) if is_sgd
                         else build_timm(cfg, groups, 0.1, lambda _: {}))  # fmt: skip
            model(torch.ones(2, 3, 2, 2)).square().sum().backward()
            optimizer.step()
        except ConfigError:
            raise
        except Exception as error:  # of another package
            message = f"got {dict(cfg.OPTIM.KWARGS)}; {cfg.OPTIM.NAME} fails in its first step: {error}"
            raise ConfigError(Problem("OPTIM.KWARGS", message), cfg.origins) from error


def _type_problems(cfg, known: Mapping[str, inspect.Parameter]) -> Iterator[Problem]:
    """Yield a problem for each value that is not True or False, or no finite number, where the default is one."""
    for name in cfg.OPTIM.KWARGS.keys() & known.keys():
        default, value = known[name].default, cfg.OPTIM.KWARGS[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if isinstance(default, bool) and not isinstance(value, bool):
            yield Problem(f"OPTIM.KWARGS.{name}", f"got {value}; expected True or False")
        elif type(default) in (int, float) and not (is_number or value is None):
            yield Problem(f"OPTIM.KWARGS.{name}", f"got {value}; expected a finite number")
