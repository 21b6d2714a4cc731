"""Kinds of parameters that have a weight decay of their own: weights, norms and biases, see optimizer.py."""

from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_NORM_LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """Return the kind of each parameter by name: weight, norm or bias."""
    no_weight_decay: Any = getattr(model, "no_weight_decay", tuple)
    exempt = no_weight_decay()
    kinds = {}
    for name, parameter in model.named_parameters():
        owner, _, own_name = name.rpartition(".")
        if is_norm_layer(model.get_submodule(owner)) or any(fnmatchcase(name, pattern) for pattern in exempt):
            kinds[name] = "norm"
        elif own_name == "bias" or own_name.endswith("_bias"):
            kinds[name] = "bias"
        else:
            kinds[name] = "norm" if parameter.ndim <= 1 else "weight"
    return kinds


def is_norm_layer(module: nn.Module) -> bool:
    """Tell whether a module is a norm layer of torch or timm, or derived from one."""
    # timm's own norm layers have no common base class, but files of their own, named *norm*.py.
    files = [base.__module__ for base in type(module).__mro__]
    return isinstance(module, _NORM_LAYERS) or any("timm.layers." in file and "norm" in file for file in files)
