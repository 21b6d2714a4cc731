"""Crops that keep the whole image: DATA.CROP and TEST.CROP squash and letterbox."""

from dataclasses import dataclass

import torch

from distribuuuu.config.derived import Size, show_size
from distribuuuu.data.decode import LazyImage
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import (
    CenterCrop,
    Transform,
    center_corner,
    crop_center,
    draw_flips,
    flip_each,
    record_geometry,
    resize,
    resized_size,
    show_flips,
)


@dataclass(frozen=True)
class WholeImage(Transform):
    """The whole image, resized and randomly flipped; for evaluation, without flips.

    Attributes:
        size: of the output, see `Transform`.
        mode: "squash": resized to `size`; "letterbox": resized to the largest size within `size` that has the aspect
            ratio of the image, and centered between black borders.
        flip, vflip: probability of a horizontal and of a vertical flip.
        interpolation: see `resize`.
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
        flips, resized = draw_flips(rng, self), resized_size(self.mode, image.size, self.size)
        record_geometry(rng, image, resized, center_corner(resized, self.size), self.size, flips, ends=False)
        return flip_each(self.crop(image.pixels()), *flips)

    def crop(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return images of one size, resized: uint8 (..., C, height, width)."""
        size = resized_size(self.mode, pixels.shape[-2:], self.size)
        return crop_center(resize(pixels, *size, self.interpolation), self.size)


# Crops of evaluation images.
EvalCrop = CenterCrop | WholeImage
