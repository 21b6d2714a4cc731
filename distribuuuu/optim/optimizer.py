"""Optimizers, their learning rate by the size of the batch, and gradient clipping."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.model_names import NameTable, keep_table
from distribuuuu.distributed.fsdp import build_sharded_optimizer, clip_grad_norm, is_sharded
from distribuuuu.optim.param_groups import parameter_groups
from distribuuuu.optim.schedules import build_schedule

# torch's optimizers that have one kernel for all parameters, on every GPU and in every torch; sharded ones too.
_FUSED_SHARDED = (torch.optim.Adam, torch.optim.AdamW)
_FUSED = (torch.optim.SGD, *_FUSED_SHARDED)
# adahessian needs second derivatives, which the loop does not compute; lookahead keeps its count of steps among its
# settings, which a resumed run takes from the config.
_UNFIT = ("adahessian", "lookahead")


def build_optimizer(cfg, model: nn.Module, global_batch: int = 1) -> torch.optim.Optimizer:
    """Return the optimizer of OPTIM.NAME over all trainable parameters; the learning rate is set before every step.

    Args:
        cfg: the config.
        model: the model, on its device.
        global_batch: images per step, for OPTIM.LR_SCALE: some optimizers relate weight decay to the first rate.

    Raises:
        ConfigError: an unknown name, a setting that the optimizer does not take, a model without layers for
            OPTIM.LAYER_DECAY, or a pattern of FINETUNE.LR_MULT without parameters.
    """
    optim = cfg.OPTIM
    decays = (optim.WEIGHT_DECAY, optim.NORM_WEIGHT_DECAY, optim.BIAS_WEIGHT_DECAY)
    groups = parameter_groups(model, *decays, optim.LAYER_DECAY, cfg.FINETUNE.LR_MULT)
    lr, kernels = scaled_lr(cfg, global_batch), functools.partial(_kernels, model=model)

    def build(groups: list[dict]) -> torch.optim.Optimizer:
        own = _build_sgd if optim.NAME.lower() == "sgd" else _build_by_timm
        optimizer = own(cfg, groups, lr, kernels)
        optimizer.register_load_state_dict_pre_hook(_fit_loaded)
        return optimizer

    optimizer = build_sharded_optimizer(cfg, groups, build)
    for key, value, setting in (("OPTIM.BETAS", optim.BETAS, "betas"), ("OPTIM.EPS", optim.EPS, "eps")):
        if value and setting not in optimizer.defaults:
            message = f"{optim.NAME} has no {setting}; remove this option"
            raise ConfigError(Problem(key, message), cfg.origins)
    return optimizer


def _build_sgd(cfg, groups: list[dict], lr: float, kernels: Callable) -> torch.optim.Optimizer:
    optim, how = cfg.OPTIM, kernels(torch.optim.SGD)
    if optim.DAMPENING:  # not that of the first step, which `_begin_momentum` cannot tell from others
        how = {key: value for key, value in how.items() if key != "fused"}
    optimizer = torch.optim.SGD(
        groups, lr=lr, momentum=optim.MOMENTUM, dampening=optim.DAMPENING, nesterov=optim.NESTEROV, **how
    )
    if how.get("fused") and optim.MOMENTUM:
        _begin_momentum(optimizer)
    return optimizer


def _begin_momentum(optimizer: torch.optim.SGD) -> None:
    """Let every momentum begin with 0, which gives the same first step.

    torch's fused SGD would begin with what it finds in the memory when float16 leaves the first step out.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)


def _build_by_timm(cfg, groups: list[dict], lr: float, kernels: Callable) -> torch.optim.Optimizer:
    """Return an optimizer of timm's factory; each of its groups remembers its name, for `_fit_loaded`."""
    import timm.optim

    optim, name = cfg.OPTIM, cfg.OPTIM.NAME.lower()
    known = timm.optim.list_optimizers() if hasattr(timm.optim, "list_optimizers") else [name]  # since timm 1.0.12
    known = [other for other in known if not other.startswith(_UNFIT)]
    if len(known) > 1:
        keep_table("optimizers", functools.partial(NameTable, dict.fromkeys(known)))
    if name not in known:
        message = f"unknown optimizer {optim.NAME!r}{did_you_mean(name, known)}"
        raise ConfigError(Problem("OPTIM.NAME", message), cfg.origins)
    settings: dict[str, Any] = {"betas": tuple(optim.BETAS)} if optim.BETAS else {}
    settings |= {"eps": optim.EPS} if optim.EPS else {}
    groups = [{**group, "optimizer": name} for group in groups]
    try:
        if hasattr(timm.optim, "get_optimizer_class"):
            optimizer_class = timm.optim.get_optimizer_class(name)
            _check_num_betas(cfg, optimizer_class)
            settings |= kernels(optimizer_class)
        return timm.optim.create_optimizer_v2(
            groups, name, lr=lr, weight_decay=optim.WEIGHT_DECAY, momentum=optim.MOMENTUM, **settings
        )
    except ConfigError:
        raise
    except (AssertionError, ImportError, TypeError, ValueError) as error:  # timm checks values with asserts
        given = "".join(f", {setting} {value}" for setting, value in settings.items())
        message = f"timm cannot make {name} with learning rate {lr}{given}: {str(error) or type(error).__name__}"
        raise ConfigError(Problem("OPTIM.NAME", message), cfg.origins) from error


