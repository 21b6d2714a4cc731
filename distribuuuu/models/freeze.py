"""Frozen parameters, batch norms and backbones."""

import logging
import types
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from distribuuuu.config import ConfigError, Problem
from distribuuuu.models.head import find_head
from distribuuuu.optim.name_patterns import is_match, no_match

logger = logging.getLogger(__name__)


# The word of FINETUNE.FREEZE for all layers but the head.
BACKBONE = "backbone"


def freeze_parts(cfg, model: nn.Module, task: Any = None) -> None:
    """Freeze the parts that FINETUNE.FREEZE matches and log their size; raises as `freeze`."""
    patterns = cfg.FINETUNE.FREEZE
    if BACKBONE in patterns:
        freeze_backbone(model, find_head(cfg, model, task))
    freeze(model, [pattern for pattern in patterns if pattern != BACKBONE])
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    logger.info("frozen: %.3f of %.3f M parameters", (total - trained) / 1e6, total / 1e6)


def freeze_backbone(model: nn.Module, head: Collection[str]) -> None:
    """Turn off the gradients of all layers but those of the head, and keep the other layers in evaluation mode.

    Statistics of batch norms are then constant, and dropout and drop path are off, also those before the last layer.
    """
    owners = [name for name in head if any(True for _ in model.get_submodule(name).parameters(recurse=False))]
    for name, layer in model.named_modules():
        if name in head:
            continue
        for parameter in layer.parameters(recurse=False):
            parameter.requires_grad_(False)
        if name and not any(owner.startswith(f"{name}.") for owner in owners):
            _keep_in_evaluation(layer)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Turn off the gradients of the parameters that a pattern matches, and keep their batch norms in evaluation mode.

    A batch norm is frozen if all of its parameters are, or if a pattern matches its name. Its statistics are then
    constant, even after `model.train()`. Call it after every conversion of layers (MODEL.SYNCBN). Copies and wrappers
    of the model stay frozen; the state dict does not record it. Patterns are matched as by `is_match`.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _NormBase)}
    known = [*parameters, *norms]
    unknown = [pattern for pattern in patterns if not any(is_match(name, pattern) for name in known)]
    if unknown:
        raise ConfigError([Problem("FINETUNE.FREEZE", no_match(pattern, known)) for pattern in unknown])
    for name, parameter in parameters.items():
        if any(is_match(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        message = f"{[*patterns] or BACKBONE} freezes every parameter; fix: leave at least the head trainable"
        raise ConfigError(Problem("FINETUNE.FREEZE", message))
    for name, norm in norms.items():
        own = list(norm.parameters(recurse=False))
        is_constant = bool(own and patterns) and not any(parameter.requires_grad for parameter in own)
        if is_constant or any(is_match(name, pattern) for pattern in patterns):
            _keep_in_evaluation(norm)


def _keep_in_evaluation(layer: nn.Module) -> None:
    """Replace the `train` of a frozen layer, bound to it, so that a copy of the model has a copy of it."""
    layer.train = types.MethodType(_stay_in_evaluation, layer)  # type: ignore[method-assign]  # on purpose
    layer.train()


def _stay_in_evaluation(layer: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(layer, False)
