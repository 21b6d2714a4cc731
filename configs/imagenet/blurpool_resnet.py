"""ResNets of torchvision with a blur before each strided convolution, as ffcv-imagenet trains them.

Zhang, arXiv 1904.11486; Leclerc et al., arXiv 2306.12517. timm's resnetblur blurs after a convolution of stride 1, pads
by reflection and blurs in the max-pool; its ResNet-50 takes 25 % more arithmetic.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import get_model_builder

from distribuuuu.config.registry import MODELS

# Strided convolutions of fewer input channels, i.e. the stem, are not blurred.
MIN_CHANNELS = 16


class BlurredConv(nn.Module):
    """A convolution of an image that has been blurred by a fixed 3x3 binomial filter, zero-padded.

    The names of its parts are those of ffcv-imagenet, so that state dicts match.
    """

    blur_filter: torch.Tensor

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        line = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.conv = conv
        self.register_buffer("blur_filter", torch.outer(line, line).repeat(conv.in_channels, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, C, H, W) to the output of the convolution."""
        return self.conv(F.conv2d(x, self.blur_filter, padding=1, groups=self.conv.in_channels))


def add_blurs(model: nn.Module) -> nn.Module:
    """Replace the strided convolutions of at least MIN_CHANNELS inputs in the model; return the model."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Conv2d) and max(module.stride) > 1 and module.in_channels >= MIN_CHANNELS:
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, BlurredConv(module))
    return model


@MODELS.register
def resnet18_blurpool(num_classes: int = 1000) -> nn.Module:
    """Return a ResNet-18."""
    return add_blurs(get_model_builder("resnet18")(num_classes=num_classes))


@MODELS.register
def resnet50_blurpool(num_classes: int = 1000) -> nn.Module:
    """Return a ResNet-50."""
    return add_blurs(get_model_builder("resnet50")(num_classes=num_classes))
