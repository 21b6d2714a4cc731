"""Models of RGB images for another number of channels."""

import torch
from torch import nn

from distribuuuu.config import ConfigError, Problem


def replace_input(model: nn.Module, arch: str, channels: int, keep_weights: object) -> None:
    """Let the first convolution of a model, of three channels, take another number of them.

    With `keep_weights`, its weights are adapted, see `adapt_input`; else new ones are drawn with their deviation.
    """
    conv = find_input(model)
    if conv is None:
        message = f"got {channels}, but {arch} has no convolution of three channels"
        raise ConfigError(Problem("DATA.CHANNELS", f"{message}; fix: give its constructor a parameter in_channels"))
    weight = conv.weight.detach()
    shape = (len(weight), channels, *weight.shape[2:])
    adapted = adapt_input(weight, channels) if keep_weights else weight.new_empty(shape).normal_() * weight.std()
    conv.weight, conv.in_channels = nn.Parameter(adapted), channels


def find_input(model: nn.Module, channels: int = 3) -> nn.Conv2d | None:
    """Return the first convolution of the images of so many channels; None if there is none."""
    convs = (layer for layer in model.modules() if isinstance(layer, nn.Conv2d) and layer.groups == 1)
    first = next(convs, None)
    return first if first is not None and first.in_channels == channels else None


def adapt_input(weight: torch.Tensor, channels: int) -> torch.Tensor:
    """Return weights (out, channels, h, w) of a first convolution from those of RGB, as timm's `in_chans` does.

    One channel: their sum over the colors. Others: the colors in turn, times 3 / channels.
    """
    if channels == 1:
        return weight.sum(dim=1, keepdim=True)
    return weight.repeat(1, -(-channels // 3), 1, 1)[:, :channels] * (3 / channels)
