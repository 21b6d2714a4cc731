"""BoTNet-50: ResNet-50 with self-attention in its last stage (Srinivas et al., arXiv 2101.11605)."""

from collections import OrderedDict

import torch
from torch import nn
from torchvision.models import resnet50

from distribuuuu.config.registry import MODELS

# Image pixels per cell of the feature map after layer3 of ResNet-50.
STRIDE = 16


class RelativePosition(nn.Module):
    """A learned vector for each vertical and each horizontal distance between two cells of the feature map."""

    def __init__(self, size: int, dim: int):
        super().__init__()
        self.rel_height = nn.Parameter(torch.randn(2 * size - 1, dim) * dim**-0.5)
        self.rel_width = nn.Parameter(torch.randn(2 * size - 1, dim) * dim**-0.5)

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        """Map queries (N, heads, H, W, dim) to logits (N, heads, H * W, H * W), one per pair of query and key."""
        num, heads, height, width, _ = q.shape
        # [query row, key row, dim] and [query column, key column, dim]
        rows, columns = _by_distance(self.rel_height, height), _by_distance(self.rel_width, width)
        vertical = torch.einsum("nhxyd,xid->nhxyi", q, rows)
        horizontal = torch.einsum("nhxyd,yjd->nhxyj", q, columns)
        logits = vertical.unsqueeze(-1) + horizontal.unsqueeze(-2)
        return logits.reshape(num, heads, height * width, height * width)


def _by_distance(vectors: torch.Tensor, size: int) -> torch.Tensor:
    """Gather (2 size - 1, dim) vectors into (size, size, dim): element [a, b] is the vector of distance b - a."""
    position = torch.arange(size, device=vectors.device)
    return vectors[position[None, :] - position[:, None] + size - 1]


class Attention(nn.Module):
    """Multi-head self-attention over a feature map of `size` x `size` cells, with relative positions."""

    def __init__(self, dim: int, size: int, num_heads: int = 4, head_dim: int = 128):
        super().__init__()
        self.size, self.num_heads, self.scale = size, num_heads, head_dim**-0.5
        self.to_qk = nn.Conv2d(dim, 2 * num_heads * head_dim, kernel_size=1, bias=False)
        self.to_v = nn.Conv2d(dim, num_heads * head_dim, kernel_size=1, bias=False)
        self.pos_emb = RelativePosition(size, head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, dim, size, size) to (N, num_heads * head_dim, size, size).

        Raises:
            ValueError: the feature map has another size.
        """
        num, _, height, width = x.shape
        if (height, width) != (self.size, self.size):
            raise ValueError(
                f"got a feature map of {height} x {width}; expected {self.size} x {self.size}; "
                f"fix: use images of {self.size * STRIDE} px, or build the model with another im_size"
            )
        q, k = (self._by_head(half) for half in self.to_qk(x).chunk(2, dim=1))
        v = self._by_head(self.to_v(x))
        q = q * self.scale
        logits = q @ k.transpose(2, 3) + self.pos_emb(q.unflatten(2, (height, width)))
        out = logits.softmax(dim=-1) @ v
        return out.transpose(2, 3).reshape(num, -1, height, width)

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, heads * dim, H, W) to (N, heads, H * W, dim)."""
        return x.flatten(2).unflatten(1, (self.num_heads, -1)).transpose(2, 3)


class BottleneckTransformer(nn.Module):
    """A ResNet bottleneck block with attention instead of the 3x3 convolution."""

    def __init__(self, dim: int, dim_out: int, size: int, num_heads: int = 4, head_dim: int = 128):
        super().__init__()
        inner = num_heads * head_dim
        self.shortcut = nn.Identity() if dim == dim_out else nn.Sequential(*_conv1x1_norm(dim, dim_out), nn.ReLU())
        self.net = nn.Sequential(
            *_conv1x1_norm(dim, inner),
            nn.ReLU(),
            Attention(inner, size, num_heads, head_dim),
            nn.Identity(),  # the pooling of a block of stride 2: keeps the indices of the state dict
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            *_conv1x1_norm(inner, dim_out),
        )
        nn.init.zeros_(self.net[-1].get_parameter("weight"))  # the block starts as its shortcut
        self.activation = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, dim, size, size) to (N, dim_out, size, size)."""
        return self.activation(self.net(x) + self.shortcut(x))


def _conv1x1_norm(num_in: int, num_out: int) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    return nn.Conv2d(num_in, num_out, kernel_size=1, bias=False), nn.BatchNorm2d(num_out)


@MODELS.register
def botnet50(num_classes: int = 1000, im_size: int = 224) -> nn.Sequential:
    """Return BoTNet-50 of stride 1: images (N, 3, im_size, im_size) -> logits (N, num_classes).

    Srinivas et al., arXiv 2101.11605. The relative positions fix the image size: weights of one `im_size` do not fit
    another.

    Raises:
        ValueError: `im_size` is not a multiple of 16; in forward, images of another size.
    """
    if not isinstance(im_size, int) or im_size < STRIDE or im_size % STRIDE:
        raise ValueError(f"got im_size {im_size!r}; expected a multiple of {STRIDE}, e.g. 224 or 256")
    stem_to_layer3 = list(resnet50().children())[:7]
    blocks = (BottleneckTransformer(num_in, 2048, im_size // STRIDE) for num_in in (1024, 2048, 2048))
    return nn.Sequential(
        *stem_to_layer3,
        nn.Sequential(OrderedDict(net=nn.Sequential(*blocks))),  # the names of the published state dict
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1),
        nn.Linear(2048, num_classes),
    )
