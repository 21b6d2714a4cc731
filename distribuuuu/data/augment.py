"""Augmentation of a training image after its crop and flip: policy, color jitter, registered operations, erasing.

Policies and jitter are torchvision's, timm's or big_vision's. They draw from global generators, which are seeded here
from the random numbers of the sample. To add an operation, see `AugmentedCrop.operations`.
"""

import contextlib
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image, ImageOps

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.derived import Size, height_and_width
from distribuuuu.config.options import PIXEL_RANGES
from distribuuuu.config.registry import AUGMENTATIONS
from distribuuuu.data.decode import Box, LazyImage
from distribuuuu.data.randaugment import randaugment
from distribuuuu.data.seeding import BatchRNG, SampleRNG, seeded_generators, seeded_torch
from distribuuuu.data.transforms import BatchTransform, Transform, to_uint8
from distribuuuu.launch.host import copy_to_device

# Least and greatest fraction of the image that an erased rectangle covers; by AUG.ERASING_MODE, its height over its
# width, as in torchvision and in timm.
ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = {"const": (0.3, 3.3), "pixel": (0.3, 1 / 0.3)}
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
PixelOp = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Policy:
    """A random operation on an image, and the context that seeds its generators.

    torchvision and big_vision's policy draw with torch, in many threads at a time; timm draws with numpy and random,
    one thread at a time.
    """

    operation: ImageOp
    seeded: Callable[[int], contextlib.AbstractContextManager]

    def __call__(self, image: Image.Image, seed: int) -> Image.Image:
        """Return the changed image, a function of the image and the seed."""
        with self.seeded(seed):
            return self.operation(image)


@dataclass(frozen=True)
class AugmentedCrop(Transform):
    """A crop on the CPU followed by augmentation.

    Attributes:
        crop: returns uint8 (3, H, W), randomly flipped.
        policy: applied next; None: skipped.
        jitter: of the colors, applied next; None: skipped.
        operations: applied next, in this order; from uint8 (3, H, W) to the same. What they draw from torch, numpy or
            random is seeded per sample. A function of any module of this package becomes available to AUG.OPERATIONS
            under its name by the decorator `@AUGMENTATIONS.register`.
        erase: applied last, to uint8 (3, H, W); None: skipped.
    """

    crop: Transform
    policy: Policy | None = None
    jitter: ImageOp | None = None
    operations: tuple[PixelOp, ...] = ()
    erase: PixelOp | None = None

    def __str__(self) -> str:
        return str(self.crop)

    @property
    def size(self) -> Size:  # type: ignore[override]  # not set, but that of the crop
        """The size of the output, see `Transform`."""
        return self.crop.size

    def __call__(self, image: LazyImage, rng: SampleRNG) -> torch.Tensor:
        pixels = self.crop(image, rng)
        try:
            return self._augmented(pixels, rng)
        except (ConfigError, MemoryError):
            raise
        except Exception as error:  # not the image's fault, but that of an operation
            frames = traceback.extract_tb(error.__traceback__)
            place = next((frame for frame in frames if frame.filename != __file__), frames[-1])
            where = f"in {place.name}, {place.filename}, line {place.lineno}"
            raise ConfigError(f"AUG: the augmentation failed {where}: {type(error).__name__}: {error}") from error

    def _augmented(self, pixels: torch.Tensor, rng: SampleRNG) -> torch.Tensor:
        policy_seed, jitter_seed, erase_seed = rng.seed(), rng.seed(), rng.seed()
        if self.policy or self.jitter:
            pil_image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
            if self.policy:
                pil_image = self.policy(pil_image, policy_seed)
            if self.jitter:
                with seeded_torch(jitter_seed):
                    pil_image = self.jitter(pil_image)
            pixels = torch.from_numpy(np.array(pil_image)).permute(2, 0, 1)
        for operation in self.operations:
            with seeded_generators(rng.seed()):
                pixels = operation(pixels)
        if self.erase:
            with seeded_torch(erase_seed):
                pixels = self.erase(pixels)
        return pixels

    def at_size(self, size: Size) -> "AugmentedCrop":
        """Return the same transform with an output of another size."""
        return replace(self, crop=self.crop.at_size(size))


