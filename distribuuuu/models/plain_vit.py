"""Plain vision transformers (Beyer et al., arXiv 2205.01580): no class token, fixed positions, mean pooling."""

import torch
from torch import nn

from distribuuuu.config.registry import MODELS


def sincos_positions(rows: int, columns: int, width: int, temperature: float = 10_000.0) -> torch.Tensor:
    """Return fixed position embeddings of a grid, float32 (1, rows * columns, width): sine and cosine of x, then of y.

    As in MoCo v3 (Chen et al., arXiv 2104.02057). `width` is a multiple of 4.
    """
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    omega = temperature ** -(torch.arange(width // 4) / (width // 4 - 1))
    angles = [axis.flatten()[:, None] * omega for axis in (x, y)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)[None]


def _plain_vit(num_classes: int, im_size: int, patch: int, drop_path_rate: float, width: int, heads: int) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=im_size,
        patch_size=patch,
        num_classes=num_classes,
        embed_dim=width,
        depth=12,
        num_heads=heads,
        class_token=False,
        global_pool="avg",
        fc_norm=False,  # the norm precedes the pooling
        drop_path_rate=drop_path_rate,
    )
    rows, columns = model.patch_embed.grid_size
    device = next(model.parameters()).device
    model.pos_embed = nn.Parameter(sincos_positions(rows, columns, width).to(device), requires_grad=False)
    nn.init.zeros_(model.get_parameter("head.weight"))
    return model


@MODELS.register
def plain_vit_tiny(
    num_classes: int = 1000, im_size: int = 224, patch: int = 16, drop_path_rate: float = 0.0
) -> nn.Module:
    """Return a ViT-Ti: 12 blocks of width 192 with 3 heads."""
    return _plain_vit(num_classes, im_size, patch, drop_path_rate, width=192, heads=3)


@MODELS.register
def plain_vit_small(
    num_classes: int = 1000, im_size: int = 224, patch: int = 16, drop_path_rate: float = 0.0
) -> nn.Module:
    """Return a ViT-S: 12 blocks of width 384 with 6 heads."""
    return _plain_vit(num_classes, im_size, patch, drop_path_rate, width=384, heads=6)
