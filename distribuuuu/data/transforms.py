"""Transforms: crop, resize and flip, from an image to uint8 pixels; the cast and the normalization run on the device.

Random transforms draw their numbers in this order: the flips, the position of the crop, its shape, its interpolation.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.nn.functional import interpolate, pad

from distribuuuu.config.derived import Size, height_and_width, show_size
from distribuuuu.data.decode import Box, LazyImage
from distribuuuu.data.seeding import SampleRNG

# Least and greatest width over height of a random crop.
RATIO = (3 / 4, 4 / 3)
# How often a random crop that does not fit into the image is drawn again.
ATTEMPTS = 10
# An image longer than this many times its shorter side is cropped to that before its shorter side is resized: a center
# crop would drop the ends anyway, and a strip of 20,000 x 1 pixels would become millions of columns.
MAX_ASPECT = 16

T = TypeVar("T", bound="Transform")


class Transform(ABC):
    """Base class: from an image and its random numbers to the pixels of a sample. Subclasses are dataclasses.

    Attributes:
        size: height and width of the output, in pixels; or the side of a square.
    """

    size: Size

    @abstractmethod
    def __call__(self, image: LazyImage, rng: SampleRNG) -> Any:
        """Return uint8 (3, height, width); with several views, a tuple of them."""

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        """Height and width of the output."""
        return height_and_width(self.size)

    @property
    def views(self) -> "tuple[Transform, ...]":
        """The transform of each view of an image, at its full size; of stages, those of the first one."""
        return (self,)

    def at_size(self: T, size: Size) -> T:
        """Return the same transform with an output of another size."""
        return replace(self, size=size)  # type: ignore[type-var]  # every subclass is a dataclass

    def at_epoch(self, epoch: int) -> "Transform":
        """Return the transform of an epoch, from 0."""
        return self


@dataclass(frozen=True)
class ResizedCrop(Transform):
    """A crop of random area and aspect ratio, resized, randomly flipped (Szegedy et al., arXiv 1409.4842).

    Attributes:
        scale: least and greatest fraction of the image's area.
        ratio: least and greatest width over height.
        interpolation: see `resize`; or "random", one of them for each image, equally likely, which is timm's default.
        flip, vflip: probability of a horizontal and of a vertical flip.
    """

    size: Size
    scale: Sequence[float] = (0.08, 1.0)
    flip: float = 0.5
    ratio: Sequence[float] = RATIO
    interpolation: str = "bilinear"
    vflip: float = 0.0

    def __str__(self) -> str:
        low, high = self.scale
        crop = f"random resized crop {show_size(self.size)} px, area {low:g}-{high:g}, {self.interpolation}"
        return f"{crop}, {show_flips(self)}"

    def __call__(self, image: LazyImage, rng: SampleRNG) -> torch.Tensor:
        is_flipped, is_vflipped = draw_flips(rng, self)
        height, width = image.size
        box = random_resized_box(rng, height, width, self.scale, self.ratio)
        interpolation = self.interpolation
        if interpolation == "random":
            interpolation = "bilinear" if rng.uniform() < 0.5 else "bicubic"
        pixels = resize(image.crop(box), *self.shape, interpolation)
        return flip_each(pixels, is_flipped, is_vflipped)


@dataclass(frozen=True)
class CenterCrop(Transform):
    """The evaluation transform: resize to the smallest size that covers `resize_to`, then crop the center of `size`."""

    resize_to: Size
    size: Size
    interpolation: str = "bilinear"

    def __str__(self) -> str:
        return f"{show_cover(self.resize_to)}, center crop {show_size(self.size)} px, {self.interpolation}"

    def __call__(self, image: LazyImage, rng: SampleRNG) -> torch.Tensor:
        return self.crop(image.pixels())

    def crop(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the centers of images of one size: uint8 (..., C, height, width)."""
        pixels = resize_to_cover(crop_ends(pixels), self.resize_to, self.interpolation)
        return crop_center(pixels, self.size)


def draw_flips(rng: Any, crop: Any) -> tuple[Any, Any]:
    """Return whether an image, or each image, is flipped horizontally and vertically."""
    is_flipped = rng.flip(crop.flip)
    return is_flipped, crop.vflip > 0 and rng.uniform() < crop.vflip


def flip_each(pixels: torch.Tensor, is_flipped: bool, is_vflipped: bool) -> torch.Tensor:
    """Return an image flipped horizontally and vertically."""
    pixels = pixels.flip(-1) if is_flipped else pixels
    return pixels.flip(-2) if is_vflipped else pixels


def show_flips(crop: Any) -> str:
    """Return the probabilities of the flips for messages."""
    return f"flip {crop.flip:g}" + (f", vertical flip {crop.vflip:g}" if crop.vflip else "")


def show_cover(size: Size) -> str:
    """Return the resize that covers a size, for messages."""
    return f"shorter side {size} px" if isinstance(size, int) else f"resize to cover {show_size(size)} px"


