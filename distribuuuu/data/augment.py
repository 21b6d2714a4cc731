"""What happens to a training image after its crop and flip: a policy, colour jitter, erasing.

All of it is torchvision's or timm's. They draw from global generators; what they get is seeded here from the draws of
the sample.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps

from distribuuuu.config import ConfigError, Problem
from distribuuuu.data.draws import SampleRNG
from distribuuuu.data.picture import Box, LazyImage
from distribuuuu.data.seeding import OwnGenerator, seeded_generators
from distribuuuu.data.transforms import PaddedCrop, ResizedCrop

# Share of the image that an erased rectangle takes, and its height over its width, least and greatest.
ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = (0.3, 3.3)
# Names of torchvision's policies, and their classes and settings.
TORCHVISIONS = {
    "autoaugment": ("AutoAugment", {}),  # of ImageNet
    "randaugment": ("RandAugment", {"num_ops": 2, "magnitude": 9}),
    "trivialaugment": ("TrivialAugmentWide", {}),
}
# timm passes over a setting without a number and over an unknown set of operations, so these are checked here.
SETTINGS = {"rand": ("m", "n", "p", "mstd", "mmax", "inc"), "augmix": ("m", "w", "d", "a", "b", "mstd")}
RAND_SETS = ("weights", "3a", "3aw")
# A policy of timm's is tried so often before the start.
TRIALS = 4

Change = Callable[[Image.Image], Image.Image]


@dataclass(frozen=True)
class Policy:
    """A random change of an image, and the context that seeds what it draws.

    torchvision draws with torch, in any number of threads at a time; timm with numpy and random, one after the other.
    """

    change: Change
    seeded: Callable[[int], contextlib.AbstractContextManager]

    def __call__(self, image: Image.Image, seed: int) -> Image.Image:
        """Return the changed image; a function of the image and the seed."""
        with self.seeded(seed):
            return self.change(image)


@dataclass(frozen=True)
class Augmented:
    """A crop, and what comes after it, of a picture on the CPU.

    Attributes:
        crop: gives uint8 (3, H, W), flipped or not.
        policy: comes next; None: nothing.
        jitter: then the colours; None: nothing.
        erase: then a rectangle, of uint8 (3, H, W); None: nothing.
    """

    crop: ResizedCrop | PaddedCrop
    policy: Policy | None = None
    jitter: Change | None = None
    erase: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __call__(self, picture: LazyImage, draws: SampleRNG) -> torch.Tensor:
        """Return uint8 (3, H, W)."""
        pixels = self.crop(picture, draws)
        policy_seed, colour_seed, place_seed = draws.seed(), draws.seed(), draws.seed()
        if self.policy or self.jitter:
            image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
            if self.policy:
                image = self.policy(image, policy_seed)
            if self.jitter:
                with OwnGenerator(colour_seed):
                    image = self.jitter(image)
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        if self.erase:
            with OwnGenerator(place_seed):
                pixels = self.erase(pixels)
        return pixels

    def at_size(self, size: int) -> "Augmented":
        """Return the same for results of another size."""
        return dataclasses.replace(self, crop=self.crop.at_size(size))


@dataclass(frozen=True)
class Erasing:
    """A rectangle erased at random (Zhong et al., arXiv 1708.04896), its place and size drawn by torchvision.

    Attributes:
        probability: of an image to lose one.
        mean: colour of the rectangle, of 1.0.
        std: of normal noise around it, of 1.0, clipped to what bytes hold; None: no noise.
    """

    probability: float
    mean: Sequence[float]
    std: Sequence[float] | None = None

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return uint8 (3, H, W), made from uint8 (3, H, W), which stays what it is."""
        from torchvision.transforms import RandomErasing

        if torch.rand(()) >= self.probability:
            return pixels
        colour = None if self.std else list(self.mean)
        *box, value = RandomErasing.get_params(pixels, ERASED_AREA, ERASED_RATIO, colour)
        if value is pixels:  # nothing fitted into the image
            return pixels
        if self.std:
            mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
            value = mean + std * value
        erased = pixels.clone()
        Box(*box).of(erased)[:] = (value * 255).round().clamp(0, 255).to(torch.uint8)
        return erased


