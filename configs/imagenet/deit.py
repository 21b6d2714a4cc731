"""DeiT (Touvron et al., arXiv 2012.12877) and DeiT-III (arXiv 2204.07118), initialized as their authors do.

Layers and names of tensors are those of timm's deit*_patch16_224, whose class token starts at a standard deviation of
1e-6 and whose DeiT-III starts its layer scale at 1e-6 and drops later blocks more often than earlier ones.
"""

from typing import Any

from torch import nn

from distribuuuu.config.registry import MODELS


def _deit(name: str, num_classes: int, im_size: int, **settings: Any) -> Any:
    import timm

    model: Any = timm.create_model(f"{name}_patch16_224", num_classes=num_classes, img_size=im_size, **settings)
    nn.init.trunc_normal_(model.cls_token, std=0.02)
    return model


@MODELS.register
def deit_tiny(num_classes: int = 1000, im_size: int = 224, drop_path_rate: float = 0.1) -> nn.Module:
    """Return a DeiT-Ti: 12 blocks of width 192 with 3 heads; drop path rises linearly from 0 to its rate."""
    return _deit("deit_tiny", num_classes, im_size, drop_path_rate=drop_path_rate)


@MODELS.register
def deit_small(num_classes: int = 1000, im_size: int = 224, drop_path_rate: float = 0.1) -> nn.Module:
    """Return a DeiT-S: 12 blocks of width 384 with 6 heads; drop path rises linearly from 0 to its rate."""
    return _deit("deit_small", num_classes, im_size, drop_path_rate=drop_path_rate)


@MODELS.register
def deit_base(num_classes: int = 1000, im_size: int = 224, drop_path_rate: float = 0.1) -> nn.Module:
    """Return a DeiT-B: 12 blocks of width 768 with 12 heads; drop path rises linearly from 0 to its rate."""
    return _deit("deit_base", num_classes, im_size, drop_path_rate=drop_path_rate)


@MODELS.register
def deit3_small(
    num_classes: int = 1000, im_size: int = 224, drop_path_rate: float = 0.05, init_values: float = 1e-4
) -> nn.Module:
    """Return a DeiT-III S: as DeiT-S, with layer scale from `init_values`, and the same drop path in all blocks."""
    from timm.layers import DropPath

    model = _deit("deit3_small", num_classes, im_size, init_values=init_values)
    for block in model.blocks if drop_path_rate else ():
        block.drop_path1, block.drop_path2 = DropPath(drop_path_rate), DropPath(drop_path_rate)
    return model