def _check_num_betas(cfg, optimizer_class: Callable) -> None:
    """Raise ConfigError if OPTIM.BETAS are more or fewer than the optimizer's, which would fail at the first step."""
    betas, own = cfg.OPTIM.BETAS, inspect.signature(optimizer_class).parameters.get("betas")
    if betas and own and isinstance(own.default, tuple) and len(own.default) != len(betas):
        message = f"{cfg.OPTIM.NAME} takes {len(own.default)}, not {list(betas)}"
        raise ConfigError(Problem("OPTIM.BETAS", message), cfg.origins)


def _kernels(optimizer: Callable, model: nn.Module) -> dict[str, bool]:
    """Return the keyword for one kernel over all parameters, where the optimizer has it and they are on a GPU.

    For sharded parameters only Adam has one; the rest of torch's own then handle all of them in each operation.
    """
    sharded = is_sharded(model)
    if optimizer in (_FUSED_SHARDED if sharded else _FUSED) and all(weight.is_cuda for weight in model.parameters()):
        return {"fused": True}
    is_torchs = getattr(optimizer, "__module__", "").startswith("torch.optim")
    return {"foreach": True} if sharded and is_torchs and "foreach" in inspect.signature(optimizer).parameters else {}


def _fit_loaded(optimizer: torch.optim.Optimizer, content: dict[str, Any]) -> dict[str, Any]:
    """Return a state that is about to be loaded, to be placed on the device as this optimizer needs it.

    Raises:
        ValueError: another optimizer made it; its buffers would be missed at the first step only.
    """
    own = optimizer.param_groups[0]
    mine, theirs = own.get("optimizer", "sgd"), {group.get("optimizer", "sgd") for group in content["param_groups"]}
    if theirs != {mine}:
        raise ValueError(f"it is of OPTIM.NAME {', '.join(sorted(theirs))}, here it is {mine}")
    how = {key: own[key] for key in ("fused", "foreach", "capturable") if key in own}
    return {**content, "param_groups": [{**group, **how} for group in content["param_groups"]]}


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group, each to its share (OPTIM.LAYER_DECAY, FINETUNE.LR_MULT)."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


# What the size of the batch, as a multiple of OPTIM.LR_SCALE_BATCH, makes of the learning rate (Goyal et al., arXiv
# 1706.02677; the square root: Krizhevsky, arXiv 1404.5997).
_BATCH_FACTORS: dict[str, Callable[[float], float]] = {
    "none": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
}


def lr_factor(cfg, global_batch: int) -> float:
    """Return what OPTIM.LR_SCALE multiplies the learning rate by, at `global_batch` images per step."""
    return _BATCH_FACTORS[cfg.OPTIM.LR_SCALE](global_batch / cfg.OPTIM.LR_SCALE_BATCH)


def scaled_lr(cfg, global_batch: int) -> float:
    """Return OPTIM.BASE_LR, scaled by the batch as OPTIM.LR_SCALE says."""
    return cfg.OPTIM.BASE_LR * lr_factor(cfg, global_batch)


def build_lr(cfg, global_batch: int) -> Callable[[float], float]:
    """Return lr_at(epoch): the schedule's learning rate, scaled by the batch as OPTIM.LR_SCALE says."""
    lr_at, factor = build_schedule(cfg), lr_factor(cfg, global_batch)
    return lambda epoch: lr_at(epoch) * factor


def describe_lr(cfg, global_batch: int) -> str:
    """Return the learning rate in words, with the arithmetic behind it."""
    optim, lr = cfg.OPTIM, scaled_lr(cfg, global_batch)
    per_128 = f"{lr * 128 / global_batch:.4g} per 128 images"
    if optim.LR_SCALE == "none":
        return f"{lr}, {per_128}"
    ratio = f"{global_batch} / {optim.LR_SCALE_BATCH}"
    ratio = f"sqrt({ratio})" if optim.LR_SCALE == "sqrt" else ratio
    return f"{lr:.6g}, {per_128}, {optim.LR_SCALE}: {optim.BASE_LR} x {ratio} = {lr:.6g}"


def build_clipper(cfg) -> Callable[[Iterable[nn.Parameter]], None]:
    """Return clip(parameters): scale their gradients down to OPTIM.CLIP_NORM, all as one vector; 0: do nothing.

    Never waits for the device. Gradients that are not finite stay so.
    """
    most = cfg.OPTIM.CLIP_NORM

    def clip(parameters: Iterable[nn.Parameter]) -> None:
        if most > 0:
            clip_grad_norm(parameters, most)

    return clip