def build_augmentation(
    cfg, crop: ResizedCrop | PaddedCrop, mean: Sequence[float], std: Sequence[float]
) -> Augmented | ResizedCrop | PaddedCrop:
    """Return the crop with what the config puts after it; the crop itself when that is nothing.

    Args:
        cfg: the config.
        crop: crop and flip.
        mean, std: of each channel, of 1.0, as images are normalised.

    Raises:
        ConfigError: AUG.POLICY is not understood.
    """
    aug = cfg.AUG
    try:
        policy = make_policy(aug.POLICY, cfg.DATA.INTERPOLATION, mean, cfg.TRAIN.IM_SIZE)
    except ValueError as error:
        raise ConfigError(Problem("AUG.POLICY", f"{aug.POLICY!r} {error}"), cfg.origins) from error
    jitter = make_jitter(aug.COLOR_JITTER) if any(aug.COLOR_JITTER) else None
    noise = tuple(std) if aug.ERASING_MODE == "pixel" else None
    erase = Erasing(aug.ERASING, tuple(mean), noise) if aug.ERASING else None
    return Augmented(crop, policy, jitter, erase) if policy or jitter or erase else crop


def make_jitter(strengths: Sequence[float]) -> Change:
    """Return the jitter of brightness, contrast, saturation and, if there are four strengths, hue, in random order."""
    from torchvision.transforms import v2

    return v2.ColorJitter(*(strengths if len(strengths) > 1 else [strengths[0]] * 3))


def make_policy(text: str, interpolation: str, mean: Sequence[float], im_size: int) -> Policy | None:
    """Return the policy that AUG.POLICY names; None for "none".

    Args:
        text: the name, with the settings of one of timm's.
        interpolation: how images are turned and sheared, "bilinear" or "bicubic".
        mean: of each channel, of 1.0; the colour of what timm's policies uncover. torchvision's leave it black.
        im_size: side of the image in pixels, for timm's shifts.

    Raises:
        ValueError: it is not understood; says why.
    """
    name, *settings = text.split("-")
    if settings and (name in ("none", "3augment") or name in TORCHVISIONS):
        raise ValueError(f"has settings, which {name} does not take")
    if name == "none":
        return None
    if name in TORCHVISIONS:
        from torchvision.transforms import v2

        kind, options = TORCHVISIONS[name]
        return Policy(getattr(v2, kind)(**options, interpolation=v2.InterpolationMode(interpolation)), OwnGenerator)
    # DeiT III (arXiv 2204.07118): grey, solarized or blurred, one as likely as the other; its code is timm's "3a".
    change = _make_timms("3a" if name == "3augment" else text, interpolation, mean, im_size)
    policy = Policy(change, seeded_generators)
    try:
        for seed in range(TRIALS):
            policy(Image.new("RGB", (im_size, im_size)), seed)
    except Exception as error:  # nearly anything, for numbers that make no sense
        raise ValueError(f"cannot be applied: {error}") from error
    return policy


def _make_timms(text: str, interpolation: str, mean: Sequence[float], im_size: int) -> Change:
    """Return the policy that timm makes of a text, with the options that timm's own training script gives."""
    from timm.data import auto_augment

    name, *settings = text.split("-")
    make = {"rand": auto_augment.rand_augment_transform, "augmix": auto_augment.augment_and_mix_transform}
    known = SETTINGS.get(name, ("mstd",))
    for setting in settings:
        key, number = re.fullmatch(r"(\D*)(.*)", setting).groups()
        if name == "rand" and setting.startswith("t"):
            if setting[1:] not in RAND_SETS:
                raise ValueError(f"names no operations that timm knows: t{', t'.join(RAND_SETS)}")
        elif key not in known or not number:
            allowed = ", ".join([f"{word}NUMBER" for word in known] + ["tNAME"] * (name == "rand"))
            raise ValueError(f"has a setting that timm does not know, {setting!r}; {name} takes {allowed}")
    hparams = {
        "translate_const": int(im_size * 0.45),
        "img_mean": tuple(round(255 * value) for value in mean),
        "interpolation": Image.Resampling[interpolation.upper()],
        **({"translate_pct": 0.3} if name == "augmix" else {}),
    }
    try:
        change = make.get(name, auto_augment.auto_augment_transform)(text, hparams)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"is refused by timm: {error}") from error
    operations = change.ops if hasattr(change, "ops") else [op for several in change.policy for op in several]
    for operation in operations:
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = _posterize
    return change


def _posterize(image: Image.Image, bits: int, **options) -> Image.Image:
    """Keep so many bits of each channel; none leaves black, as it was until Pillow 13, which refuses timm's 0 bits."""
    return ImageOps.posterize(image, min(bits, 8)) if bits > 0 else Image.new(image.mode, image.size)
