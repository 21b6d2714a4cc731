"""Optimizers, learning rate by batch size, gradient clipping.

A new optimizer is a class or function in a file of this package, or in your own script, with the decorator
`@OPTIMIZERS.register`: `name(params, lr, weight_decay)` returns a torch.optim.Optimizer, and OPTIM.NAME selects it. By
keyword it also gets those of `momentum`, `dampening`, `nesterov`, `betas` and `eps` that are parameters of it, and
`names`, a dict from each parameter of the model to its name.
"""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.conflicts import OPTIM_ARGUMENTS
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.model_names import NameTable, keep_table
from distribuuuu.config.registry import OPTIMIZERS
from distribuuuu.distributed.sharding import build_sharded_optimizer, clip_grad_norm, is_sharded, to_local, whole_norms
from distribuuuu.optim.param_groups import parameter_groups
from distribuuuu.optim.schedules import build_schedule

# torch's optimizers with a fused kernel on every GPU and in every supported torch, and those for sharded parameters.
_FUSED_SHARDED = (torch.optim.Adam, torch.optim.AdamW)
_FUSED = (torch.optim.SGD, *_FUSED_SHARDED)
# The weight decay of a group at the start of its schedule.
_FULL_DECAY = "full_decay"
# adahessian needs second derivatives, which the loop does not compute; lookahead keeps its step count in its settings,
# which a resumed run takes from the config.
_UNSUPPORTED = ("adahessian", "lookahead")


def build_optimizer(
    cfg, model: nn.Module, global_batch: int = 1, regroup: Callable[[Any], Any] = lambda groups: groups
) -> torch.optim.Optimizer:
    """Return the optimizer OPTIM.NAME of all trainable parameters; `set_lr` sets its learning rate before every step.

    Args:
        cfg: the config.
        model: the model, on its device.
        global_batch: images per step, for OPTIM.LR_SCALE: some optimizers relate weight decay to the initial rate.
        regroup: returns other groups of the same parameters, see `Task.param_groups`.

    Raises:
        ConfigError: an unknown name, an option that the optimizer does not have, a model without layers for
            OPTIM.LAYER_DECAY, or a pattern of FINETUNE.LR_MULT or OPTIM.NO_WEIGHT_DECAY without parameters.
    """
    optim = cfg.OPTIM
    decays = (optim.WEIGHT_DECAY, optim.NORM_WEIGHT_DECAY, optim.BIAS_WEIGHT_DECAY)
    groups = parameter_groups(model, *decays, optim.LAYER_DECAY, cfg.FINETUNE.LR_MULT, optim.NO_WEIGHT_DECAY)
    groups = regroup(groups)
    if optim.WEIGHT_DECAY_END >= 0:
        groups = [{**group, _FULL_DECAY: group["weight_decay"]} for group in groups]
    lr, kernels = scaled_lr(cfg, global_batch), functools.partial(_kernels, model=model)
    registered = OPTIMIZERS.get(optim.NAME) if optim.NAME in OPTIMIZERS else None

    def build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if registered:
            names = {parameter: name for name, parameter in model.named_parameters()}
            optimizer = _build_registered(cfg, registered, groups, lr, names)
        else:
            optimizer = (_build_sgd if optim.NAME.lower() == "sgd" else _build_timm)(cfg, groups, lr, kernels)
        optimizer.register_load_state_dict_pre_hook(_adapt_loaded_state)
        return optimizer

    optimizer = build_sharded_optimizer(cfg, groups, build)
    if optim.KWARGS and not registered:
        _check_step(cfg, groups, build)
    options = inspect.signature(registered).parameters if registered else optimizer.defaults
    for name in _given_options(cfg):
        if name not in options:
            message = f"{optim.NAME} has no {name}; remove this option"
            raise ConfigError(Problem(f"OPTIM.{name.upper()}", message), cfg.origins)
    return optimizer


