"""Models by name, one family a file.

A new model is one new file here with a function in it, decorated with `@MODELS.register`, that takes `num_classes` and
whatever else MODEL.KWARGS may set; with a parameter `im_size` it is given TRAIN.IM_SIZE.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from distribuuuu.checkpoint.locate import PUBLISHED
from distribuuuu.config import ConfigError, Problem
from distribuuuu.models.construction import Construction, plan_construction
from distribuuuu.models.freeze import freeze
from distribuuuu.models.pretrained import build_pretrained, find_published, find_resized
from distribuuuu.models.resolve import Architecture, find_architecture
from distribuuuu.optim.param_groups import lr_multipliers


def build_model(cfg, pretrained: bool | None = None) -> nn.Module:
    """Return the model of MODEL.ARCH: images (N, 3, IM_SIZE, IM_SIZE) -> logits (N, NUM_CLASSES).

    The name is looked up in our registry, then in timm, then in torchvision; `timm/NAME` and `torchvision/NAME` force
    one. MODEL.KWARGS go to the constructor, and so does TRAIN.IM_SIZE if it takes an image size and they do not give
    it. With `pretrained` (None: MODEL.PRETRAINED) it starts from the published weights, its head fresh if the classes
    differ.

    Raises:
        ConfigError: an unknown name or keyword, a value that the constructor refuses, or weights that do not exist or
            cannot be fetched.
    """
    try:
        construction = _plan(cfg)
        pretrained = cfg.MODEL.PRETRAINED if pretrained is None else pretrained
        model = build_pretrained(construction) if pretrained else construction.build()
    except ConfigError as error:
        raise ConfigError(error.problems, cfg.origins) from error
    return model.to(memory_format=torch.channels_last) if cfg.MODEL.CHANNELS_LAST else model


def check_model(cfg) -> None:
    """Check all that `build_model` checks, short of fetching weights; the model takes no memory (meta device).

    Raises:
        ConfigError: as `build_model`; or a pattern of FINETUNE.FREEZE or FINETUNE.LR_MULT that does not suit the model.
    """
    try:
        construction = _plan(cfg)
        model = construction.build_on_meta()
        if cfg.MODEL.PRETRAINED:
            find_published(construction.arch)
    except ConfigError as error:
        raise ConfigError(error.problems, cfg.origins) from error
    problems = list(_finetune_problems(cfg, construction.arch, model))
    if problems:
        raise ConfigError(problems, cfg.origins)


def _finetune_problems(cfg, arch: Architecture, model: nn.Module | None) -> Iterator[Problem]:
    try:
        if cfg.FINETUNE.WEIGHTS == PUBLISHED:
            find_published(arch)
    except ConfigError as error:
        yield from as_finetune_problems(error)
    for check, patterns in ((freeze, cfg.FINETUNE.FREEZE), (lr_multipliers, cfg.FINETUNE.LR_MULT)):
        try:
            if model is not None:
                check(model, patterns)
        except ConfigError as error:
            yield from error.problems


def as_finetune_problems(error: ConfigError) -> list[Problem]:
    """Return problems of MODEL.PRETRAINED as problems of FINETUNE.WEIGHTS, which asked for the same weights."""
    return [
        replace(problem, key="FINETUNE.WEIGHTS") if problem.key == "MODEL.PRETRAINED" else problem
        for problem in error.problems
    ]


def find_head(cfg, model: nn.Module) -> list[str]:
    """Return the layers of a config's model whose shapes depend on the number of classes, by name: its head."""
    other = replace(_plan(cfg), num_classes=cfg.MODEL.NUM_CLASSES + 1)
    with torch.random.fork_rng(devices=[]):
        resized = other.build_on_meta()
        return find_resized(model, other.build() if resized is None else resized)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, trainable or not."""
    return sum(parameter.numel() for parameter in model.parameters())


def _plan(cfg) -> Construction:
    arch = find_architecture(cfg.MODEL.ARCH)
    kwargs, train = _plain(cfg.MODEL.KWARGS), cfg.TRAIN
    return plan_construction(arch, cfg.MODEL.NUM_CLASSES, kwargs, train.IM_SIZE, size_grows=train.IM_SIZE_START > 0)


def _plain(value: Any) -> Any:
    """Turn nodes of the config, which are frozen, into dicts."""
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
