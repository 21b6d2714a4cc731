"""The optimizer of a run: its parameter groups, its constructor, its kernels.

Each parameter is of one of three kinds with a weight decay of its own:

- `bias`: named `bias` or `*_bias`, outside norm layers;
- `norm`: in a norm layer, or of at most one dimension (e.g. layer scale, which scales channels as a norm layer does),
  or listed by the model in `no_weight_decay()` (e.g. position embeddings, class token);
- `weight`: the others.

With 0 for norms and biases this is the split of timm, BEiT, DeiT and ConvNeXt.

A new optimizer is a class or function in a file of this package, or in your own script, with the decorator
`@OPTIMIZERS.register`: `name(params, lr, weight_decay)` returns a torch.optim.Optimizer, and OPTIM.NAME selects it. By
keyword it also gets those of `momentum`, `dampening`, `nesterov`, `betas` and `eps` that are parameters of it, and
`names`, a dict from each parameter of the model to its name.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.registry import OPTIMIZERS
from distribuuuu.distributed.sharding import build_sharded_optimizer, is_sharded
from distribuuuu.optim.schedules import scaled_lr

# torch's optimizers with a fused kernel on every GPU and in every supported torch, and those for sharded parameters.
_FUSED_SHARDED = (torch.optim.Adam, torch.optim.AdamW)
_FUSED = (torch.optim.SGD, *_FUSED_SHARDED)


def build_optimizer(
    cfg, model: nn.Module, global_batch: int = 1, regroup: Callable[[Any], Any] = lambda groups: groups
) -> torch.optim.Optimizer:
    """Return the optimizer OPTIM.NAME of all trainable parameters; `set_lr` sets its learning rate before every step.

    The initial rate depends on the images per step (OPTIM.LR_SCALE): some optimizers relate weight decay to it.
    `regroup` returns other groups of the same parameters, see `Task.param_groups`.

    Raises:
        ConfigError: an unknown name, an option that the optimizer does not have, a model without layers for
            OPTIM.LAYER_DECAY, or a pattern of FINETUNE.LR_MULT or OPTIM.NO_WEIGHT_DECAY without parameters.
    """
    optim = cfg.OPTIM
    groups = regroup(parameter_groups(cfg, model))
    lr, kernels = scaled_lr(cfg, global_batch), functools.partial(_kernels, model=model)
    registered = OPTIMIZERS.get(optim.NAME) if optim.NAME in OPTIMIZERS else None

    def build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if not registered and optim.NAME.lower() == "sgd":
            optimizer = _build_sgd(cfg, groups, lr, kernels)
        else:
            from distribuuuu.optim.named_optimizers import build_registered, build_timm

            if registered:
                optimizer = build_registered(cfg, registered, groups, lr, model)
            else:
                optimizer = build_timm(cfg, groups, lr, kernels)
        optimizer.register_load_state_dict_pre_hook(_adapt_when_loaded)
        return optimizer

    optimizer = build_sharded_optimizer(cfg, groups, build)
    options = inspect.signature(registered).parameters if registered else optimizer.defaults
    for name in [name for name in ("betas", "eps") if getattr(optim, name.upper())]:
        if name not in options:
            message = f"{optim.NAME} has no {name}; remove this option"
            raise ConfigError(Problem(f"OPTIM.{name.upper()}", message), cfg.origins)
    return optimizer


def _build_sgd(cfg, groups: list[dict[str, Any]], lr: float, kernels: Callable) -> torch.optim.Optimizer:
    optim, options = cfg.OPTIM, kernels(torch.optim.SGD)
    if optim.KWARGS:
        from distribuuuu.optim.named_optimizers import check_arguments

        options |= check_arguments(cfg, torch.optim.SGD)
    if optim.DAMPENING:  # zero momentum, see below, would give another first step
        options = {key: value for key, value in options.items() if key != "fused"}
    optimizer = torch.optim.SGD(
        groups, lr=lr, momentum=optim.MOMENTUM, dampening=optim.DAMPENING, nesterov=optim.NESTEROV, **options
    )
    if options.get("fused") and optim.MOMENTUM:
        # The same first step; but fused SGD would start from uninitialized memory after a first step that the loss
        # scaling of float16 skips.
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
    return optimizer


def _kernels(optimizer: Callable, model: nn.Module) -> dict[str, bool]:
    """Return the keyword for an update of all parameters at once: fused, or foreach on a CPU and if sharded.

    On a CPU, foreach has the bits of an update of one parameter after the other; fused has others.
    """
    sharded, devices = is_sharded(model), {weight.device.type for weight in model.parameters()}
    if optimizer in (_FUSED_SHARDED if sharded else _FUSED) and devices == {"cuda"}:
        return {"fused": True}
    is_torchs = getattr(optimizer, "__module__", "").startswith("torch.optim")
    at_once = sharded and is_torchs and "foreach" in inspect.signature(optimizer).parameters
    return {"foreach": True} if at_once or (optimizer in _FUSED and devices == {"cpu"}) else {}


def parameter_groups(cfg, model: nn.Module) -> list[dict[str, Any]]:
    """Return one group of trainable parameters for each learning-rate factor and weight decay.

    A group has an `lr_scale` with OPTIM.LAYER_DECAY (Clark et al., arXiv 2003.10555; Bao et al., arXiv 2106.08254) or
    FINETUNE.LR_MULT, whose factors are multiplied.
    """
    optim, lr_mult = cfg.OPTIM, cfg.FINETUNE.LR_MULT
    decays = {"weight": optim.WEIGHT_DECAY, "norm": optim.NORM_WEIGHT_DECAY, "bias": optim.BIAS_WEIGHT_DECAY}
    decays = {kind: decay if decay >= 0 else optim.WEIGHT_DECAY for kind, decay in decays.items()}
    scales: dict[str, float] = {}
    exempt: set[str] = set()
    if optim.LAYER_DECAY != 1 or lr_mult or optim.NO_WEIGHT_DECAY:
        from distribuuuu.optim.name_patterns import exempt_parameters, layer_scales, lr_multipliers

        scales = layer_scales(model, optim.LAYER_DECAY) if optim.LAYER_DECAY != 1 else {}
        if lr_mult:
            factors = lr_multipliers(model, lr_mult)
            scales = {name: scales.get(name, 1.0) * factors.get(name, 1.0) for name, _ in model.named_parameters()}
        exempt = exempt_parameters(model, optim.NO_WEIGHT_DECAY)
    kinds: dict[str, str] = {}
    if len(set(decays.values())) > 1:
        from distribuuuu.optim.name_patterns import parameter_kinds

        kinds = parameter_kinds(model)
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


def _adapt_when_loaded(optimizer: torch.optim.Optimizer, content: dict[str, Any]) -> dict[str, Any]:
    from distribuuuu.optim.named_optimizers import adapt_loaded_state

    return adapt_loaded_state(optimizer, content)
