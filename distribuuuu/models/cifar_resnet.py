"""Small ResNets for CIFAR (He et al., arXiv 1512.03385, section 4.2): 6n + 2 layers in three stages."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.registry import MODELS


def _group_norm(num_channels: int) -> nn.GroupNorm:
    """Return a group norm with groups of 8 channels, or of the next larger number that divides `num_channels`."""
    max_groups = max(1, num_channels // 8)
    num_groups = max(count for count in range(1, max_groups + 1) if num_channels % count == 0)
    return nn.GroupNorm(num_groups, num_channels)


# "group" uses no batch statistics: the output for an image does not depend on the other images of its batch.
NORMS: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "group": _group_norm}


def _conv3x3(num_in: int, num_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(num_in, num_out, kernel_size=3, stride=stride, padding=1, bias=False)


class CifarBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (option A of the paper)."""

    def __init__(self, num_in: int, num_out: int, stride: int, norm: Callable[[int], nn.Module]):
        super().__init__()
        self.conv1, self.norm1 = _conv3x3(num_in, num_out, stride), norm(num_out)
        self.conv2, self.norm2 = _conv3x3(num_out, num_out), norm(num_out)
        self.stride = stride
        self.num_added = num_out - num_in

    def shortcut(self, x: torch.Tensor) -> torch.Tensor:
        """Subsample the pixels and pad the channels with zeros where the shape changes."""
        if self.stride == 1 and self.num_added == 0:
            return x
        before = self.num_added // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.num_added - before))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, C, H, W) to (N, num_out, ceil(H / stride), ceil(W / stride))."""
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class CifarResNet(nn.Module):
    """A 3x3 stem and three stages of `width`, 2 `width` and 4 `width` channels, for any image size.

    A `stem_stride` of 2 halves the feature maps, which pays for twice the width.

    Raises:
        ValueError: `depth` is not 6n + 2, `width` or `stem_stride` is below 1, or `norm` is not one of NORMS.
    """

    def __init__(
        self,
        depth: int,
        num_classes: int = 10,
        width: int = 16,
        norm: str = "batch",
        stem_stride: int = 1,
        in_channels: int = 3,
    ):
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"got depth {depth}; expected 6n + 2, e.g. 8, 14 or 20")
        for name, value in (("width", width), ("stem_stride", stem_stride)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"got {name} {value!r}; expected an integer, 1 or more")
        if norm not in NORMS:
            raise ValueError(f"got norm {norm!r}; expected one of {', '.join(NORMS)}{did_you_mean(str(norm), NORMS)}")
        make_norm, num_blocks = NORMS[norm], (depth - 2) // 6
        self.stem = nn.Sequential(_conv3x3(in_channels, width, stem_stride), make_norm(width), nn.ReLU(inplace=True))
        self.stage1 = self._stage(width, width, 1, num_blocks, make_norm)
        self.stage2 = self._stage(width, 2 * width, 2, num_blocks, make_norm)
        self.stage3 = self._stage(2 * width, 4 * width, 2, num_blocks, make_norm)
        self.fc = nn.Linear(4 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _stage(num_in: int, num_out: int, stride: int, num_blocks: int, norm: Callable) -> nn.Sequential:
        first = CifarBlock(num_in, num_out, stride, norm)
        return nn.Sequential(first, *(CifarBlock(num_out, num_out, 1, norm) for _ in range(num_blocks - 1)))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, in_channels, H, W) to logits (N, num_classes)."""
        features = self.stage3(self.stage2(self.stage1(self.stem(images))))
        return self.fc(features.mean(dim=(2, 3)))


def _register(depth: int) -> None:
    @MODELS.register(f"resnet{depth}")
    def build(
        num_classes: int = 10, width: int = 16, norm: str = "batch", stem_stride: int = 1, in_channels: int = 3
    ) -> CifarResNet:
        return CifarResNet(depth, num_classes, width, norm, stem_stride, in_channels)


for _depth in (8, 14, 20, 32, 44, 56, 110):
    _register(_depth)
