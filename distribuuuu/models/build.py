"""Models of a config: MODEL.ARCH, its arguments, published or random weights."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.model_names import PUBLISHED, is_published, names_backbone
from distribuuuu.config.registry import task_class
from distribuuuu.models.find_architecture import build_model_spec


def build_model(cfg) -> nn.Module:
    """Return the model of MODEL.ARCH, randomly initialized: images (N, 3, H, W) -> logits (N, NUM_CLASSES).

    The constructor gets MODEL.KWARGS, and TRAIN.IM_SIZE if it has an image-size parameter that they do not set.

    Raises:
        ConfigError: an unknown name or keyword, or a value that the constructor rejects.
    """
    try:
        model = build_model_spec(cfg).build()
    except ConfigError as error:
        raise ConfigError(error.problems, cfg.origins) from error
    if cfg.MODEL.INIT != "own":
        from distribuuuu.models.head import initialize

        initialize(model, keep_norms=cfg.MODEL.INIT == "fan_out_own_norms")
    return model.to(memory_format=torch.channels_last) if cfg.MODEL.CHANNELS_LAST else model


def check_model(cfg) -> None:
    """Check everything that `build_model` checks except downloads; the model takes no memory (meta device).

    Raises:
        ConfigError: as `build_model`; the named weights do not exist; or a pattern does not match the model
            (FINETUNE.FREEZE, FINETUNE.LORA, FINETUNE.LR_MULT, OPTIM.NO_WEIGHT_DECAY).
    """
    try:
        spec = build_model_spec(cfg)
        model = spec.build_on_meta()
        weights = cfg.FINETUNE.WEIGHTS or (PUBLISHED if cfg.MODEL.PRETRAINED else "")
        name = cfg.MODEL.ARCH if weights == PUBLISHED else weights
    except ConfigError as error:
        raise ConfigError(error.problems, cfg.origins) from error
    if is_published(weights) and not names_backbone(name):  # those are found when they are read
        from distribuuuu.models.pretrained import resolve_backbone

        try:
            resolve_backbone(name)
        except ConfigError as error:
            raise ConfigError(Problem(find_weights_key(cfg), str(error)), cfg.origins) from error
    if problems := list(_pattern_problems(cfg, model)):
        raise ConfigError(problems, cfg.origins)


def find_weights_key(cfg) -> str:
    """Return the option that names the initial weights."""
    return "FINETUNE.WEIGHTS" if cfg.FINETUNE.WEIGHTS else "MODEL.PRETRAINED"


def _pattern_problems(cfg, model: nn.Module | None) -> Iterator[Problem]:
    tune = cfg.FINETUNE
    if model is None or not (tune.FREEZE or tune.LORA or tune.LR_MULT or cfg.OPTIM.NO_WEIGHT_DECAY):
        return
    from distribuuuu.models.freeze import BACKBONE, freeze
    from distribuuuu.optim.name_patterns import exempt_parameters, lr_multipliers

    checks: list[tuple[Any, ...]] = []
    if tune.LORA:
        from distribuuuu.models.head import find_head
        from distribuuuu.models.lora import find_targets

        checks.append((find_targets, cfg, model, find_head(cfg, model)))
    if not tune.LORA and task_class(cfg).adapt_model.__module__ == "distribuuuu.tasks.base":  # else other names follow
        checks.append((freeze, model, [pattern for pattern in tune.FREEZE if pattern != BACKBONE]))
        checks += [(lr_multipliers, model, tune.LR_MULT), (exempt_parameters, model, cfg.OPTIM.NO_WEIGHT_DECAY)]
    for check, *arguments in checks:
        try:
            check(*arguments)
        except ConfigError as error:
            yield from error.problems


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, trainable or not."""
    return sum(parameter.numel() for parameter in model.parameters())
