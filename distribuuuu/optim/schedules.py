"""Learning-rate schedules: pure functions of the epoch, so that a resumed run needs no state.

A new schedule is a function in a file of this package, or in your own script, with the decorator `@SCHEDULES.register`,
and OPTIM.LR_POLICY selects it. It maps an epoch (a float, from 0) to a factor of the base learning rate. By keyword it
gets those of `max_epoch`, `min_lr`, `steps`, `lr_mult` and `peak` (the end of the warm-up) that are parameters of it.

The formulas are those of pycls (Radosavovic et al., https://github.com/facebookresearch/pycls).
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence

import torch

from distribuuuu.config.registry import SCHEDULES


@SCHEDULES.register("cos")
def cos_factor(epoch: float, *, max_epoch: int, min_lr: float) -> float:
    """Return half a cosine from 1 to `min_lr` (Loshchilov and Hutter, arXiv 1608.03983)."""
    return (1.0 - min_lr) * 0.5 * (1.0 + math.cos(math.pi * epoch / max_epoch)) + min_lr


@SCHEDULES.register("steps")
def steps_factor(epoch: float, *, steps: Sequence[float], lr_mult: float) -> float:
    """Return `lr_mult` to the power of the number of steps reached; a step at 0 is the start and does not count."""
    return lr_mult ** sum(1 for step in steps if 0 < step <= epoch)


def warmup_factor(epoch: float, *, warmup_epochs: float, factor: float) -> float:
    """Return the linear warm-up from `factor` to 1 at `warmup_epochs` (Goyal et al., arXiv 1706.02677)."""
    if epoch >= warmup_epochs:
        return 1.0
    done = epoch / warmup_epochs
    return factor * (1.0 - done) + done


def build_lr(cfg, global_batch: int) -> Callable[..., float]:
    """Return lr_at(epoch, policy): the learning rate at an epoch, from 0, e.g. 3.25, by default of OPTIM.LR_POLICY.

    It is scaled by OPTIM.LR_SCALE. With OPTIM.LR_UPDATE epoch it is constant during an epoch: lr_at(3.25) is lr_at(3).
    With OPTIM.LR_LAG n the epochs up to n have the rate of epoch 0.
    """
    optim = cfg.OPTIM
    max_epoch = optim.MAX_EPOCH - (1 - optim.LAST_EPOCH) if optim.LAST_EPOCH < 1 else optim.MAX_EPOCH
    known = {"max_epoch": max_epoch, "min_lr": optim.MIN_LR, "steps": optim.STEPS, "lr_mult": optim.LR_MULT,
             "peak": optim.WARMUP_EPOCHS}  # fmt: skip
    warmup = functools.partial(warmup_factor, warmup_epochs=optim.WARMUP_EPOCHS, factor=optim.WARMUP_FACTOR)
    base_lr, scale = optim.BASE_LR, _lr_factor(cfg, global_batch)

    @functools.cache
    def factor_of(policy: str) -> Callable[[float], float]:
        factor_at = SCHEDULES.get(policy)
        settings = {name: known[name] for name in inspect.signature(factor_at).parameters if name in known}
        return functools.partial(factor_at, **settings)

    def lr_at(epoch: float, policy: str = optim.LR_POLICY) -> float:
        epoch = max(0.0, (math.floor(epoch) if optim.LR_UPDATE == "epoch" else epoch) - optim.LR_LAG)
        return base_lr * factor_of(policy)(epoch) * warmup(epoch) * scale

    return lr_at


def _lr_factor(cfg, global_batch: int) -> float:
    """Return the factor by OPTIM.LR_SCALE: linear (Goyal et al., arXiv 1706.02677), sqrt (Krizhevsky, 1404.5997)."""
    ratio = global_batch / cfg.OPTIM.LR_SCALE_BATCH
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[cfg.OPTIM.LR_SCALE]


def scaled_lr(cfg, global_batch: int) -> float:
    """Return OPTIM.BASE_LR scaled by OPTIM.LR_SCALE for `global_batch` images per step."""
    return cfg.OPTIM.BASE_LR * _lr_factor(cfg, global_batch)


def describe_lr(cfg, global_batch: int) -> str:
    """Return the learning rate for the log, with OPTIM.LR_SCALE and the rate per 128 images."""
    lr = scaled_lr(cfg, global_batch)
    scale = f", {cfg.OPTIM.LR_SCALE} scaling of {cfg.OPTIM.BASE_LR}" if cfg.OPTIM.LR_SCALE != "none" else ""
    return f"{lr:.6g}, {lr * 128 / global_batch:.4g} per 128 images{scale}"


def set_lr(optimizer: torch.optim.Optimizer, lr: float, lr_of: Callable[[str], float] = lambda schedule: 0.0) -> None:
    """Set the learning rate of every group, times its factor (OPTIM.LAYER_DECAY, FINETUNE.LR_MULT).

    A group with a `schedule` of its own has the rate `lr_of(schedule)`, see `Task.param_groups`.
    """
    for group in optimizer.param_groups:
        own = lr_of(group["schedule"]) if "schedule" in group else lr
        group["lr"] = own * group.get("lr_scale", 1.0)
