"""Parameters by name, layer or kind: OPTIM.LAYER_DECAY, OPTIM.NO_WEIGHT_DECAY, FINETUNE.LR_MULT and FINETUNE.FREEZE."""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import did_you_mean

_NORM_LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def layer_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """Return each parameter's learning-rate factor: `layer_decay` to the power of the number of layers after it."""
    group_matcher: Any = getattr(model, "group_matcher", None)
    if group_matcher is None:
        message = f"{type(model).__name__} has no group matcher to define its layers; use a model of timm"
        raise ConfigError(Problem("OPTIM.LAYER_DECAY", f"{message} (MODEL.ARCH timm/NAME), or set it to 1"))
    from timm.models import group_parameters

    layers = group_parameters(model, group_matcher(coarse=False), reverse=True)
    last = max(layers.values())
    return {name: layer_decay ** (last - layers.get(name, last)) for name, _ in model.named_parameters()}


def is_match(name: str, pattern: str) -> bool:
    """Tell whether a pattern (fnmatch) matches the full name of a parameter or of a module that holds it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:num]), pattern) for num in range(1, len(parts) + 1))


def no_match(pattern: str, names: Iterable[str]) -> str:
    """Return the message for a pattern that matches none of these parameters, with the nearest names."""
    names = list(names)
    prefixes = dict.fromkeys(".".join(name.split(".")[:num]) for name in names for num in range(1, name.count(".") + 2))
    children = list(dict.fromkeys(name.split(".")[0] for name in names))
    hint = did_you_mean(pattern, prefixes) or f"; the model has {', '.join(children[:8])}"
    return f"{pattern!r} is the name of no parameter or module{hint}{', ...' if len(children) > 8 else ''}"


def exempt_parameters(model: nn.Module, patterns: Collection[str]) -> set[str]:
    """Return the names of the parameters that a pattern of OPTIM.NO_WEIGHT_DECAY matches."""
    names = [name for name, _ in model.named_parameters()]
    matched = {pattern: {name for name in names if is_match(name, pattern)} for pattern in patterns}
    if missing := [pattern for pattern in patterns if not matched[pattern]]:
        raise ConfigError([Problem("OPTIM.NO_WEIGHT_DECAY", no_match(pattern, names)) for pattern in missing])
    return set().union(*matched.values())


def lr_multipliers(model: nn.Module, lr_mult: Mapping[str, float]) -> dict[str, float]:
    """Return the learning-rate factor of each trainable parameter that a pattern matches; the first match counts."""
    names = [name for name, _ in model.named_parameters()]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    first = {name: next((pattern for pattern in lr_mult if is_match(name, pattern)), None) for name in trained}
    if idle := [pattern for pattern in lr_mult if pattern not in first.values()]:
        reason = "matches only what is frozen or what patterns before it match"
        messages = [reason if any(is_match(name, one) for name in names) else no_match(one, names) for one in idle]
        pairs = zip(idle, messages, strict=True)
        raise ConfigError([Problem(f"FINETUNE.LR_MULT.{pattern}", message) for pattern, message in pairs])
    return {name: lr_mult[pattern] for name, pattern in first.items() if pattern is not None}


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """Return the kind of each parameter by name: weight, norm or bias."""
    no_weight_decay: Any = getattr(model, "no_weight_decay", tuple)
    exempt = no_weight_decay()
    kinds = {}
    for name, parameter in model.named_parameters():
        owner, _, own_name = name.rpartition(".")
        if _is_norm_layer(model.get_submodule(owner)) or any(fnmatchcase(name, pattern) for pattern in exempt):
            kinds[name] = "norm"
        elif own_name == "bias" or own_name.endswith("_bias"):
            kinds[name] = "bias"
        else:
            kinds[name] = "norm" if parameter.ndim <= 1 else "weight"
    return kinds


def _is_norm_layer(module: nn.Module) -> bool:
    """Tell whether a module is a norm layer of torch or timm, or derived from one."""
    # timm's own norm layers have no common base class, but files of their own, named *norm*.py.
    files = [base.__module__ for base in type(module).__mro__]
    return isinstance(module, _NORM_LAYERS) or any("timm.layers." in file and "norm" in file for file in files)
