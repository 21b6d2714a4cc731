"""LoRA (Hu et al., arXiv 2106.09685): the trained filters stay, and learn an update of a low rank.

FINETUNE.LORA does this for linear layers without a plug-in; this example is for convolutions, and shows how a task
changes its model. The head and the norm layers are trained as usual. The plain model with merged weights is evaluated
and exported, and checkpoints leave out the frozen filters.

    distribuuuu train --cfg docs/examples/lora.yaml FINETUNE.WEIGHTS exp/shapes/resnet14
"""

from dataclasses import dataclass

import torch
from torch import nn

from distribuuuu.config.registry import TASKS
from distribuuuu.config.settings import setting
from distribuuuu.tasks.classification import Classification


class LowRank(nn.Module):
    """A convolution whose weight is frozen, with `up @ down` added to it, which begins with 0."""

    def __init__(self, conv: nn.Conv2d, rank: int):
        super().__init__()
        self.conv, num_inputs = conv, conv.weight[0].numel()
        self.down = nn.Parameter(torch.randn(rank, num_inputs) / num_inputs**0.5)
        self.up = nn.Parameter(torch.zeros(len(conv.weight), rank))
        conv.weight.requires_grad_(False)

    def sum_weights(self) -> torch.Tensor:
        return self.conv.weight + (self.up @ self.down).view_as(self.conv.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv._conv_forward(x, self.sum_weights(), self.conv.bias)


@TASKS.register("lora")
class Lora(Classification):
    """Classification with an update of a low rank for each convolution."""

    @dataclass
    class Settings:
        rank: int = setting(4, "rank of the update of a layer", least=1)

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Return the model with an update for each convolution."""
        for name, layer in [*model.named_modules()]:
            if isinstance(layer, nn.Conv2d):
                model.set_submodule(name, LowRank(layer, self.settings.rank))
        return model

    def unsaved_tensors(self, model: nn.Module) -> list[str]:
        """Return the names of the frozen weights, which each start reads from FINETUNE.WEIGHTS."""
        return [f"{name}.conv.weight" for name, layer in model.named_modules() if isinstance(layer, LowRank)]

    @torch.no_grad()
    def deploy_model(self, model: nn.Module) -> nn.Module:
        """Return the plain model, whose weights are the sums."""
        for name, layer in [*model.named_modules()]:
            if isinstance(layer, LowRank):
                layer.conv.weight.copy_(layer.sum_weights())
                model.set_submodule(name, layer.conv)
        return model
