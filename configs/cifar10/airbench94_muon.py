"""The network and the optimizer of airbench94_muon: Muon (Jordan et al., 2024) for the filters, SGD for the rest.

The task, and the network but for its initial weights and its scale, are those of airbench94.py beside this file.
"""

import os
from typing import Any

import torch
from torch import nn

from distribuuuu.config.plugins import import_plugins
from distribuuuu.config.registry import MODELS, OPTIMIZERS, SCHEDULES

import_plugins([os.path.join(os.path.dirname(os.path.realpath(__file__)), "airbench94.py")])

_COEFFICIENTS = 3.4445, -4.7750, 2.0315


@MODELS.register
def airbench94_muon(num_classes: int = 10, width: int = 64) -> nn.Module:
    """Return the network of airbench94 with logits divided by the number of features, and a head of deviation 1."""
    model = MODELS.get("airbench94")(num_classes, width, scale=1 / (4 * width))
    limit = model.whiten.weight[0].numel() ** -0.5
    nn.init.uniform_(model.whiten.bias, -limit, limit)  # as torch initializes it
    with torch.no_grad():
        model.head.weight.div_(model.head.weight.std())
    return model


@SCHEDULES.register("airbench_bias")
def bias_factor(epoch: float) -> float:
    """Return a linear decay from 1 to 0 at epoch 3, from which the bias of the first layer is frozen."""
    return max(0.0, 1 - epoch / 3)


def orthogonalize(matrix: torch.Tensor, steps: int = 3) -> torch.Tensor:
    """Return about the nearest orthogonal matrix, in bfloat16, by a Newton-Schulz iteration of order five."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).bfloat16()
    x = x / (x.norm() + 1e-7)
    first, third, fifth = _COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.T
        x = first * x + (third * gram + fifth * gram @ gram) @ x
    return x.T if is_tall else x


class FilterMuon(torch.optim.Optimizer):
    """Muon for the groups with `is_muon`, SGD with an L2 penalty for the others, both with Nesterov momentum.

    Before a step of Muon, a weight is scaled to the norm of an orthogonal matrix with as many rows.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights that have a gradient."""
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                grad = weight.grad.add(weight, alpha=group["weight_decay"])
                if "momentum_buffer" not in self.state[weight]:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
                average = self.state[weight]["momentum_buffer"].mul_(group["momentum"]).add_(grad)
                update = grad.add(average, alpha=group["momentum"])
                if group["is_muon"]:
                    weight.mul_(len(weight) ** 0.5 / weight.norm())
                    update = orthogonalize(update.flatten(1)).view_as(weight).to(weight.dtype)
                weight.add_(update, alpha=-group["lr"])


@OPTIMIZERS.register("airbench_muon")
def airbench_muon(
    params: Any, lr: float, weight_decay: float, momentum: float, names: dict, bias_lr: float = 106.0,
    head_lr: float = 1340.0, filter_momentum: float = 0.6,
) -> torch.optim.Optimizer:  # fmt: skip
    """Split the parameters into filters (Muon, with the rate `lr`), biases and the head (SGD, with rates of their own).

    `weight_decay` is that of a step of SGD at its initial rate: the L2 penalty is this, divided by the rate.
    """
    weights = [weight for group in params for weight in group["params"]]
    filters = [weight for weight in weights if weight.ndim == 4]
    first = [weight for weight in weights if names[weight] == "whiten.bias"]
    head = [weight for weight in weights if names[weight].startswith("head.")]
    known = {id(weight) for weight in (*filters, *first, *head)}
    norms = [weight for weight in weights if id(weight) not in known]
    sgd = {"is_muon": False, "momentum": momentum}
    groups = [{"params": filters, "is_muon": True, "momentum": filter_momentum, "weight_decay": 0.0}]
    for own, rate, more in ((first, bias_lr, {"schedule": "airbench_bias"}), (norms, bias_lr, {}), (head, head_lr, {})):
        groups.append({"params": own, "lr_scale": rate / lr, "weight_decay": weight_decay / rate, **sgd, **more})
    groups = [{"optimizer": "airbench_muon", **group} for group in groups if group["params"]]
    return FilterMuon(groups, {"lr": lr})
