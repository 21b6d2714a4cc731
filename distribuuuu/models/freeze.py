"""Parts of a model that are not trained."""

import types
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from distribuuuu.config import ConfigError, Problem
from distribuuuu.optim.param_groups import is_match, no_match


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Leave the parameters that a pattern matches without gradients, and their batch norms in evaluation mode for good.

    A batch norm is frozen when all of its parameters are, or when its name matches. Its statistics then stay what they
    are, although `model.train()` is called before every epoch. Call it once the layers are what they will be
    (after MODEL.SYNCBN); copies and wrappers of the model keep it, and the state dict does not know of it.

    Args:
        model: the model.
        patterns: fnmatch patterns of whole names, of parameters or of modules that they are in.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    known = [*parameters, *(name for name, module in model.named_modules() if isinstance(module, _NormBase))]
    unknown = [pattern for pattern in patterns if not any(is_match(name, pattern) for name in known)]
    if unknown:
        raise ConfigError([Problem("FINETUNE.FREEZE", no_match(pattern, known)) for pattern in unknown])
    for name, parameter in parameters.items():
        if any(is_match(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        message = f"{list(patterns)} freezes every parameter; leave at least the head out"
        raise ConfigError(Problem("FINETUNE.FREEZE", message))
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and patterns and _is_frozen(name, module, patterns):
            module.train = types.MethodType(_stay_in_evaluation, module)
            module.train()


def _is_frozen(name: str, norm: _NormBase, patterns: Sequence[str]) -> bool:
    own = list(norm.parameters(recurse=False))
    whole = bool(own) and not any(parameter.requires_grad for parameter in own)
    return whole or any(is_match(name, pattern) for pattern in patterns)


def _stay_in_evaluation(norm: _NormBase, mode: bool = True) -> _NormBase:
    """Stand in for a batch norm's own `train`, bound to it, so that a copy of the model has a copy of it."""
    return nn.Module.train(norm, False)


def count_frozen(model: nn.Module) -> tuple[int, int]:
    """Return how many parameters (numbers, not tensors) and how many batch norms of a model are frozen."""
    numbers = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    norms = sum(isinstance(module, _NormBase) and "train" in vars(module) for module in model.modules())
    return numbers, norms
