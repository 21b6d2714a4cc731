"""From a picture to the uint8 pixels of a sample; the cast and the normalisation come later, on the device.

Random transforms take their numbers from `draws`, in a fixed order: the flip, then where the crop lies, then its shape.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import interpolate, pad

from distribuuuu.data.draws import BatchRNG, SampleRNG
from distribuuuu.data.picture import Box, LazyImage
from distribuuuu.launch.host import copy_to_device

Transform = Callable[[LazyImage, SampleRNG], torch.Tensor]

# Width over height of a random crop, least and greatest.
RATIO = (3 / 4, 4 / 3)
# A random crop that does not fit into the image is drawn again so many times.
ATTEMPTS = 10
# An image longer than so many times its shorter side loses its ends before its shorter side is resized: a centre crop
# would drop them anyway, and a strip of 20,000 x 1 pixels would become millions of columns.
LONGEST_STRIP = 16


@dataclass(frozen=True)
class ResizedCrop:
    """A crop of random area and aspect ratio, resized, flipped at random (Szegedy et al., arXiv 1409.4842).

    Attributes:
        size: side of the result, in pixels.
        scale: least and greatest share of the image's area.
        flip: probability of a horizontal flip.
        ratio: least and greatest width over height.
        interpolation: see `resize`.
    """

    size: int
    scale: Sequence[float] = (0.08, 1.0)
    flip: float = 0.5
    ratio: Sequence[float] = RATIO
    interpolation: str = "bilinear"

    def __call__(self, picture: LazyImage, draws: SampleRNG) -> torch.Tensor:
        """Return uint8 (3, size, size)."""
        flips = draws.uniform() < self.flip
        box = resized_box(draws, *picture.size, self.scale, self.ratio)
        pixels = resize(picture.crop(box, self.size), self.size, self.size, self.interpolation)
        return pixels.flip(-1) if flips else pixels

    def at_size(self, size: int) -> "ResizedCrop":
        """Return the same crop with results of another size."""
        return replace(self, size=size)


@dataclass(frozen=True)
class PaddedCrop:
    """A random crop of the image with black around it, flipped at random (He et al., arXiv 1512.03385).

    Attributes:
        size: side of the result, in pixels; an image whose shorter side is of another size is resized first.
        padding: pixels on each side.
        flip: probability of a horizontal flip.
        interpolation: see `resize`.
    """

    size: int
    padding: int = 4
    flip: float = 0.5
    interpolation: str = "bilinear"

    def __call__(self, picture: LazyImage, draws: SampleRNG) -> torch.Tensor:
        """Return uint8 (3, size, size)."""
        flips = draws.uniform() < self.flip
        pixels = resize_shorter(without_ends(picture.pixels()), self.size, self.interpolation)
        top, left = padded_corner(draws, *pixels.shape[-2:], self.size, self.padding)
        pixels = cut(pixels, int(top), int(left), self.size)
        return pixels.flip(-1) if flips else pixels

    def of_batch(self, pixels: torch.Tensor, draws: BatchRNG) -> torch.Tensor:
        """Return the same for images of one size at a time: uint8 (N, C, H, W) to (N, C, size, size)."""
        flips = draws.uniform() < self.flip
        pixels = resize_shorter(without_ends(pixels), self.size, self.interpolation)
        top, left = padded_corner(draws, *pixels.shape[-2:], self.size, self.padding)
        span = np.arange(self.size)
        columns = np.where(flips[:, None], span[::-1], span) + left.astype(np.int64)[:, None]
        rows = span + top.astype(np.int64)[:, None]
        rows, columns = (copy_to_device(torch.from_numpy(at + self.padding), pixels.device) for at in (rows, columns))
        padded = pad(pixels, [self.padding] * 4)
        which = torch.arange(len(pixels), device=pixels.device)[:, None, None]
        return padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

    def at_size(self, size: int) -> "PaddedCrop":
        """Return the same crop with results of another size."""
        return replace(self, size=size)


@dataclass(frozen=True)
class CentreCrop:
    """Resize the shorter side to `resize_to`, cut out the middle square of `size`, as everybody evaluates."""

    resize_to: int
    size: int
    interpolation: str = "bilinear"

    def __call__(self, picture: LazyImage, draws: SampleRNG) -> torch.Tensor:
        """Return uint8 (3, size, size)."""
        return self._middle_of(picture.pixels())

    def of_batch(self, pixels: torch.Tensor, draws: BatchRNG) -> torch.Tensor:
        """Return the same for images of one size at a time: uint8 (N, C, H, W) to (N, C, size, size)."""
        return self._middle_of(pixels)

    def _middle_of(self, pixels: torch.Tensor) -> torch.Tensor:
        pixels = resize_shorter(without_ends(pixels), self.resize_to, self.interpolation)
        top, left = (_half(side - self.size) for side in pixels.shape[-2:])
        return cut(pixels, top, left, self.size)


def train_transform(
    im_size: int,
    crop: str,
    crop_scale: Sequence[float] = (0.08, 1.0),
    crop_padding: int = 4,
    flip: float = 0.5,
    crop_ratio: Sequence[float] = RATIO,
    interpolation: str = "bilinear",
) -> ResizedCrop | PaddedCrop:
    """Return the training transform, ResizedCrop for the crop "resized" and PaddedCrop for "pad"."""
    if crop == "resized":
        return ResizedCrop(im_size, crop_scale, flip, crop_ratio, interpolation)
    return PaddedCrop(im_size, crop_padding, flip, interpolation)


def resized_box(
    draws: SampleRNG, height: int, width: int, scale: Sequence[float], ratios: Sequence[float] = RATIO
) -> Box:
    """Return a box of random place, area (a share of the image's, uniform) and aspect ratio (log-uniform).

    After ATTEMPTS that do not fit, it is the largest box of an allowed ratio in the middle.
    """
    down, right = draws.uniform(), draws.uniform()
    for _ in range(ATTEMPTS):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * draws.uniform())
        ratio = math.exp(math.log(ratios[0]) + (math.log(ratios[1]) - math.log(ratios[0])) * draws.uniform())
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top, left = int(down * (height - box_height + 1)), int(right * (width - box_width + 1))
            return Box(top, left, box_height, box_width)
    box_width = max(1, min(width, round(height * ratios[1])))
    box_height = max(1, min(height, round(width / ratios[0])))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def padded_corner(draws: SampleRNG | BatchRNG, height: int, width: int, size: int, padding: int) -> tuple:
    """Return the top left corner of a random square of `size` in an image with so much padding; may be negative."""
    down, right = draws.uniform(), draws.uniform()
    room_down, room_right = (side + 2 * padding - size + 1 for side in (height, width))
    return down * room_down // 1 - padding, right * room_right // 1 - padding


def resize(pixels: torch.Tensor, height: int, width: int, interpolation: str = "bilinear") -> torch.Tensor:
    """Return uint8 (..., C, height, width), "bilinear" or "bicubic", with antialias where it becomes smaller."""
    if tuple(pixels.shape[-2:]) == (height, width):
        return pixels
    # The batch is made of (H, W, C), or torch does not see that channels lie side by side, and takes 1.6 x as long.
    batch = pixels if pixels.ndim == 4 else pixels.movedim(0, -1).unsqueeze(0).movedim(-1, 1)
    if batch.device.type == "cpu":
        resized = interpolate(batch, (height, width), mode=interpolation, antialias=True)
    else:  # bytes can be resized on the CPU only
        resized = interpolate(batch.float(), (height, width), mode=interpolation, antialias=True)
        resized = resized.round_().clamp_(0, 255).to(torch.uint8)
    return resized if pixels.ndim == 4 else resized[0]


def resize_shorter(pixels: torch.Tensor, size: int, interpolation: str = "bilinear") -> torch.Tensor:
    """Return the images with their shorter side resized to `size`, the longer one in proportion, rounded down."""
    height, width = pixels.shape[-2:]
    if height <= width:
        return resize(pixels, size, max(size, int(size * width / height)), interpolation)
    return resize(pixels, max(size, int(size * height / width)), size, interpolation)


def cut(pixels: torch.Tensor, top: int, left: int, size: int) -> torch.Tensor:
    """Return a square of images, black where it reaches beyond them: uint8 (..., C, size, size)."""
    height, width = pixels.shape[-2:]
    below, right = top + size - height, left + size - width
    inside = pixels[..., max(0, top) : max(0, top + size), max(0, left) : max(0, left + size)]
    missing = [min(size, max(0, edge)) for edge in (-left, right, -top, below)]
    return pad(inside, missing) if any(missing) else inside


def without_ends(pixels: torch.Tensor) -> torch.Tensor:
    """Return the middle of a strip of more than LONGEST_STRIP times its shorter side; other images as they are."""
    height, width = pixels.shape[-2:]
    top, left = max(0, height - LONGEST_STRIP * width) // 2, max(0, width - LONGEST_STRIP * height) // 2
    return pixels[..., top : height - top, left : width - left]


def _half(room: int) -> int:
    """Return half of the room around a centre crop as torchvision rounds it; where there is none, a negative margin."""
    return round(room / 2) if room >= 0 else -(-room // 2)
