"""Crops and resizing that options ask for: squash and letterbox, of the whole image; pad; and OpenCV's resizing."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding_bag, interpolate

from distribuuuu.config.derived import Size, height_and_width, show_size
from distribuuuu.data.decode import LazyImage
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import (
    ATTEMPTS,
    CenterCrop,
    ResizedCrop,
    Transform,
    crop_box,
    crop_center,
    crop_ends,
    draw_flips,
    flip_each,
    random_resized_box,
    resize,
    resize_to_cover,
    resized_size,
    show_cover,
    show_flips,
)


@dataclass(frozen=True)
class WholeImage(Transform):
    """The whole image, resized and randomly flipped; for evaluation, without flips.

    Attributes:
        mode: "squash": resized to `size`; "letterbox": resized to the largest size within `size` that has the aspect
            ratio of the image, and centered between black borders.
        flip, vflip: probability of a horizontal and of a vertical flip.
    """

    size: Size
    mode: str
    flip: float = 0.0
    interpolation: str = "bilinear"
    vflip: float = 0.0

    def __str__(self) -> str:
        flips = f", {show_flips(self)}" if self.flip or self.vflip else ""
        return f"{self.mode} {show_size(self.size)} px, {self.interpolation}{flips}"

    @property
    def resize_to(self) -> Size:
        """The size of the output."""
        return self.size

    def __call__(self, image: LazyImage, rng: SampleRNG) -> torch.Tensor:
        flips = draw_flips(rng, self)
        return flip_each(self.crop(image.pixels()), *flips)

    def crop(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return images of one size, resized: uint8 (..., C, height, width)."""
        size = resized_size(self.mode, pixels.shape[-2:], self.size)
        return crop_center(resize(pixels, *size, self.interpolation), self.size)


# Crops of evaluation images.
EvalCrop = CenterCrop | WholeImage


@dataclass(frozen=True)
class PaddedCrop(Transform):
    """A random crop of the padded image, randomly flipped (He et al., arXiv 1512.03385).

    Attributes:
        size: of the output, see `Transform`; an image is first resized to the smallest size that covers it.
        padding: pixels on each side.
        flip, vflip: probability of a horizontal and of a vertical flip.
        mode: content of the padding, "zeros" or "reflect"; the latter needs a padding smaller than the sides of `size`.
    """

    size: Size
    padding: int = 4
    flip: float = 0.5
    interpolation: str = "bilinear"
    vflip: float = 0.0
    mode: str = "zeros"

    def __str__(self) -> str:
        padding = f"padding {self.padding} px{' (reflect)' if self.mode == 'reflect' else ''}"
        return f"{show_cover(self.size)}, {padding}, random crop {show_size(self.size)} px, {show_flips(self)}"

    def __call__(self, image: LazyImage, rng: SampleRNG) -> torch.Tensor:
        is_flipped, is_vflipped = draw_flips(rng, self)
        pixels = self.crop(image.pixels())
        height, width = pixels.shape[-2:]
        top, left = random_padded_corner(rng, height, width, self.size, self.padding)
        crop = reflect_box if self.mode == "reflect" else crop_box
        return flip_each(crop(pixels, int(top), int(left), self.size), is_flipped, is_vflipped)

    def crop(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return images of one size before the padding: uint8 (..., C, H, W)."""
        return resize_to_cover(crop_ends(pixels), self.size, self.interpolation)


def random_padded_corner(rng: Any, height: int, width: int, size: Size, padding: int) -> tuple:
    """Return the top left corner of a random box of `size` in the padded image; negative inside the padding."""
    down, right = rng.uniform(), rng.uniform()
    sides = zip((height, width), height_and_width(size), strict=True)
    room_down, room_right = (side + 2 * padding - crop + 1 for side, crop in sides)
    return down * room_down // 1 - padding, right * room_right // 1 - padding


def random_resized_boxes(rng: SampleRNG, height: int, width: int, crop: ResizedCrop) -> np.ndarray:
    """Return the `random_resized_box` of many images of one size: int64 (4, N), top, left, height and width."""
    place, (low, high) = np.array([rng.uniform(), rng.uniform()]), map(math.log, crop.ratio)
    largest = random_resized_box(SampleRNG(0, 0), height, width, (4.0, 4.0), crop.ratio)  # no area of 4 fits
    boxes, missing = np.tile(np.array(largest)[:, None], len(place[0])), np.arange(len(place[0]))
    for _ in range(ATTEMPTS):
        states, rng._state = rng._state, rng._state[missing]  # the other images draw no more
        area = height * width * (crop.scale[0] + (crop.scale[1] - crop.scale[0]) * rng.uniform())
        aspect = np.exp(low + (high - low) * rng.uniform())
        states[missing], rng._state = rng._state, states
        sides = np.rint(np.sqrt([area / aspect, area * aspect]))
        gaps = [[height], [width]] - sides
        fits = ((sides > 0) & (gaps >= 0)).all(0)
        boxes[:, missing[fits]] = np.concatenate([place[:, missing] * (gaps + 1), sides])[:, fits]
        missing = missing[~fits]
    return boxes


def reflect_box(pixels: torch.Tensor, top: int, left: int, size: Size) -> torch.Tensor:
    """Return a box of the images, reflected where it extends beyond them: uint8 (..., C, height, width)."""
    sides = zip((top, left), height_and_width(size), pixels.shape[-2:], strict=True)
    rows, columns = (reflect(first + torch.arange(num, device=pixels.device), side) for first, num, side in sides)
    return pixels[..., rows[:, None], columns]


def reflect(positions: Any, side: int) -> Any:
    """Return positions of pixels, from 1 - side to 2 * side - 2, reflected at the borders 0 and side - 1."""
    return side - 1 - abs(side - 1 - abs(positions))


# ------------------------------------------------------------------------------ OpenCV's INTER_LINEAR and INTER_AREA


def resize_as_opencv(pixels: torch.Tensor, height: int, width: int, interpolation: str) -> torch.Tensor:
    """Return float32 (..., C, height, width), by "opencv_linear" or "opencv_area"."""
    if interpolation == "opencv_area":
        return _average(_average(pixels.float(), height, -2), width, -1)
    batch = pixels if pixels.ndim == 4 else pixels.movedim(0, -1).unsqueeze(0).movedim(-1, 1)
    resized = interpolate(batch.float(), (height, width), mode="bilinear")  # of uint8, torch would round down
    return resized if pixels.ndim == 4 else resized[0]


def _average(values: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Return float32 with `size` means along a dimension, each over an equal part, to which pixels count in part.

    E.g. from 5 pixels to 2 means, over [0, 2.5) and [2.5, 5): the pixels that each part may touch, and their shares.

        index   0    1    2    3        shares  0.4  0.4  0.2  0
                2    3    4    4 (5)            0.2  0.4  0.4  0
    """
    num = values.shape[dim]
    edges = torch.arange(size + 1, dtype=torch.float64) * num / size
    first, last = edges[:-1, None], edges[1:, None]
    index = first.floor() + torch.arange(num // size + 2)
    shares = (torch.minimum(last, index + 1) - torch.maximum(first, index)).clamp_(min=0) * size / num
    parts = (index.long().clamp_(max=num - 1), shares.float())
    index, shares = (part.to(values.device, non_blocking=True) for part in parts)
    rows = values.movedim(dim, 0)
    means = embedding_bag(index, rows.reshape(num, -1), mode="sum", per_sample_weights=shares)
    return means.view(size, *rows.shape[1:]).movedim(0, dim)
