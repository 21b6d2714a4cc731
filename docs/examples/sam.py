"""Sharpness-aware minimization (Foret et al., arXiv 2010.01412): the gradient at the worst point of a neighborhood.

distribuuuu train --cfg sam.yaml

Measured on the 500 evaluation images of shapes (n = 3): top-1 99.0, 94.0 and 99.8 %; without it 99.6, 98.2 and 98.4 %.
"""

from dataclasses import dataclass

import torch
from torch import nn

from distribuuuu.config.registry import TASKS
from distribuuuu.config.settings import setting
from distribuuuu.tasks.classification import Classification


@TASKS.register("sam")
class Sam(Classification):
    """Classification whose step uses the gradient at `w + rho * g / |g|`, where g is the gradient at the weights w."""

    gradient_passes = 2

    @dataclass
    class Settings:
        rho: float = setting(0.05, "radius of the neighborhood", least=0)

    def update(self, step) -> None:
        """Move the weights to the worst point, compute the gradients there, move back, and take the step."""
        step.gradients()
        model = self.state.model
        weights = [weight for weight in model.parameters() if weight.grad is not None]
        grads = [weight.grad for weight in weights]
        scale = self.settings.rho / (nn.utils.get_total_norm(grads) + 1e-12)  # also right if float16 scales them
        norms = [layer for layer in model.modules() if hasattr(layer, "running_mean")]
        kept = [*weights, *(buffer for layer in norms for buffer in layer.buffers(recurse=False))]
        before = [tensor.detach().clone() for tensor in kept]  # the statistics are those of the first pass
        with torch.no_grad():
            torch._foreach_add_(weights, torch._foreach_mul(grads, scale))
        step.gradients(in_metrics=False)
        with torch.no_grad():
            for tensor, original in zip(kept, before, strict=True):
                tensor.copy_(original)
        step.apply()
