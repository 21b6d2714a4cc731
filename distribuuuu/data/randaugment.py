"""RandAugment (Cubuk et al., arXiv 1909.13719) with the operations and magnitudes of big_vision.

The figures are those of its pp/archive/autoaugment.py, a fork of TensorFlow's EfficientNet. It differs from the
versions of timm and torchvision: each drawn operation is applied, Cutout is one of 16, uncovered pixels become gray,
geometric operations take the nearest pixel, and distances do not depend on the size of the image. Two results of its
code that its names do not show are kept: Solarize at the maximum magnitude inverts all pixels, since the threshold 256
becomes 0 in a byte; and Contrast blends with a gray of (number of pixels) / 256 instead of the mean brightness.
"""

from collections.abc import Callable

import torch
from PIL import Image, ImageEnhance, ImageOps

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

ImageOp = Callable[[Image.Image], Image.Image]


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
OPERATIONS: dict[str, ImageOp] = {
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


def randaugment(image: Image.Image) -> Image.Image:
    """Apply NUM_OPERATIONS random operations, with replacement, each at the maximum magnitude."""
    names = list(OPERATIONS)
    for _ in range(NUM_OPERATIONS):
        image = OPERATIONS[names[int(torch.randint(len(names), ()))]](image)
    return image
