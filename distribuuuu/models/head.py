"""The head of a model: the layers whose shapes depend on the number of classes."""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from distribuuuu.models.find_architecture import ModelSpec, build_model_spec


def draw_small_weights(layer: nn.Linear | nn.modules.conv._ConvNd) -> None:
    """Draw the weights of a layer with a deviation of 0.01, and set its biases to 0."""
    nn.init.normal_(layer.weight, std=0.01)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def find_head(cfg, model: nn.Module) -> list[str]:
    """Return the names of the layers of the head."""
    return find_head_of(build_model_spec(cfg), model)


def find_head_of(spec: ModelSpec, model: nn.Module) -> list[str]:
    """Return the names of the layers of the head of a model that was built with these arguments."""
    other = replace(spec, num_classes=spec.num_classes + 1)
    with torch.random.fork_rng(devices=[]):
        resized = other.build_on_meta()
        return find_resized_layers(model, other.build() if resized is None else resized)


def head_parameters(cfg, model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters of the head, also of a model that a task has changed or that is sharded."""
    layers = [model.get_submodule(name) for name in find_head(cfg, model)]
    return [parameter for layer in layers for parameter in layer.parameters(recurse=False)]


def find_resized_layers(model: nn.Module, other: nn.Module) -> list[str]:
    """Return the names of the layers whose own parameters have other shapes in `other`, the same model resized."""
    others = dict(other.named_modules())
    return [name for name, layer in model.named_modules() if _shapes(layer) != _shapes(others.get(name, layer))]


def _shapes(layer: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in layer.parameters(recurse=False)]


def replace_layers(model: nn.Module, other: nn.Module, names: Collection[str]) -> None:
    """Replace some layers of a model by those of `other`; all other layers and attributes are kept."""
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, other.get_submodule(name))


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
