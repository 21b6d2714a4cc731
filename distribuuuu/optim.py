"""Parameter groups and optimizers."""

import torch
from torch import nn


def build_optimizer(cfg, model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD over all parameters, as in the baselines; the learning rate is set before every step."""
    optim = cfg.OPTIM
    return torch.optim.SGD(
        parameter_groups(model, optim.WEIGHT_DECAY),
        lr=optim.BASE_LR,
        momentum=optim.MOMENTUM,
        dampening=optim.DAMPENING,
        nesterov=optim.NESTEROV,
    )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return the optimizer's groups: one, with the same weight decay on every trainable parameter."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [{"params": trainable, "weight_decay": weight_decay}]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
