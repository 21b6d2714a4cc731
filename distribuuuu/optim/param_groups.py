"""Parameter groups: weight decay and learning-rate factor of each parameter.

Each parameter is of one of three kinds with a weight decay of its own:

- `bias`: named `bias` or `*_bias`, outside norm layers;
- `norm`: in a norm layer, or of at most one dimension (e.g. layer scale, which scales channels as a norm layer does),
  or listed by the model in `no_weight_decay()` (e.g. position embeddings, class token);
- `weight`: the others.

With 0 for norms and biases this is the split of timm, BEiT, DeiT and ConvNeXt.
"""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

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
    scales: dict[str, float] = {}
    exempt: set[str] = set()
    if layer_decay != 1 or lr_mult or no_decay:
        from distribuuuu.optim.name_patterns import exempt_parameters, layer_scales, lr_multipliers

        scales = layer_scales(model, layer_decay) if layer_decay != 1 else {}
        if lr_mult:
            factors = lr_multipliers(model, lr_mult)
            scales = {name: scales.get(name, 1.0) * factors.get(name, 1.0) for name, _ in model.named_parameters()}
        exempt = exempt_parameters(model, no_decay)
    kinds = parameter_kinds(model) if len(set(decays.values())) > 1 else {}
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
