"""Policies of AUG.POLICY, which change an image before the other augmentation: torchvision's and timm's."""

import re
from collections.abc import Callable, Sequence

from PIL import Image, ImageOps

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.derived import Size, height_and_width

# torchvision's policies: class name and arguments.
TORCHVISION_POLICIES = {
    "autoaugment": ("AutoAugment", {}),  # of ImageNet
    "randaugment": ("RandAugment", {"num_ops": 2, "magnitude": 9}),
    "trivialaugment": ("TrivialAugmentWide", {}),
}
# Checked here because timm ignores a setting without a number and an unknown set of operations.
TIMM_SETTINGS = {"rand": ("m", "n", "p", "mstd", "mmax", "inc"), "augmix": ("m", "w", "d", "a", "b", "mstd")}
TIMM_OPERATION_SETS = ("weights", "3a", "3aw")

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
        mean: per channel, in [0, 1]; timm's policies fill uncovered areas with it, torchvision's with black.
        im_size: side of the image in pixels, for timm's translations, which depend on the shorter side.
    """
    name, *settings = text.split("-")
    if settings and (name in ("none", "3augment") or name in TORCHVISION_POLICIES):
        raise ValueError(f"has settings, which {name} does not take")
    if name in TORCHVISION_POLICIES:
        from torchvision.transforms import v2

        class_name, options = TORCHVISION_POLICIES[name]
        return getattr(v2, class_name)(**options, interpolation=v2.InterpolationMode(interpolation))
    # DeiT III (arXiv 2204.07118): gray, solarized or blurred, equally likely; timm calls it "3a".
    text = "3a" if name == "3augment" else text
    return _make_timm_policy(text, interpolation, mean, min(height_and_width(im_size)))


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
