"""Policies of AUG.POLICY, which change an image before the other augmentation: torchvision's, timm's, big_vision's."""

import re
from collections.abc import Callable, Sequence

import torch
from PIL import Image, ImageEnhance, ImageOps

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.derived import Size, height_and_width
from distribuuuu.data.seeding import seeded_generators

# torchvision's policies: class name and arguments.
TORCHVISION_POLICIES = {
    "autoaugment": ("AutoAugment", {}),  # of ImageNet
    "randaugment": ("RandAugment", {"num_ops": 2, "magnitude": 9}),
    "trivialaugment": ("TrivialAugmentWide", {}),
}
# RandAugment as in big_vision's recipes.
BIG_VISION = "randaugment_big_vision"
# Checked here because timm ignores a setting without a number and an unknown set of operations.
TIMM_SETTINGS = {"rand": ("m", "n", "p", "mstd", "mmax", "inc"), "augmix": ("m", "w", "d", "a", "b", "mstd")}
TIMM_OPERATION_SETS = ("weights", "3a", "3aw")
# How often a policy of timm is tried before training.
_NUM_TRIALS = 4

ImageOp = Callable[[Image.Image], Image.Image]


def build_policy(cfg, mean: Sequence[float]) -> ImageOp:
    """Return the policy of a config; raise ConfigError if it is not understood."""
    interpolation = cfg.DATA.INTERPOLATION
    interpolation = "bilinear" if interpolation.startswith("opencv") else interpolation
    try:
        return make_policy(cfg.AUG.POLICY, interpolation, mean, cfg.TRAIN.IM_SIZE)
    except ValueError as error:
        raise ConfigError(Problem("AUG.POLICY", f"{cfg.AUG.POLICY!r} {error}"), cfg.origins) from error


def make_policy(text: str, interpolation: str, mean: Sequence[float], im_size: Size) -> ImageOp:
    """Return the policy of AUG.POLICY; raise ValueError, with the reason, if the text is not understood.

    Args:
        interpolation: of rotations and shears, "bilinear", "bicubic", or, for policies of timm, "random".
        mean: per channel, in [0, 1]; timm's policies fill uncovered areas with it, torchvision's with black, and
            big_vision's with gray.
        im_size: side of the image in pixels, for timm's translations, which depend on the shorter side.
    """
    name, *settings = text.split("-")
    if settings and (name in ("none", "3augment", BIG_VISION) or name in TORCHVISION_POLICIES):
        raise ValueError(f"has settings, which {name} does not take")
    if name == BIG_VISION:
        return randaugment
    if name in TORCHVISION_POLICIES:
        from torchvision.transforms import v2

        class_name, options = TORCHVISION_POLICIES[name]
        return getattr(v2, class_name)(**options, interpolation=v2.InterpolationMode(interpolation))
    # DeiT III (arXiv 2204.07118): gray, solarized or blurred, equally likely; timm calls it "3a".
    text = "3a" if name == "3augment" else text
    policy = _make_timm_policy(text, interpolation, mean, min(height_and_width(im_size)))
    try:
        for seed in range(_NUM_TRIALS):
            with seeded_generators(seed):
                policy(Image.new("RGB", height_and_width(im_size)[::-1]))
    except Exception as error:  # nearly anything, for numbers that make no sense
        raise ValueError(f"cannot be applied: {error}") from error
    return policy


def _make_timm_policy(text: str, interpolation: str, mean: Sequence[float], im_size: int) -> ImageOp:
    """Return timm's policy for a text, with the options of timm's training script."""
    from timm.data import auto_augment

    name, *settings = text.split("-")
    _check_timm_settings(name, settings)
    make = {"rand": auto_augment.rand_augment_transform, "augmix": auto_augment.augment_and_mix_transform}
    hparams = {
        "translate_const": int(im_size * 0.45),
        "img_mean": tuple(round(255 * value) for value in mean),
        **({"translate_pct": 0.3} if name == "augmix" else {}),
    }
    if interpolation != "random":  # timm's default
        hparams["interpolation"] = Image.Resampling[interpolation.upper()]
    try:
        policy = make.get(name, auto_augment.auto_augment_transform)(text, hparams)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"is rejected by timm: {error}") from error
    operations = policy.ops if hasattr(policy, "ops") else [op for several in policy.policy for op in several]
    for operation in operations:
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = _posterize
    return policy


def _check_timm_settings(name: str, settings: Sequence[str]) -> None:
    known = TIMM_SETTINGS.get(name, ("mstd",))
    for setting in settings:
        key = re.split(r"\d", setting, maxsplit=1)[0]
        if name == "rand" and setting.startswith("t"):
            if setting[1:] not in TIMM_OPERATION_SETS:
                raise ValueError(f"names no operations that timm knows: t{', t'.join(TIMM_OPERATION_SETS)}")
        elif key not in known or key == setting:
            allowed = [f"{word}NUMBER" for word in known] + (["tNAME"] if name == "rand" else [])
            raise ValueError(f"has a setting that timm does not know, {setting!r}; {name} takes {', '.join(allowed)}")


def _posterize(image: Image.Image, bits: int, **options) -> Image.Image:
    """Keep this many bits per channel; with 0 the result is black, as before Pillow 13, which rejects timm's 0 bits."""
    return ImageOps.posterize(image, min(bits, 8)) if bits > 0 else Image.new(image.mode, image.size)


# ----------------------------------------------------------------------------- big_vision's RandAugment

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
