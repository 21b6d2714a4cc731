"""Normalization: images to float32 ones on the device, by the mean and the standard deviation of each channel."""

from collections.abc import Sequence
from statistics import fmean

import torch
from torch.nn.functional import pad

from distribuuuu.config import ConfigError, Problem
from distribuuuu.data.datasets.base import ImageDataset

# Values of a tensor that torch processes in one thread on a CPU; they also stay in its cache. With more threads, each
# operation would wait for cores on which the workers run.
_ONE_THREAD = 2**15 - 1


def statistics_of(cfg, images: ImageDataset) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and the standard deviation per channel, in [0, 1], that images are normalized with.

    Of float32 images (DATA.PIXELS), they are in the units of the files. For one channel, three values are averaged.

    Raises:
        ConfigError: there are none for the channels.
    """
    mean, std = cfg.DATA.MEAN or images.mean, cfg.DATA.STD or images.std
    if cfg.DATA.CHANNELS == 1:
        mean, std = (fmean(mean),), (fmean(std),)
    for key, values in (("DATA.MEAN", mean), ("DATA.STD", std)):
        if len(values) != cfg.DATA.CHANNELS:
            message = f"got {list(values)}; expected {cfg.DATA.CHANNELS} numbers, one per channel"
            raise ConfigError(Problem(key, f"{message}; fix: `distribuuuu doctor --statistics` finds them"))
    return mean, std


class Normalizer:
    """Moves batches to the device and normalizes them there.

    Args:
        device: where the images are normalized.
        mean, std: per channel, in units of `one`.
        channels_last: the memory layout of the images.
        compiled: whether one compiled kernel converts and normalizes, with the same bits as the operations of torch.
        one: the value of a pixel that counts as 1, see PIXEL_RANGES.
    """

    def __init__(
        self,
        device: torch.device,
        mean: Sequence[float],
        std: Sequence[float],
        channels_last: bool,
        compiled: bool = False,
        one: float = 255,
    ):
        self.device = device
        self.mean = torch.tensor(mean, dtype=torch.float32, device=device).view(-1, 1, 1) * one
        self.scale = 1 / (torch.tensor(std, dtype=torch.float32, device=device).view(-1, 1, 1) * one)
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._normalize = torch.compile(_normalize, dynamic=False) if compiled else None
        self._most_images = 0

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return float32 (N, C, H, W) on the device from uint8 or float32 (N, C, H, W) on any device."""
        # An asynchronous copy of other memory may read it after it has been reused for another batch.
        pixels = pixels.to(self.device, non_blocking=self.device.type == "cuda" and pixels.is_pinned())
        if self._normalize:
            num, self._most_images = len(pixels), max(self._most_images, len(pixels))
            padded = pad_batch(pixels, self._most_images)  # another number of images would be compiled again
            return self._normalize(padded, self.mean, self.scale, self._format)[:num]
        images = self.empty(pixels.shape)
        num = rows = max(1, *pixels.shape)
        if self.device.type == "cpu":
            num = max(1, _ONE_THREAD // max(1, pixels[0:1].numel()))
            rows = max(1, _ONE_THREAD // (max(1, pixels.shape[1]) * num * max(1, pixels.shape[3])))
        for part, image in zip(pixels.split(num), images.split(num), strict=True):
            for source, target in zip(part.split(rows, 2), image.split(rows, 2), strict=True):
                target.copy_(source).sub_(self.mean).mul_(self.scale)
        return images

    def for_display(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the first three channels, or the first one, of (N, C, H, W): uint8 as it is, other pixels as 0 to 1.

        Of the latter, black and white are 2.5 standard deviations below and above the mean.
        """
        if pixels.dtype != torch.uint8:
            pixels = ((pixels - self.mean.cpu()) * self.scale.cpu() / 5 + 0.5).clamp_(0, 1)
        return pixels[:, : 3 if pixels.shape[1] >= 3 else 1]

    def empty(self, shape: Sequence[int]) -> torch.Tensor:
        """Return uninitialized memory for a batch of (N, C, H, W)."""
        return torch.empty(shape, dtype=torch.float32, device=self.device, memory_format=self._format)


def _normalize(
    pixels: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, memory_format: torch.memory_format
) -> torch.Tensor:
    """Return normalized images in a memory layout; compiled, one pass over them instead of three."""
    return pixels.to(torch.float32, memory_format=memory_format).sub(mean).mul(scale)


def pad_batch(images: torch.Tensor, num: int) -> torch.Tensor:
    """Return at least `num` images (N, C, H, W), the last ones zeros, in the same memory format."""
    return pad(images, [0] * 7 + [num - len(images)]) if len(images) < num else images
