"""Plain vision transformers (Beyer et al., arXiv 2205.01580): no class token, fixed positions, mean pooling.

Layers and initial values are those of big_vision (https://github.com/google-research/big_vision, models/vit.py).
"""

import functools
import math
from collections import OrderedDict

import torch
from torch import nn

from distribuuuu.config.registry import MODELS

# Standard deviation of a standard normal variable that is cut off at -2 and 2, by which Flax divides.
_CUT_OFF_STD = 0.87962566103423978


def sincos_positions(rows: int, columns: int, width: int) -> torch.Tensor:
    """Return fixed position embeddings of a grid, float32 (1, rows * columns, width): sine and cosine of x, then of y.

    As in MoCo v3 (Chen et al., arXiv 2104.02057). `width` is a multiple of 4.
    """
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    omega = 10_000.0 ** -(torch.arange(width // 4) / (width // 4 - 1))
    angles = [axis.flatten()[:, None] * omega for axis in (x, y)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)[None]


def _init_lecun_normal(layer: nn.Linear | nn.Conv2d) -> None:
    """Initialize as Flax does by default: normal weights of variance 1 / fan_in, cut off at 2 deviations; no bias."""
    std = 1 / math.sqrt(layer.weight[0].numel()) / _CUT_OFF_STD
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _init_blocks(blocks: nn.Module) -> None:
    """Initialize the linear layers of transformer blocks: Xavier's uniform weights, biases of 1e-6 in the MLP."""
    for name, layer in blocks.named_modules():
        if isinstance(layer, nn.Linear):
            for part in layer.weight.chunk(3 if name.endswith("qkv") else 1):  # query, key and value are layers there
                nn.init.xavier_uniform_(part)
            nn.init.normal_(layer.bias, std=1e-6 if ".mlp." in name else 0.0)


def _plain_vit(
    num_classes: int, im_size: int, patch: int, drop_path_rate: float, mlp_head: bool, width: int, heads: int
) -> nn.Module:
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
        norm_layer=functools.partial(nn.LayerNorm, eps=1e-6),
        act_layer=functools.partial(nn.GELU, approximate="tanh"),
    )
    rows, columns = model.patch_embed.grid_size
    device = next(model.parameters()).device
    model.pos_embed = nn.Parameter(sincos_positions(rows, columns, width).to(device), requires_grad=False)
    _init_lecun_normal(model.patch_embed.proj)
    _init_blocks(model.blocks)
    nn.init.zeros_(model.get_parameter("head.weight"))
    if mlp_head:
        hidden = nn.Linear(width, width)
        _init_lecun_normal(hidden)
        model.add_module("head", nn.Sequential(OrderedDict(pre_logits=hidden, tanh=nn.Tanh(), fc=model.head)))
    return model


@MODELS.register
def plain_vit_tiny(
    num_classes: int = 1000, im_size: int = 224, patch: int = 16, drop_path_rate: float = 0.0, mlp_head: bool = False
) -> nn.Module:
    """Return a ViT-Ti: 12 blocks of width 192 with 3 heads; `mlp_head`: with a hidden layer before the logits."""
    return _plain_vit(num_classes, im_size, patch, drop_path_rate, mlp_head, width=192, heads=3)


@MODELS.register
def plain_vit_small(
    num_classes: int = 1000, im_size: int = 224, patch: int = 16, drop_path_rate: float = 0.0, mlp_head: bool = False
) -> nn.Module:
    """Return a ViT-S: 12 blocks of width 384 with 6 heads; `mlp_head`: with a hidden layer before the logits."""
    return _plain_vit(num_classes, im_size, patch, drop_path_rate, mlp_head, width=384, heads=6)
