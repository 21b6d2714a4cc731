"""The head of a model, the layers whose shapes depend on the number of classes, and other initial weights."""

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from distribuuuu.models.find_architecture import ModelSpec, build_model_spec


def draw_small_weights(layer: nn.Linear | nn.modules.conv._ConvNd) -> None:
    """Draw the weights of a layer with a deviation of 0.01, and set its biases to 0."""
    nn.init.normal_(layer.weight, std=0.01)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def find_head(cfg, model: nn.Module, task: Any = None) -> list[str]:
    """Return the names of the layers of the head; of a model that a task has adapted, also of those that it has added.

    The layers of a backbone that the task has kept are found by adapting a new model with a copy of the task.
    """
    spec = build_model_spec(cfg)
    if task is None:
        return find_head_of(spec, model)
    with torch.random.fork_rng(devices=[]):
        initial = spec.build()
        head = find_head_of(spec, initial)
        kept = [layer for name, layer in initial.named_modules() if name not in head]
        layers, tensors = {id(layer) for layer in kept}, {id(own) for layer in kept for own in _own(layer)}
        adapted = copy.copy(task).adapt_model(initial)
    return [name for name, layer in adapted.named_modules()
            if id(layer) not in layers or any(id(own) not in tensors for own in _own(layer))]  # fmt: skip


def _own(layer: nn.Module) -> list[nn.Parameter]:
    return list(layer.parameters(recurse=False))


def find_head_of(spec: ModelSpec, model: nn.Module) -> list[str]:
    """Return the names of the layers of the head of a model built with these arguments: more classes change them."""
    other = replace(spec, num_classes=spec.num_classes + 1)
    with torch.random.fork_rng(devices=[]):
        resized = other.build_on_meta()
        others = dict((other.build() if resized is None else resized).named_modules())
    return [name for name, layer in model.named_modules() if _shapes(layer) != _shapes(others.get(name, layer))]


def _shapes(layer: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(own.shape) for own in _own(layer)]


def initialize_head(model: nn.Module, names: Collection[str]) -> None:
    """Draw the weights of linear layers and convolutions of the head with a deviation of 0.01, and set biases to 0.

    The first loss is then that of guessing, whatever the constructor does: timm draws the head of EfficientNet with a
    deviation of 0.18 for ten classes. Layers of other kinds are unchanged.
    """
    for name in names:
        layer = model.get_submodule(name)
        if isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)):
            draw_small_weights(layer)


def layer_of(tensor: str) -> str:
    """Return the name of the layer that has a tensor."""
    return tensor.rpartition(".")[0]


def select_outputs(model: nn.Module, columns: torch.Tensor, num_classes: int) -> None:
    """Restrict the logits (N, num_classes) of a model to some columns, on its device; other outputs are unchanged."""

    def select(_module: nn.Module, _inputs: Any, logits: Any) -> Any:
        return logits[:, columns] if getattr(logits, "shape", ())[1:] == (num_classes,) else logits

    model.register_forward_hook(select)


def initialize(model: nn.Module, keep_norms: bool = False) -> None:
    """Initialize a model for MODEL.INIT as pycls does (models/blocks.py): N(0, 2 / fan-out), linear layers N(0, 0.01).

    The groups of a convolution do not divide its fan-out, unlike in timm since 0.6. Biases of convolutions start as in
    torch. With `keep_norms`, norms keep their scales: timm's regnet.py before 0.6 had zeros at the ends of blocks.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) or (isinstance(layer, nn.BatchNorm2d) and not keep_norms):
            layer.reset_parameters()
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            draw_small_weights(layer)
