"""Plain vision transformers (Beyer et al., arXiv 2205.01580): no class token, fixed positions, mean pooling.

Layers and initial values are those of big_vision (https://github.com/google-research/big_vision, models/vit.py), as is
its RandAugment.
"""

import functools
import math
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import nn

from distribuuuu.config.registry import AUGMENTATIONS, MODELS

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


# -------------------------------------------------------------------------------------- RandAugment

# RandAugment (Cubuk et al., arXiv 1909.13719) with the operations and magnitudes of big_vision.
#
# The figures are those of its pp/archive/autoaugment.py, a fork of TensorFlow's EfficientNet. It differs from the
# versions of timm and torchvision: each drawn operation is applied, Cutout is one of 16, uncovered pixels become gray,
# geometric operations take the nearest pixel, and distances do not depend on the size of the image. Two results of its
# code that its names do not show are kept: Solarize at the maximum magnitude inverts all pixels, since the threshold
# 256 becomes 0 in a byte; and Contrast blends with a gray of (number of pixels) / 256 instead of the mean brightness.

# Value of uncovered and of cut out pixels.
GRAY = 128
# Operations per image.
NUM_OPERATIONS = 2
# Parameters at the maximum magnitude, 10; the recipes of big_vision use no other one.
ENHANCEMENT = 1.9
ROTATION = 30.0  # degrees
SHEAR = 0.3  # pixels per pixel
TRANSLATION = 100  # pixels
CUTOUT = 40  # half of the side of the square, in pixels
POSTERIZE_BITS = 4
SOLARIZE_ADDITION = 110


def affine(image: Image.Image, row: tuple[float, float, float], column: tuple[float, float, float]) -> Image.Image:
    """Return the image whose pixel (x, y) is the nearest one to (row, column) . (x, y, 1) of the given image.

    Coordinates are numbers of pixels from 0; the nearest one may be outside, where the result is gray.
    """
    # PIL counts from the corner of a pixel, not from its center.
    coefficients = [(a, b, c + 0.5 - (a + b) / 2) for a, b, c in (row, column)]
    data = (*coefficients[0], *coefficients[1])
    return image.transform(image.size, Image.Transform.AFFINE, data, Image.Resampling.NEAREST, fillcolor=(GRAY,) * 3)


def contrast(image: Image.Image) -> Image.Image:
    """Return the image with its distance from a gray of (number of pixels) / 256 enlarged."""
    level = min(255, image.width * image.height // 256)
    return Image.blend(Image.new("RGB", image.size, (level,) * 3), image, ENHANCEMENT)


def solarize_add(image: Image.Image) -> Image.Image:
    """Return the image with dark values, below 128, raised."""
    return image.point([min(255, value + SOLARIZE_ADDITION) if value < 128 else value for value in range(256)] * 3)


def cutout(image: Image.Image, x: int, y: int) -> Image.Image:
    """Return the image with a gray square around a pixel, cut off at the borders."""
    result = image.copy()
    result.paste((GRAY,) * 3, (max(0, x - CUTOUT), max(0, y - CUTOUT), x + CUTOUT, y + CUTOUT))
    return result


def _sign() -> int:
    return 1 if torch.rand(()) < 0.5 else -1


def _random_pixel(image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    return int(torch.randint(width, ())), int(torch.randint(height, ()))


def _shift_x(image: Image.Image, shear: float, pixels: float) -> Image.Image:
    return affine(image, (1, shear, pixels), (0, 1, 0))


def _shift_y(image: Image.Image, shear: float, pixels: float) -> Image.Image:
    return affine(image, (1, 0, 0), (shear, 1, pixels))


# All equally likely. Their random numbers are those of torch's generator.
OPERATIONS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "AutoContrast": ImageOps.autocontrast,
    "Equalize": ImageOps.equalize,
    "Invert": ImageOps.invert,
    "Rotate": lambda image: image.rotate(_sign() * ROTATION, Image.Resampling.NEAREST, fillcolor=(GRAY,) * 3),
    "Posterize": lambda image: ImageOps.posterize(image, POSTERIZE_BITS),
    "Solarize": ImageOps.invert,
    "Color": lambda image: ImageEnhance.Color(image).enhance(ENHANCEMENT),
    "Contrast": contrast,
    "Brightness": lambda image: ImageEnhance.Brightness(image).enhance(ENHANCEMENT),
    "Sharpness": lambda image: ImageEnhance.Sharpness(image).enhance(ENHANCEMENT),
    "ShearX": lambda image: _shift_x(image, _sign() * SHEAR, 0),
    "ShearY": lambda image: _shift_y(image, _sign() * SHEAR, 0),
    "TranslateX": lambda image: _shift_x(image, 0, _sign() * TRANSLATION),
    "TranslateY": lambda image: _shift_y(image, 0, _sign() * TRANSLATION),
    "Cutout": lambda image: cutout(image, *_random_pixel(image)),
    "SolarizeAdd": solarize_add,
}


@AUGMENTATIONS.register
def randaugment_big_vision(pixels: torch.Tensor) -> torch.Tensor:
    """Apply NUM_OPERATIONS random operations, with replacement, each at the maximum magnitude, to uint8 (3, H, W)."""
    image, names = Image.fromarray(pixels.permute(1, 2, 0).numpy()), list(OPERATIONS)
    for _ in range(NUM_OPERATIONS):
        image = OPERATIONS[names[int(torch.randint(len(names), ()))]](image)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
