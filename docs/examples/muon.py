"""Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon): orthogonalized momentum for matrices.

Filters and matrices are trained by Muon, all other parameters and the last layer by Adam, with a schedule of their own.
The optimizer splits the parameter groups of the options by the names of the parameters.

    distribuuuu train --cfg docs/examples/muon.yaml
"""

import torch

from distribuuuu.config.registry import OPTIMIZERS


def orthogonalize(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return about the nearest orthogonal matrix, by a Newton-Schulz iteration of order five."""
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if len(matrix) > matrix.shape[1] else x
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if len(matrix) > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Muon for the groups with `muon`, Adam for the others, both with decoupled weight decay."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                state = self.state[weight]
                first = state.setdefault("first", torch.zeros_like(weight)).lerp_(weight.grad, 0.05)
                if group["muon"]:
                    matrix = orthogonalize(weight.grad.lerp(first, 0.95).flatten(1))
                    update = matrix.view_as(weight) * max(1, len(matrix) / matrix.shape[1]) ** 0.5
                else:
                    state["steps"] = state.get("steps", 0) + 1
                    second = state.setdefault("second", torch.zeros_like(weight)).lerp_(weight.grad.square(), 0.05)
                    correction = 1 - 0.95 ** state["steps"]  # the same for both
                    update = first / correction / ((second / correction).sqrt() + 1e-8)
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


@OPTIMIZERS.register("muon_with_adam")
def muon_with_adam(params, lr, weight_decay, names, last_layer="fc", adam_scale=0.1):
    """Split each group by the names and the shapes of its parameters."""

    def is_muon(weight: torch.Tensor) -> bool:
        return weight.ndim > 1 and not names[weight].startswith(f"{last_layer}.")

    groups = []
    for group in params:
        split = {kind: [weight for weight in group["params"] if is_muon(weight) == kind] for kind in (True, False)}
        own = {"muon": False, "schedule": "lin", "lr_scale": adam_scale}
        groups += [{**group, "params": split[True], "muon": True}] if split[True] else []
        groups += [{**group, **own, "params": split[False]}] if split[False] else []
    return Muon(groups, {"lr": lr, "weight_decay": weight_decay})
