"""The CIFAR-10 network of airbench94 (Jordan, arXiv 2404.00498): six 3x3 convolutions behind a whitening layer."""

import torch
import torch.nn.functional as F
from torch import nn

from distribuuuu.config.registry import MODELS

# Images whose patches are held in memory at a time.
_CHUNK = 500


def _norm(num_channels: int) -> nn.BatchNorm2d:
    """Return a batch norm without a scale; 60 % of the running statistics are kept in each step."""
    norm = nn.BatchNorm2d(num_channels, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm


def _conv(num_in: int, num_out: int) -> nn.Conv2d:
    """Return a 3x3 convolution whose first `num_in` outputs start as its inputs; the others start at random."""
    conv = nn.Conv2d(num_in, num_out, kernel_size=3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(conv.weight[:num_in])
    return conv


class ConvGroup(nn.Module):
    """Two convolutions, each with a batch norm and a GELU; the first one halves the feature maps."""

    def __init__(self, num_in: int, num_out: int):
        super().__init__()
        self.conv1, self.norm1 = _conv(num_in, num_out), _norm(num_out)
        self.conv2, self.norm2 = _conv(num_out, num_out), _norm(num_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, num_in, H, W) to (N, num_out, H // 2, W // 2)."""
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class Airbench(nn.Module):
    """A 2x2 whitening layer, three groups of convolutions and a linear head on the maxima of the feature maps.

    The filters of the whitening layer are constant, see `initialize_from`; its bias is trained. `width` is the channels
    of the first group, the others have four times as many; `scale` is a factor of the logits.

    Raises:
        ValueError: `width` is below the 24 outputs of the whitening layer.
    """

    def __init__(self, num_classes: int, width: int = 64, scale: float = 1 / 9):
        super().__init__()
        if width < 24:
            raise ValueError(f"got width {width}; expected 24 or more")
        self.whiten = nn.Conv2d(3, 24, kernel_size=2)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]  # it has one
        widths = (24, width, 4 * width, 4 * width)
        self.groups = nn.Sequential(*map(ConvGroup, widths, widths[1:]))
        self.head = nn.Linear(4 * width, num_classes, bias=False)
        self.scale = scale

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, 3, H, W), of 9 pixels or more, to logits (N, num_classes)."""
        features = self.groups(F.gelu(self.whiten(images)))
        return self.head(F.max_pool2d(features, features.shape[-2:]).flatten(1)) * self.scale

    @torch.no_grad()
    def initialize_from(self, images: torch.Tensor) -> None:
        """Set the filters of the whitening layer from normalized images: float32 (N, 3, H, W)."""
        filters = whitening_filters(images, 2)
        self.whiten.weight.copy_(torch.cat([filters, -filters]))


def whitening_filters(images: torch.Tensor, side: int, eps: float = 5e-4) -> torch.Tensor:
    """Map images (N, C, H, W) to filters (C * side * side, C, side, side) that whiten their patches, both float32.

    The outputs are uncorrelated and have a second moment of about 1. The filters are the eigenvectors of the second
    moments of all patches, the largest eigenvalue first, each divided by the square root of its eigenvalue (as in Page,
    How to train your ResNet, myrtle.ai, 2019), to which `eps` is added: directions of less variance are not amplified.
    """
    num_values, num_patches = images.shape[1] * side**2, 0
    moments = torch.zeros(num_values, num_values, dtype=torch.float64)
    for chunk in images.split(_CHUNK):
        patches = F.unfold(chunk, side).transpose(0, 1).flatten(1)
        moments += (patches @ patches.T).double().cpu()
        num_patches += patches.shape[1]
    eigenvalues, eigenvectors = torch.linalg.eigh(moments / num_patches)
    filters = (eigenvectors / (eigenvalues + eps).sqrt()).T.flip(0)
    return filters.float().view(num_values, -1, side, side).to(images.device)


@MODELS.register
def airbench94(num_classes: int = 10, width: int = 64, scale: float = 1 / 9) -> Airbench:
    """Return the network of airbench94, of 1.97 M parameters with 10 classes."""
    return Airbench(num_classes, width, scale)