def find_optimizer(cfg) -> Callable:
    """Return the constructor of OPTIM.NAME: a registered one, torch's SGD, or one of timm.

    Raises:
        ConfigError: an unknown name.
        AssertionError, ImportError: timm's needs a GPU or a package that this machine lacks.
    """
    name = cfg.OPTIM.NAME.lower()
    if cfg.OPTIM.NAME in OPTIMIZERS or name == "sgd":
        return OPTIMIZERS.get(cfg.OPTIM.NAME) if cfg.OPTIM.NAME in OPTIMIZERS else torch.optim.SGD
    import timm.optim

    known = [other for other in map(str, timm.optim.list_optimizers()) if not other.startswith(_UNSUPPORTED)]
    keep_table("optimizers", functools.partial(NameTable, dict.fromkeys(known)))
    if name not in known:
        hint = did_you_mean(name, [*known, *OPTIMIZERS.names()])
        raise ConfigError(Problem("OPTIM.NAME", f"unknown optimizer {cfg.OPTIM.NAME!r}{hint}"), cfg.origins)
    return timm.optim.get_optimizer_class(name)


def _given_options(cfg) -> dict[str, Any]:
    """Return OPTIM.BETAS and OPTIM.EPS, where they are set, as keyword arguments."""
    given = {"betas": tuple(cfg.OPTIM.BETAS), "eps": cfg.OPTIM.EPS}
    return {name: value for name, value in given.items() if value}


def check_arguments(cfg, constructor: Callable) -> dict[str, Any]:
    """Return OPTIM.KWARGS as keyword arguments of an optimizer's constructor.

    Raises:
        ConfigError: with each name that is not a parameter of it, and each value of another type.
    """
    known = inspect.signature(constructor).parameters
    for name, value in cfg.OPTIM.KWARGS.items():
        if name in known and (expected := _find_wrong_type(value, known[name])):
            raise ConfigError(Problem(f"OPTIM.KWARGS.{name}", f"got {value!r}; expected {expected}"), cfg.origins)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        free = [name for name in known if name not in OPTIM_ARGUMENTS] or ["none"]
        problems = [
            Problem(f"OPTIM.KWARGS.{name}", f"{cfg.OPTIM.NAME} has no such argument{did_you_mean(name, free)}; "
                    f"expected one of {', '.join(free)}")
            for name in cfg.OPTIM.KWARGS if name not in known
        ]  # fmt: skip
        if problems:
            raise ConfigError(problems, cfg.origins)
    return dict(cfg.OPTIM.KWARGS)


def _check_step(cfg, groups: list[dict[str, Any]], build: Callable) -> None:
    """Update small tensors instead of the parameters; raise ConfigError if OPTIM.KWARGS fail in a step only."""
    small = {w.ndim: torch.ones((4,) * w.ndim, dtype=w.dtype, device=w.device) for g in groups for w in g["params"]}
    for tensor in small.values():  # muon has another update for dimensions below 4
        tensor.grad = torch.ones_like(tensor)
    try:
        with torch.random.fork_rng({tensor.device for tensor in small.values() if tensor.is_cuda}):
            build([{**groups[0], "params": [*small.values()]}]).step()
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{cfg.OPTIM.NAME} fails in a step with them: {str(error) or type(error).__name__}"
        raise ConfigError(Problem("OPTIM.KWARGS", f"got {dict(cfg.OPTIM.KWARGS)}; {reason}"), cfg.origins) from error


def _find_wrong_type(value: Any, parameter: inspect.Parameter) -> str:
    """Return the type that a parameter expects, by its default, if a value is not of it; else an empty string."""
    kind, annotation = type(parameter.default), str(parameter.annotation)
    if value is None and ("None" in annotation or "Optional" in annotation):
        return ""
    if kind is int and parameter.annotation not in (int, "int"):
        kind = float  # torch writes 0 for a number
    accepted: dict[type, tuple[tuple[type, ...], str]] = {
        bool: ((bool,), "a bool"), int: ((int,), "an int"), float: ((int, float), "a number"),
        tuple: ((tuple, list), "a tuple"),
    }  # fmt: skip
    types, expected = accepted.get(kind, ((type(value),), ""))
    return "" if type(value) in types else expected


