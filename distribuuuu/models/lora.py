"""Low-rank adapters of linear layers, LoRA (Hu et al., arXiv 2106.09685), of FINETUNE.LORA.

A layer with an adapter keeps its name and its frozen weights, so patterns of names and layer decay apply as before.
Checkpoints hold its `lora_down`, `lora_up` and `lora_scale`, and no frozen weights: each start loads them again. Best
weights are merged, see `merge_adapters`: they are those of the plain model, for every reader.
"""

import logging
import math
from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import counted, did_you_mean, first_few
from distribuuuu.config.read_settings import read_settings
from distribuuuu.config.settings import LoraSettings
from distribuuuu.models.freeze import freeze_backbone
from distribuuuu.models.head import find_head
from distribuuuu.optim.name_patterns import is_match

logger = logging.getLogger(__name__)


class LowRankLinear(nn.Linear):
    """A linear layer, frozen, whose weight gets the update `lora_scale * lora_up @ lora_down`, which begins with 0.

    Without gradients, the weight is merged first, so that the answers are those of the merged model; with them, the
    update is computed beside the layer, which needs no gradient of the whole weight.
    """

    lora_scale: Tensor

    def __init__(self, layer: nn.Linear, rank: int, alpha: float):
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_down = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.lora_up = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        self.register_buffer("lora_scale", layer.weight.new_tensor(alpha / rank))
        nn.init.kaiming_uniform_(self.lora_down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (..., out_features) of inputs (..., in_features)."""
        if torch.is_grad_enabled():
            return super().forward(x) + self.lora_scale * F.linear(F.linear(x, self.lora_down), self.lora_up)
        with torch.autocast(x.device.type, enabled=False):
            weight = self.weight + self.lora_scale * (self.lora_up @ self.lora_down)
        return F.linear(x, weight, self.bias)


def add_adapters(cfg, model: nn.Module, task=None) -> list[str]:
    """Freeze all layers but the head, as FINETUNE.FREEZE backbone does, and add an adapter to each targeted layer.

    Return the names of the frozen parameters, which checkpoints leave out. Errors are those of `find_targets`.
    """
    head = find_head(cfg, model, task)
    settings, targets = find_targets(cfg, model, head)
    freeze_backbone(model, head)
    for name, layer in targets.items():
        model.set_submodule(name, LowRankLinear(layer, settings.rank, settings.alpha))
    num = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    logger.info("LoRA: adapters of rank %d in %s (%s); %.3f M parameters are trained, with the head", settings.rank,
                counted(len(targets), "layer"), first_few([*targets], num=3), num / 1e6)  # fmt: skip
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def find_targets(cfg, model: nn.Module, head: Collection[str]) -> tuple[LoraSettings, dict[str, nn.Linear]]:
    """Return FINETUNE.LORA, and the linear layers outside of the head that its targets match, by name.

    A subclass, such as the output projection of torch's attention, may never be called, and is left out.

    Raises:
        ConfigError: a pattern matches none of them, or the rank is above the width of one.
    """
    settings: LoraSettings = read_settings("FINETUNE.LORA", LoraSettings, cfg.FINETUNE.LORA)[0]
    known = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear and name not in head}
    found = {name: layer for name, layer in known.items() if any(is_match(name, one) for one in settings.targets)}
    problems = []
    for pattern in settings.targets:
        if not any(is_match(name, pattern) for name in known):
            has = f"the model has {first_few([*known])}" if known else "it has none but its head; fix: a transformer"
            message = f"{pattern!r} matches no linear layer{did_you_mean(pattern, known)}; {has}"
            problems.append(Problem("FINETUNE.LORA.targets", message))
    for name, layer in found.items():
        if (width := min(layer.weight.shape)) < settings.rank:
            message = f"got {settings.rank}; expected at most {width}, the width of {name}; fix: a lower rank"
            problems.append(Problem("FINETUNE.LORA.rank", message))
            break
    if problems:
        raise ConfigError(problems)
    return settings, found
