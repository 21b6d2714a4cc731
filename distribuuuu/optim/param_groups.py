"""Parameter groups: which weight decay and which share of the learning rate each parameter gets.

A parameter is of one of three kinds, each with its own weight decay:

- `bias`: named `bias` or `*_bias`, in any layer but a norm layer;
- `norm`: all of a norm layer; any other parameter of at most one dimension (layer scale and the like, which scale a
  channel as a norm layer does); and what the model itself lists in `no_weight_decay()` (position embeddings, class
  token);
- `weight`: the rest.

With 0 for norms and biases this is the split that timm, BEiT, DeiT and ConvNeXt train with.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

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
) -> list[dict]:
    """Return the optimizer's groups of the trainable parameters, one for each learning rate and weight decay.

    Where all are the same this is one group, in the order of `model.parameters()`.

    Args:
        model: the model.
        weight_decay: that of `weight` parameters.
        norm_decay: that of `norm` parameters; below 0: `weight_decay`.
        bias_decay: that of `bias` parameters; below 0: `weight_decay`.
        layer_decay: what each layer's learning rate is multiplied by, compared with the layer after it (Clark et al.,
            arXiv 2003.10555; Bao et al., arXiv 2106.08254). Other than 1, groups have an `lr_scale`.
        lr_mult: factors of the learning rate by patterns of names (see `multipliers`); with any, groups have an
            `lr_scale`, which `layer_decay` multiplies.

    Raises:
        ConfigError: `layer_decay` for a model that does not say what its layers are, or a pattern without parameters.
    """
    decays = {"weight": weight_decay, "norm": norm_decay, "bias": bias_decay}
    decays = {kind: decay if decay >= 0 else weight_decay for kind, decay in decays.items()}
    scales = layer_scales(model, layer_decay) if layer_decay != 1 else {}
    if lr_mult:
        factors = multipliers(model, lr_mult)
        scales = {name: scales.get(name, 1.0) * factors.get(name, 1.0) for name, _ in model.named_parameters()}
    kinds = parameter_kinds(model) if len(set(decays.values())) > 1 else {}
    groups: dict[tuple[float, float], list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = (decays[kinds.get(name, "weight")], scales.get(name, 1.0))
            groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, **({"lr_scale": scale} if scales else {})}
        for (decay, scale), parameters in groups.items()
    ]


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """Return the kind of each parameter by its name: weight, norm or bias (see the top of this file)."""
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
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
    """Tell whether a module is a norm layer of torch or timm, or made from one."""
    # timm's that are not made from torch's are known by their file: it keeps norm layers, and only those, in *norm*.py.
    homes = [part.__module__ for part in type(module).__mro__]
    return isinstance(module, _NORM_LAYERS) or any("timm.layers." in home and "norm" in home for home in homes)


def layer_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """Return each parameter's share of the learning rate: 1 in the last layer, `layer_decay` times less in each before.

    timm's models say by a group matcher what their layers are.

    Raises:
        ConfigError: the model has none.
    """
    if not hasattr(model, "group_matcher"):
        message = f"{type(model).__name__} has no group matcher to tell its layers; timm's models have"
        raise ConfigError(Problem("OPTIM.LAYER_DECAY", f"{message} one (MODEL.ARCH timm/NAME), or set it to 1"))
    from timm.models import group_parameters

    layers = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    last = max(layers.values())
    return {name: layer_decay ** (last - layers.get(name, last)) for name, _ in model.named_parameters()}


def is_match(name: str, pattern: str) -> bool:
    """Tell whether a pattern (fnmatch) is that of a parameter, or of a module that it is in, by their whole names."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:num]), pattern) for num in range(1, len(parts) + 1))


def no_match(pattern: str, names: Iterable[str]) -> str:
    """Return the message for a pattern that none of these parameters has, with what is near it."""
    names = list(names)
    places = dict.fromkeys(".".join(name.split(".")[:num]) for name in names for num in range(1, name.count(".") + 2))
    tops = list(dict.fromkeys(name.split(".")[0] for name in names))
    more = ", ..." * (len(tops) > 8)
    return f"{pattern!r} is the name of no parameter or module{did_you_mean(pattern, places) or _has(tops[:8])}{more}"


def _has(names: list[str]) -> str:
    return f"; the model has {', '.join(names)}"


def multipliers(model: nn.Module, lr_mult: Mapping[str, float]) -> dict[str, float]:
    """Return the factor of each trainable parameter that a pattern matches; the first that does counts.

    Raises:
        ConfigError: with a message for each pattern that is the first for no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    first = {name: next((pattern for pattern in lr_mult if is_match(name, pattern)), None) for name in trained}
    problems = []
    for pattern in lr_mult:
        if pattern in first.values():
            continue
        if not any(is_match(name, pattern) for name in names):
            why = no_match(pattern, names)
        elif not any(is_match(name, pattern) for name in trained):
            why = "all that it matches is frozen (FINETUNE.FREEZE); leave it out"
        else:
            why = "patterns before it match all that it matches; put it before them"
        problems.append(Problem(f"FINETUNE.LR_MULT.{pattern}", why))
    if problems:
        raise ConfigError(problems)
    return {name: lr_mult[pattern] for name, pattern in first.items() if pattern is not None}
