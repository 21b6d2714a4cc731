"""Augmentation of a training image after its crop and flip: policy, color jitter, registered operations, erasing.

Policies and jitter are torchvision's, timm's or big_vision's. They draw from global generators, which are seeded here
from the random numbers of the sample. To add an operation, see `AugmentedCrop.operations`.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from distribuuuu.config import ConfigError
from distribuuuu.config.derived import Size
from distribuuuu.config.options import PIXEL_RANGES
from distribuuuu.config.registry import AUGMENTATIONS
from distribuuuu.data.decode import Box, LazyImage
from distribuuuu.data.seeding import SampleRNG, locked_generators, seeded_generators
from distribuuuu.data.transforms import Transform, to_uint8

# Least and greatest fraction of the image that an erased rectangle covers; by AUG.ERASING_MODE, its height over its
# width, as in torchvision and in timm.
ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = {"const": (0.3, 3.3), "pixel": (0.3, 1 / 0.3)}
# How often torchvision draws a rectangle until one fits into the image.
_ATTEMPTS = 10
ImageOp = Callable[[Image.Image], Image.Image]
PixelOp = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class AugmentedCrop(Transform):
    """A crop on the CPU followed by augmentation.

    Attributes:
        crop: returns uint8 (3, H, W), randomly flipped.
        policy: of images of PIL, applied next; None: skipped.
        jitter: of the colors, applied next; None: skipped.
        operations: applied next, in this order; from uint8 (3, H, W) to the same. What they draw from torch, numpy or
            random is seeded per sample. A function of any module of this package becomes available to AUG.OPERATIONS
            under its name by the decorator `@AUGMENTATIONS.register`.
        erase: applied last, to uint8 (3, H, W); None: skipped.
    """

    crop: Transform
    policy: ImageOp | None = None
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
                with seeded_generators(policy_seed):
                    pil_image = self.policy(pil_image)
            if self.jitter:
                with _seeded_torch(jitter_seed):
                    pil_image = self.jitter(pil_image)
            pixels = torch.from_numpy(np.array(pil_image)).permute(2, 0, 1)
        for operation in self.operations:
            with seeded_generators(rng.seed()):
                pixels = operation(pixels)
        if self.erase:
            with _seeded_torch(erase_seed):
                pixels = self.erase(pixels)
        return pixels

    def at_size(self, size: Size) -> "AugmentedCrop":
        """Return the same transform with an output of another size."""
        return replace(self, crop=self.crop.at_size(size))


@contextlib.contextmanager
def _seeded_torch(seed: int) -> Iterator[None]:
    """Seed torch's generator alone within the block: to restore those of numpy and random takes ten times as long."""
    with locked_generators(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


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
        from torchvision.transforms import RandomErasing

        if torch.rand(()) >= self.probability:
            return pixels
        image = torch.empty(()).expand(len(self.mean), *pixels.shape[1:])
        ratio = ERASED_RATIO["pixel" if self.std else "const"]
        *box, value = RandomErasing.get_params(image, ERASED_AREA, ratio, None if self.std else list(self.mean))
        if value is image:  # no rectangle fitted into the image
            return pixels
        if self.std:
            mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
            value = mean + std * value
        erased = pixels.clone()
        Box(*box).crop(erased)[:] = self._to_pixels(value)
        return erased

    def _to_pixels(self, value: torch.Tensor) -> torch.Tensor:
        return to_uint8(value * self.one) if self.one == PIXEL_RANGES["uint8"] else value * self.one

    @property
    def color(self) -> torch.Tensor:
        """The color of the rectangle: (C, 1, 1)."""
        return self._to_pixels(torch.tensor(self.mean).view(-1, 1, 1))

    def rectangles(self, rng: SampleRNG, height: int, width: int) -> np.ndarray:
        """Return the rectangles in many images of one size: int64 (4, N), the first row and the one after the last,
        likewise the columns; empty in images that stay as they are.

        They are those of a call for each image after the same numbers of `rng`, which torchvision draws from
        generators that are seeded for the image: `torch_words` returns what these would return.
        """
        seeds = [rng.uniform() for _ in range(3)][-1] * 2**53  # of the policy, the jitter and the rectangle
        word = torch_words(seeds.astype(np.uint64), 3 + 2 * _ATTEMPTS)

        def uniform(number: int, images: Any, low: float, high: float) -> np.ndarray:
            unit = (word(number, images) & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)
            return unit * (np.float32(high) - np.float32(low)) + np.float32(low)

        boxes, log_ratio = np.zeros((4, len(seeds)), np.int64), torch.tensor(ERASED_RATIO["const"]).log().tolist()
        missing = np.flatnonzero(uniform(0, slice(None), 0, 1) < np.float32(self.probability))
        for number in range(1, 1 + 2 * _ATTEMPTS, 2):
            area = height * width * uniform(number, missing, *ERASED_AREA).astype(np.float64)
            logarithm = torch.from_numpy(uniform(number + 1, missing, *log_ratio))
            ratio = logarithm.exp().numpy().astype(np.float64)
            rows, columns = (np.rint(np.sqrt(square)).astype(np.int64) for square in (area * ratio, area / ratio))
            fits = (rows < height) & (columns < width)
            found, rows, columns = missing[fits], rows[fits], columns[fits]
            down, across = (word(number + ahead, found).astype(np.int64) for ahead in (2, 3))
            top, left = down % (height - rows + 1), across % (width - columns + 1)
            boxes[:, found] = top, top + rows, left, left + columns
            missing = missing[~fits]
        return boxes


def torch_words(seeds: np.ndarray, num: int) -> Callable[[int, Any], np.ndarray]:
    """Return a function from a position below `num`, at most 227, to the number there of torch's CPU generator after
    each of some seeds: uint32 (N,). It is the Mersenne Twister (Matsumoto and Nishimura, ACM TOMACS 1998).
    """
    row = seeds.astype(np.uint32)  # their lower 32 bits
    rows, high = {0: row.copy()}, np.empty_like(row)
    for number in range(1, 397 + num):
        row ^= np.right_shift(row, 30, out=high)
        row *= 1812433253
        row += number
        if number <= num or number >= 397:
            rows[number] = row.copy()

    def word(number: int, chosen: Any) -> np.ndarray:
        first, following, far = (rows[number + ahead][chosen] for ahead in (0, 1, 397))
        joined = (first & 0x80000000) | (following & 0x7FFFFFFF)
        bits = far ^ (joined >> 1) ^ ((following & 1) * 0x9908B0DF)
        bits ^= bits >> 11
        bits ^= (bits << 7) & 0x9D2C5680
        bits ^= (bits << 15) & 0xEFC60000
        return bits ^ (bits >> 18)

    return word


def build_augmentation(cfg, crop: Transform, mean: Sequence[float], std: Sequence[float]) -> Transform:
    """Return a crop followed by the config's augmentation; raise ConfigError if AUG.POLICY is not understood.

    The mean and the deviation are those of normalization, per channel, in [0, 1].
    """
    aug = cfg.AUG
    policy = None
    if aug.POLICY != "none":
        from distribuuuu.data.policies import build_policy

        policy = build_policy(cfg, mean)
    jitter = make_jitter(aug.COLOR_JITTER) if any(aug.COLOR_JITTER) else None
    operations = tuple(AUGMENTATIONS.get(name) for name in aug.OPERATIONS)
    noise = tuple(std) if aug.ERASING_MODE == "pixel" else None
    erase = Erasing(aug.ERASING, tuple(mean), noise, PIXEL_RANGES[cfg.DATA.PIXELS]) if aug.ERASING else None
    return AugmentedCrop(crop, policy, jitter, operations, erase)


def make_jitter(strengths: Sequence[float]) -> ImageOp:
    """Return the jitter of brightness, contrast, saturation and, with four strengths, hue, in random order."""
    from torchvision.transforms import v2

    return v2.ColorJitter(*(strengths if len(strengths) > 1 else [strengths[0]] * 3))