def random_resized_box(
    rng: SampleRNG, height: int, width: int, scale: Sequence[float], ratio: Sequence[float] = RATIO
) -> Box:
    """Return a box of random position, area (a fraction of the image's, uniform) and aspect ratio (log-uniform).

    After ATTEMPTS that do not fit, it is the largest central box of an allowed ratio.
    """
    down, right = rng.uniform(), rng.uniform()
    for _ in range(ATTEMPTS):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * rng.uniform())
        aspect = math.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * rng.uniform())
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top, left = int(down * (height - box_height + 1)), int(right * (width - box_width + 1))
            return Box(top, left, box_height, box_width)
    box_width = max(1, min(width, round(height * ratio[1])))
    box_height = max(1, min(height, round(width / ratio[0])))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def resize(pixels: torch.Tensor, height: int, width: int, interpolation: str = "bilinear") -> torch.Tensor:
    """Return (..., C, height, width) of the type of the pixels; float32 is not rounded.

    The interpolation is "bilinear" or "bicubic", with antialiasing, or one of OpenCV: "opencv_linear" (INTER_LINEAR) or
    "opencv_area" (INTER_AREA).
    """
    if tuple(pixels.shape[-2:]) == (height, width):
        return pixels
    if interpolation.startswith("opencv"):
        from distribuuuu.data.crops import resize_as_opencv

        values = resize_as_opencv(pixels, height, width, interpolation)
        return to_uint8(values) if pixels.dtype == torch.uint8 else values
    # A batch with the strides of (1, H, W, C): only then torch uses the adjacent channels, in 0.6 times the time.
    shape, strides = pixels.shape, pixels.stride()
    batch = pixels if pixels.ndim == 4 else pixels.as_strided((1, *shape), (shape[1] * strides[1], *strides))
    if batch.device.type == "cpu" or batch.dtype != torch.uint8:
        resized = interpolate(batch, (height, width), mode=interpolation, antialias=True)
    else:  # torch resizes uint8 on the CPU only
        resized = to_uint8(interpolate(batch.float(), (height, width), mode=interpolation, antialias=True))
    return resized if pixels.ndim == 4 else resized[0]


def to_uint8(values: torch.Tensor) -> torch.Tensor:
    """Return float values, which may be overwritten, as uint8."""
    return values.round_().clamp_(0, 255).to(torch.uint8)


def resize_to_cover(pixels: torch.Tensor, size: Size, interpolation: str = "bilinear") -> torch.Tensor:
    """Return the images resized to the smallest size that covers `size` and has their aspect ratio, rounded down.

    Of a square, it is the size whose shorter side is that of the square.
    """
    return resize(pixels, *resized_size("cover", pixels.shape[-2:], size), interpolation)


def resized_size(mode: str, shape: Sequence[int], size: Size) -> tuple[int, int]:
    """Return the height and the width to which an image of a shape (H, W) is resized for an output of `size`.

    The aspect ratio is kept, rounded down, but for "squash". Of "cover", no side is below that of `size`; of
    "letterbox" none is above it, but at least 2, since torch's antialiased resize to a single pixel fails at random.
    """
    (height, width), (down, across) = shape, height_and_width(size)
    if mode == "squash":
        return down, across
    by_height, by_width = (down, width * down // height), (height * across // width, across)
    if mode == "cover":
        return max(by_height[0], by_width[0]), max(by_height[1], by_width[1])
    return max(2, min(by_height[0], by_width[0])), max(2, min(by_height[1], by_width[1]))


def crop_box(pixels: torch.Tensor, top: int, left: int, size: Size) -> torch.Tensor:
    """Return a box of the images, zero where it extends beyond them: uint8 (..., C, height, width)."""
    height, width = pixels.shape[-2:]
    down, across = height_and_width(size)
    below, right = top + down - height, left + across - width
    inside = pixels[..., max(0, top) : max(0, top + down), max(0, left) : max(0, left + across)]
    limits = across, across, down, down
    missing = [min(side, max(0, edge)) for side, edge in zip(limits, (-left, right, -top, below), strict=True)]
    return pad(inside, missing) if any(missing) else inside


def crop_center(pixels: torch.Tensor, size: Size) -> torch.Tensor:
    """Return the center of the images, between black borders where they are smaller: uint8 (..., C, height, width).

    It is rounded as in torchvision.
    """
    gaps = (side - crop for side, crop in zip(pixels.shape[-2:], height_and_width(size), strict=True))
    top, left = (round(gap / 2) if gap >= 0 else -(-gap // 2) for gap in gaps)
    return crop_box(pixels, top, left, size)


def crop_ends(pixels: torch.Tensor) -> torch.Tensor:
    """Return the center of images longer than MAX_ASPECT times their shorter side; other images unchanged."""
    height, width = pixels.shape[-2:]
    top, left = max(0, height - MAX_ASPECT * width) // 2, max(0, width - MAX_ASPECT * height) // 2
    return pixels[..., top : height - top, left : width - left]