def _build_registered(
    cfg, registered: Callable, groups: list[dict[str, Any]], lr: float, names: dict[torch.Tensor, str]
) -> torch.optim.Optimizer:
    optim, known = cfg.OPTIM, inspect.signature(registered).parameters
    options = {"names": names, "momentum": optim.MOMENTUM, "dampening": optim.DAMPENING, "nesterov": optim.NESTEROV}
    options = {name: value for name, value in {**options, **_given_options(cfg)}.items() if name in known}
    groups = [{**group, "optimizer": optim.NAME} for group in groups]  # for `_adapt_loaded_state`
    options |= check_arguments(cfg, registered)
    optimizer = registered(groups, lr=lr, weight_decay=optim.WEIGHT_DECAY, **options)
    if cfg.DIST.SHARD == "zero1" and len(optimizer.param_groups) != len(groups):
        fix = "set it to none or fsdp, or make the groups in Task.param_groups"
        message = f"got zero1, but OPTIM.NAME {optim.NAME} makes parameter groups of its own; fix: {fix}"
        raise ConfigError(Problem("DIST.SHARD", message), cfg.origins)
    return optimizer


def _build_sgd(cfg, groups: list[dict[str, Any]], lr: float, kernels: Callable) -> torch.optim.Optimizer:
    optim, options = cfg.OPTIM, {**kernels(torch.optim.SGD), **check_arguments(cfg, torch.optim.SGD)}
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


def _build_timm(cfg, groups: list[dict[str, Any]], lr: float, kernels: Callable) -> torch.optim.Optimizer:
    import timm.optim

    optim, name, options = cfg.OPTIM, cfg.OPTIM.NAME.lower(), _given_options(cfg)
    groups = [{**group, "optimizer": name} for group in groups]  # for `_adapt_loaded_state`
    try:
        optimizer_class = find_optimizer(cfg)
        betas, own = optim.BETAS, inspect.signature(optimizer_class).parameters.get("betas")
        if betas and own and isinstance(own.default, tuple) and len(own.default) != len(betas):  # fails in a step
            message = f"{optim.NAME} takes {len(own.default)}, not {list(betas)}"
            raise ConfigError(Problem("OPTIM.BETAS", message), cfg.origins)
        options |= {**kernels(optimizer_class), **check_arguments(cfg, optimizer_class)}
        return timm.optim.create_optimizer_v2(
            groups, name, lr=lr, weight_decay=optim.WEIGHT_DECAY, momentum=optim.MOMENTUM, **options
        )
    except ConfigError:
        raise
    except (AssertionError, ImportError, TypeError, ValueError) as error:  # timm checks values with asserts
        given = "".join(f", {option} {value}" for option, value in options.items())
        message = f"timm cannot make {name} with learning rate {lr}{given}: {str(error) or type(error).__name__}"
        raise ConfigError(Problem("OPTIM.NAME", message), cfg.origins) from error


def _kernels(optimizer: Callable, model: nn.Module) -> dict[str, bool]:
    """Return the keyword for an update of all parameters at once: fused, or foreach for sharded parameters."""
    sharded = is_sharded(model)
    if optimizer in (_FUSED_SHARDED if sharded else _FUSED) and all(weight.is_cuda for weight in model.parameters()):
        return {"fused": True}
    is_torchs = getattr(optimizer, "__module__", "").startswith("torch.optim")
    return {"foreach": True} if sharded and is_torchs and "foreach" in inspect.signature(optimizer).parameters else {}


