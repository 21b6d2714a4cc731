"""Parameter groups: weight decay and learning-rate factor of each parameter.

Each parameter is of one of three kinds with a weight decay of its own:

- `bias`: named `bias` or `*_bias`, outside norm layers;
- `norm`: in a norm layer, or of at most one dimension (e.g. layer scale, which scales channels as a norm layer does),
  or listed by the model in `no_weight_decay()` (e.g. position embeddings, class token);
- `weight`: the others.

With 0 for norms and biases this is the split of timm, BEiT, DeiT and ConvNeXt.
"""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import did_you_mean

_NORM_LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    norm_decay: float = -1,
    bias_decay: float = -1,
    layer_decay: float = 1,
    lr_mult: Mapping[str, float] | None = None,
    no_decay: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Return one group of trainable parameters for each learning-rate factor and weight decay.

    Args:
        model: the model.
        weight_decay: of `weight` parameters.
        norm_decay: of `norm` parameters; below 0: `weight_decay`.
        bias_decay: of `bias` parameters; below 0: `weight_decay`.
        layer_decay: factor of a layer's learning rate relative to the next layer (Clark et al., arXiv 2003.10555; Bao
            et al., arXiv 2106.08254). Unless it is 1, groups have an `lr_scale`.
        lr_mult: learning-rate factors by name pattern (see `lr_multipliers`), which multiply those of `layer_decay`;
            if there are any, groups have an `lr_scale`.
        no_decay: name patterns of parameters without weight decay, whatever their kind.

    Raises:
        ConfigError: `layer_decay` for a model that does not define its layers, or a pattern without parameters.
    """
    decays = {"weight": weight_decay, "norm": norm_decay, "bias": bias_decay}
    decays = {kind: decay if decay >= 0 else weight_decay for kind, decay in decays.items()}
    scales = layer_scales(model, layer_decay) if layer_decay != 1 else {}
    if lr_mult:
        factors = lr_multipliers(model, lr_mult)
        scales = {name: scales.get(name, 1.0) * factors.get(name, 1.0) for name, _ in model.named_parameters()}
    kinds = parameter_kinds(model) if len(set(decays.values())) > 1 else {}
    exempt = exempt_parameters(model, no_decay)
    groups: dict[tuple[float, float], list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = 0.0 if name in exempt else decays[kinds.get(name, "weight")]
            key = (decay, scales.get(name, 1.0))
            groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, **({"lr_scale": scale} if scales else {})}
        for (decay, scale), parameters in groups.items()
    ]


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


def layer_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """Return each parameter's learning-rate factor: `layer_decay` to the power of the number of layers after it.

    Raises:
        ConfigError: the model has no group matcher, by which timm's models define their layers.
    """
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
    """Return the names of the parameters that a pattern of OPTIM.NO_WEIGHT_DECAY matches.

    Raises:
        ConfigError: with a message for each pattern without parameters.
    """
    names = [name for name, _ in model.named_parameters()]
    matched = {pattern: {name for name in names if is_match(name, pattern)} for pattern in patterns}
    if missing := [pattern for pattern in patterns if not matched[pattern]]:
        raise ConfigError([Problem("OPTIM.NO_WEIGHT_DECAY", no_match(pattern, names)) for pattern in missing])
    return set().union(*matched.values())


def lr_multipliers(model: nn.Module, lr_mult: Mapping[str, float]) -> dict[str, float]:
    """Return the learning-rate factor of each trainable parameter that a pattern matches; the first match counts.

    Raises:
        ConfigError: with a message for each pattern that is the first match of no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    first = {name: next((pattern for pattern in lr_mult if is_match(name, pattern)), None) for name in trained}
    problems = []
    for pattern in lr_mult:
        if pattern in first.values():
            continue
        if not any(is_match(name, pattern) for name in names):
            problem = no_match(pattern, names)
        elif not any(is_match(name, pattern) for name in trained):
            problem = "all that it matches is frozen (FINETUNE.FREEZE); remove it"
        else:
            problem = "patterns before it match all that it matches; put it before them"
        problems.append(Problem(f"FINETUNE.LR_MULT.{pattern}", problem))
    if problems:
        raise ConfigError(problems)
    return {name: lr_mult[pattern] for name, pattern in first.items() if pattern is not None}