class ErasedCrop(AugmentedCrop, BatchTransform):
    """A crop followed by erasing only, which many images of one size take together, on any device."""

    def transform_batch(self, pixels: torch.Tensor, rng: BatchRNG) -> torch.Tensor:
        """Return uint8 (N, 3, height, width) from (N, C, H, W); the rectangles are drawn on the CPU."""
        assert isinstance(self.crop, BatchTransform) and isinstance(self.erase, Erasing)
        cropped = self.crop.transform_batch(pixels, rng)
        *_, seeds = rng.seed(), rng.seed(), rng.seed()
        return self.erase.erase_batch(cropped.expand(-1, len(self.erase.mean), -1, -1), seeds.tolist())


@AUGMENTATIONS.register
def grayscale(pixels: torch.Tensor) -> torch.Tensor:
    """Convert one image in five to gray, as SimCLR does (Chen et al., arXiv 2002.05709)."""
    from torchvision.transforms.v2 import functional

    return functional.rgb_to_grayscale(pixels, 3) if torch.rand(()) < 0.2 else pixels


# Principal components of ImageNet's colors: in the rows red, green and blue, each column scaled by its deviation.
_COLOR_AXES = torch.tensor([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
_COLOR_AXES = _COLOR_AXES * torch.tensor([0.2175, 0.0188, 0.0045])


@AUGMENTATIONS.register
def pca_noise(pixels: torch.Tensor) -> torch.Tensor:
    """Add normal noise of deviation 0.1 along the principal components of the colors, one draw for an image.

    Krizhevsky et al., NeurIPS 2012; deviation and components as in pycls and fb.resnet.torch.
    """
    noise = _COLOR_AXES @ torch.randn(3) * 0.1 * 255
    return to_uint8(pixels + noise.view(3, 1, 1))


@dataclass(frozen=True)
class Erasing:
    """Random erasing (Zhong et al., arXiv 1708.04896); torchvision draws the rectangle.

    Attributes:
        probability: that an image loses a rectangle.
        mean: color of the rectangle, in units of `one`.
        std: of normal noise around it, in units of `one`, of uint8 clipped to its range; None: no noise.
        one: the value of a pixel that counts as 1, see PIXEL_RANGES.
    """

    probability: float
    mean: Sequence[float]
    std: Sequence[float] | None = None
    one: float = 255

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return (C, H, W) from (C, H, W), which is not modified."""
        drawn = self.draw(pixels.shape[1:])
        if not drawn:
            return pixels
        erased = pixels.clone()
        box, values = drawn
        box.crop(erased)[:] = copy_to_device(values, pixels.device)
        return erased

    def erase_batch(self, pixels: torch.Tensor, seeds: Iterable[int]) -> torch.Tensor:
        """Return (N, C, H, W) from the same on any device; each image as from a call that its seed precedes."""
        values, is_erased = torch.zeros(pixels.shape, dtype=pixels.dtype), torch.zeros(pixels.shape, dtype=torch.bool)
        for row, seed in enumerate(seeds):
            with seeded_torch(seed):
                drawn = self.draw(pixels.shape[2:])
            if drawn:
                box, color = drawn
                box.crop(values[row])[:] = color
                box.crop(is_erased[row])[:] = True
        is_erased, values = copy_to_device(is_erased, pixels.device), copy_to_device(values, pixels.device)
        return torch.where(is_erased, values, pixels)

    def draw(self, size: Sequence[int]) -> tuple[Box, torch.Tensor] | None:
        """Return the rectangle in an image of (H, W) and its values; None: the image stays as it is."""
        from torchvision.transforms import RandomErasing

        if torch.rand(()) >= self.probability:
            return None
        image = torch.empty(()).expand(len(self.mean), *size)
        color = None if self.std else list(self.mean)
        ratio = ERASED_RATIO["pixel" if self.std else "const"]
        *box, value = RandomErasing.get_params(image, ERASED_AREA, ratio, color)
        if value is image:  # no rectangle fitted into the image
            return None
        if self.std:
            mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
            value = mean + std * value
        return Box(*box), to_uint8(value * self.one) if self.one == PIXEL_RANGES["uint8"] else value * self.one


def build_augmentation(cfg, crop: Transform, mean: Sequence[float], std: Sequence[float]) -> Transform:
    """Return the crop followed by the config's augmentation; the crop itself if there is none.

    Args:
        cfg: the config.
        crop: crop and flip.
        mean, std: per channel, in [0, 1], as images are normalized.

    Raises:
        ConfigError: AUG.POLICY is not understood.
    """
    aug = cfg.AUG
    try:
        interpolation = cfg.DATA.INTERPOLATION
        interpolation = "bilinear" if interpolation.startswith("opencv") else interpolation
        policy = make_policy(aug.POLICY, interpolation, mean, cfg.TRAIN.IM_SIZE)
    except ValueError as error:
        raise ConfigError(Problem("AUG.POLICY", f"{aug.POLICY!r} {error}"), cfg.origins) from error
    jitter = make_jitter(aug.COLOR_JITTER) if any(aug.COLOR_JITTER) else None
    operations = tuple(AUGMENTATIONS.get(name) for name in aug.OPERATIONS)
    noise = tuple(std) if aug.ERASING_MODE == "pixel" else None
    erase = Erasing(aug.ERASING, tuple(mean), noise, PIXEL_RANGES[cfg.DATA.PIXELS]) if aug.ERASING else None
    if not (policy or jitter or operations or erase):
        return crop
    is_erased_only = isinstance(crop, BatchTransform) and not (policy or jitter or operations)
    return (ErasedCrop if is_erased_only else AugmentedCrop)(crop, policy, jitter, operations, erase)


def make_jitter(strengths: Sequence[float]) -> ImageOp:
    """Return the jitter of brightness, contrast, saturation and, with four strengths, hue, in random order."""
    from torchvision.transforms import v2

    return v2.ColorJitter(*(strengths if len(strengths) > 1 else [strengths[0]] * 3))


def make_policy(text: str, interpolation: str, mean: Sequence[float], im_size: Size) -> Policy | None:
    """Return the policy of AUG.POLICY; None for "none".

    Args:
        text: the name, with the settings of a policy of timm.
        interpolation: of rotations and shears, "bilinear", "bicubic", or, for policies of timm, "random".
        mean: per channel, in [0, 1]; timm's policies fill uncovered areas with it, torchvision's with black, and
            big_vision's with gray.
        im_size: side of the image in pixels, for timm's translations, which depend on the shorter side.

    Raises:
        ValueError: it is not understood; says why.
    """
    name, *settings = text.split("-")
    if settings and (name in ("none", "3augment", BIG_VISION) or name in TORCHVISION_POLICIES):
        raise ValueError(f"has settings, which {name} does not take")
    if name == "none":
        return None
    if name == BIG_VISION:
        return Policy(randaugment, seeded_torch)
    if name in TORCHVISION_POLICIES:
        from torchvision.transforms import v2

        class_name, options = TORCHVISION_POLICIES[name]
        policy_class = getattr(v2, class_name)
        return Policy(policy_class(**options, interpolation=v2.InterpolationMode(interpolation)), seeded_torch)
    # DeiT III (arXiv 2204.07118): gray, solarized or blurred, equally likely; timm calls it "3a".
    text = "3a" if name == "3augment" else text
    operation = _make_timm_policy(text, interpolation, mean, min(height_and_width(im_size)))
    policy = Policy(operation, seeded_generators)
    try:
        for seed in range(_NUM_TRIALS):
            policy(Image.new("RGB", height_and_width(im_size)[::-1]), seed)
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