def _adapt_loaded_state(optimizer: torch.optim.Optimizer, content: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict to be loaded, with the kernel settings of this optimizer.

    Raises:
        ValueError: it is of another OPTIM.NAME, which would fail in the first step only.
    """
    own = optimizer.param_groups[0]
    name, saved = own.get("optimizer", "sgd"), {group.get("optimizer", "sgd") for group in content["param_groups"]}
    if saved != {name}:
        raise ValueError(f"it is of OPTIM.NAME {', '.join(sorted(saved))}, here it is {name}")
    settings = {key: own[key] for key in ("fused", "foreach", "capturable") if key in own}
    groups = [{**group, **settings} for group in content["param_groups"]]
    if len(groups) == len(optimizer.param_groups):  # else torch refuses them
        for group, mine in zip(groups, optimizer.param_groups, strict=True):
            group.update({key: mine[key] for key in (_FULL_DECAY,) if key in mine})
    return {**content, "param_groups": groups}


def set_lr(optimizer: torch.optim.Optimizer, lr: float, lr_of: Callable[[str], float] = lambda schedule: 0.0) -> None:
    """Set the learning rate of every group, times its factor (OPTIM.LAYER_DECAY, FINETUNE.LR_MULT).

    A group with a `schedule` of its own has the rate `lr_of(schedule)`, see `Task.param_groups`.
    """
    for group in optimizer.param_groups:
        own = lr_of(group["schedule"]) if "schedule" in group else lr
        group["lr"] = own * group.get("lr_scale", 1.0)


def set_weight_decay(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the weight decay of every group to its own times a factor, if OPTIM.WEIGHT_DECAY_END is set."""
    for group in optimizer.param_groups:
        if _FULL_DECAY in group:
            group["weight_decay"] = factor * group[_FULL_DECAY]


# OPTIM.LR_SCALE: the factor of the learning rate for a ratio of batch sizes (linear: Goyal et al., arXiv 1706.02677;
# square root: Krizhevsky, arXiv 1404.5997).
_LR_SCALES: dict[str, Callable[[float], float]] = {
    "none": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
}


def _lr_factor(cfg, global_batch: int) -> float:
    return _LR_SCALES[cfg.OPTIM.LR_SCALE](global_batch / cfg.OPTIM.LR_SCALE_BATCH)


def scaled_lr(cfg, global_batch: int) -> float:
    """Return OPTIM.BASE_LR scaled by OPTIM.LR_SCALE for `global_batch` images per step."""
    return cfg.OPTIM.BASE_LR * _lr_factor(cfg, global_batch)


def build_lr(cfg, global_batch: int) -> Callable[..., float]:
    """Return lr_at(epoch, policy): the learning rate of the schedule, scaled by OPTIM.LR_SCALE."""
    lr_at, factor = build_schedule(cfg), _lr_factor(cfg, global_batch)
    return lambda *at: lr_at(*at) * factor


def describe_lr(cfg, global_batch: int) -> str:
    """Return the scaled learning rate with its derivation, for the log."""
    optim, lr = cfg.OPTIM, scaled_lr(cfg, global_batch)
    per_128 = f"{lr * 128 / global_batch:.4g} per 128 images"
    if optim.LR_SCALE == "none":
        return f"{lr}, {per_128}"
    ratio = f"{global_batch} / {optim.LR_SCALE_BATCH}"
    ratio = f"sqrt({ratio})" if optim.LR_SCALE == "sqrt" else ratio
    return f"{lr:.6g}, {per_128}, {optim.LR_SCALE}: {optim.BASE_LR} x {ratio} = {lr:.6g}"


def build_clipper(cfg, head: Collection[torch.Tensor] = ()) -> Callable[[Iterable[torch.Tensor]], None]:
    """Return clip(parameters): clip their gradients as OPTIM.CLIP says; OPTIM.CLIP_NORM 0: do nothing.

    It never waits for the device. A gradient that is NaN stays so.

    Args:
        cfg: the config.
        head: parameters that agc leaves out.
    """
    kind, max_norm, limit = cfg.OPTIM.CLIP, cfg.OPTIM.CLIP_NORM, cfg.OPTIM.CLIP_LIMIT
    left_out = {id(parameter) for parameter in head}

    def clip(parameters: Iterable[torch.Tensor]) -> None:
        if kind == "agc":
            clip_adaptively((parameter for parameter in parameters if id(parameter) not in left_out), limit)
        elif kind == "value":
            grads = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
            torch._foreach_clamp_min_(grads, -limit)
            torch._foreach_clamp_max_(grads, limit)
        elif max_norm > 0:
            clip_grad_norm(parameters, max_norm)

    return clip


@torch.no_grad()
def clip_adaptively(parameters: Iterable[torch.Tensor], limit: float, eps: float = 1e-3) -> None:
    """Scale the gradient of each unit down to `limit` times the norm of its weights, `eps` or more.

    A unit is a row (the first dimension) of a weight, or a whole vector (Brock et al., arXiv 2102.06171). Every process
    must call it.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    pairs = [(to_local(weight), to_local(weight.grad)) for weight in parameters if weight.grad is not None]
    parts = [tensor.norm() for pair in pairs for tensor in pair if tensor.ndim <= 1]
    # The rows of a vector may be those of several processes.
    vectors = iter(whole_norms(torch.stack(parts), parameters[0]).to(parts[0].device) if parts else ())
    for weight, grad in pairs:
        dims = tuple(range(1, weight.ndim))
        own, norm = (
            torch.linalg.vector_norm(tensor, dim=dims, keepdim=True) if dims else next(vectors)
            for tensor in (weight, grad)
        )
        most = own.clamp(min=eps) * limit
        grad.mul_(torch.where(norm < most, 1.0, most / norm.clamp(min=1e-6)))


class LayerNorms:
    """L2 norms of each trained parameter before a step, of its gradient and of its update, for LOG.LAYER_NORMS.

    The gradient is what the optimizer gets: averaged over the processes, without loss scaling, and clipped. The norms
    stay on the device until they are read. A step that is due takes the memory of a copy of the parameters.

    Args:
        model: the unwrapped model, sharded or not.
        optimizer: updates the model; a step that it skips has no norms.
        is_due: tells whether the norms of the current step will be read.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, is_due: Callable[[], bool]):
        self._named, self._is_due, self._norms = dict(model.named_parameters()), is_due, torch.empty(0)
        self._trained: dict[str, torch.Tensor] = {}
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    @torch.no_grad()
    def _begin(self, *_: Any) -> None:
        named = self._named if self._is_due() else {}
        self._trained = {name: weight for name, weight in named.items() if weight.grad is not None}
        if self._trained:
            self._weights = [to_local(weight) for weight in self._trained.values()]
            grads = [to_local(weight.grad) for weight in self._trained.values() if weight.grad is not None]
            self._updates = list(torch._foreach_neg(self._weights))
            self._norms = torch.stack([*torch._foreach_norm(self._weights), *torch._foreach_norm(grads)])

    @torch.no_grad()
    def _end(self, *_: Any) -> None:
        if self._trained:
            torch._foreach_add_(self._updates, self._weights)
            norms = torch.cat([self._norms, torch.stack(torch._foreach_norm(self._updates))])
            self._norms, self._updates = whole_norms(norms, next(iter(self._trained.values()))), []

    def pop(self) -> dict[str, dict[str, list[float]]]:
        """Return {"layer_norms": {name: [weight, gradient, update]}} of the last due step; empty if it was skipped.

        Waits for the device.
        """
        trained, self._trained = self._trained, {}
        rows = [[float(f"{norm:.6g}") for norm in row] for row in self._norms.view(3, -1).T.tolist()] if trained else []
        return {"layer_norms": dict(zip(trained, rows, strict=True))} if trained else {}
