"""Optimizers other than SGD, registered or of timm; arguments of OPTIM.KWARGS; a trial step; loading of states."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.model_names import keep_names
from distribuuuu.config.registry import OPTIMIZERS

# adahessian needs second derivatives, which the loop does not compute; lookahead keeps its step count in its settings,
# which a resumed run takes from the config.
_UNSUPPORTED = ("adahessian", "lookahead")
# The beginnings of the names of optimizers whose kernels run on a GPU only.
_GPU_ONLY = ("bnb", "fused")


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
    keep_names("optimizers", lambda: dict.fromkeys(known))
    if name not in known:
        hint = did_you_mean(name, [*known, *OPTIMIZERS.names()])
        raise ConfigError(Problem("OPTIM.NAME", f"unknown optimizer {cfg.OPTIM.NAME!r}{hint}"), cfg.origins)
    return timm.optim.get_optimizer_class(name)


def given_options(cfg) -> dict[str, Any]:
    """Return OPTIM.BETAS and OPTIM.EPS, where they are set, as keyword arguments."""
    given = {"betas": tuple(cfg.OPTIM.BETAS), "eps": cfg.OPTIM.EPS}
    return {name: value for name, value in given.items() if value}


def check_arguments(cfg, constructor: Callable) -> dict[str, Any]:
    """Return OPTIM.KWARGS as keyword arguments of an optimizer's constructor."""
    known = inspect.signature(constructor).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    if unknown := [] if takes_any else [name for name in cfg.OPTIM.KWARGS if name not in known]:
        from distribuuuu.config.feature_conflicts import OPTIM_ARGUMENTS

        free = [name for name in known if name not in OPTIM_ARGUMENTS] or ["none"]
        expected = f"expected one of {', '.join(free)}"
        messages = [f"{cfg.OPTIM.NAME} has no such argument{did_you_mean(name, free)}; {expected}" for name in unknown]
        keys = [f"OPTIM.KWARGS.{name}" for name in unknown]
        raise ConfigError(map(Problem, keys, messages), cfg.origins)
    return dict(cfg.OPTIM.KWARGS)


def build_registered(
    cfg, registered: Callable, groups: list[dict[str, Any]], lr: float, model: nn.Module
) -> torch.optim.Optimizer:
    """Return the optimizer that is registered as OPTIM.NAME."""
    optim, known = cfg.OPTIM, inspect.signature(registered).parameters
    names = {parameter: name for name, parameter in model.named_parameters()}
    options = {"names": names, "momentum": optim.MOMENTUM, "dampening": optim.DAMPENING, "nesterov": optim.NESTEROV}
    options = {name: value for name, value in {**options, **given_options(cfg)}.items() if name in known}
    groups = [{**group, "optimizer": optim.NAME} for group in groups]  # for `adapt_loaded_state`
    options |= check_arguments(cfg, registered)
    return registered(groups, lr=lr, weight_decay=optim.WEIGHT_DECAY, **options)


def build_timm(cfg, groups: list[dict[str, Any]], lr: float, kernels: Callable) -> torch.optim.Optimizer:
    """Return the optimizer of timm; `kernels` returns the keywords of its kernels."""
    import timm.optim

    optim, name, options = cfg.OPTIM, cfg.OPTIM.NAME.lower(), given_options(cfg)
    groups = [{**group, "optimizer": name} for group in groups]  # for `adapt_loaded_state`
    try:
        optimizer_class = find_optimizer(cfg)
        betas, own = optim.BETAS, inspect.signature(optimizer_class).parameters.get("betas")
        if betas and own and isinstance(own.default, tuple) and len(own.default) != len(betas):  # fails in a step
            message = f"{optim.NAME} takes {len(own.default)}, not {list(betas)}"
            raise ConfigError(Problem("OPTIM.BETAS", message), cfg.origins)
        options |= check_arguments(cfg, optimizer_class)
        return timm.optim.create_optimizer_v2(
            groups,
            name,
            lr=lr,
            weight_decay=optim.WEIGHT_DECAY,
            momentum=optim.MOMENTUM,
            **{**kernels(optimizer_class), **options},
        )
    except ConfigError:
        raise
    except (AssertionError, ImportError, TypeError, ValueError) as error:  # timm checks values with asserts
        given = "".join(f", {option} {value}" for option, value in options.items())
        message = f"timm cannot make {name} with learning rate {lr}{given}: {str(error) or type(error).__name__}"
        raise ConfigError(Problem("OPTIM.NAME", message), cfg.origins) from error


def take_trial_step(cfg) -> None:
    """Take a step with a small model, before the data is opened; a registered optimizer may need its own model.

    Raises:
        ConfigError: a value of OPTIM.KWARGS has another type than its default, or the optimizer rejects it, when it is
            built or in its first step.
    """
    if cfg.OPTIM.NAME.lower().startswith(_GPU_ONLY):
        return
    constructor = find_optimizer(cfg)
    if problems := list(_type_problems(cfg, inspect.signature(constructor).parameters)):
        raise ConfigError(problems, cfg.origins)
    arguments = check_arguments(cfg, constructor)
    if cfg.OPTIM.NAME in OPTIMIZERS:
        return
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2))
        groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "weight_decay": cfg.OPTIM.WEIGHT_DECAY}]
        try:
            is_sgd = constructor is torch.optim.SGD
            optimizer = (torch.optim.SGD(groups, lr=0.1, momentum=cfg.OPTIM.MOMENTUM, **arguments) if is_sgd
                         else build_timm(cfg, groups, 0.1, lambda _: {}))  # fmt: skip
            model(torch.ones(2, 3, 2, 2)).square().sum().backward()
            optimizer.step()
        except ConfigError:
            raise
        except Exception as error:  # of another package
            message = f"got {dict(cfg.OPTIM.KWARGS)}; {cfg.OPTIM.NAME} fails in its first step: {error}"
            raise ConfigError(Problem("OPTIM.KWARGS", message), cfg.origins) from error


def _type_problems(cfg, known: Mapping[str, inspect.Parameter]) -> Iterator[Problem]:
    """Yield a problem for each value that is not True or False, or no finite number, where the default is one."""
    for name in cfg.OPTIM.KWARGS.keys() & known.keys():
        default, value = known[name].default, cfg.OPTIM.KWARGS[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if isinstance(default, bool) and not isinstance(value, bool):
            yield Problem(f"OPTIM.KWARGS.{name}", f"got {value}; expected True or False")
        elif type(default) in (int, float) and not (is_number or value is None):
            yield Problem(f"OPTIM.KWARGS.{name}", f"got {value}; expected a finite number")


def adapt_loaded_state(optimizer: torch.optim.Optimizer, content: dict[str, Any]) -> dict[str, Any]:
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
            for key in ("lr_scale", "schedule"):  # of the config, not of the checkpoint
                if key in mine:
                    group[key] = mine[key]
                else:
                    group.pop(key, None)
    return {**content, "param_groups": groups}
