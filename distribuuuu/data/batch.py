"""A batch, as workers make it, as loaders yield it on the device, and as tasks receive it; its normalization there."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from distribuuuu.config import ConfigError, Problem
from distribuuuu.data.datasets.base import ImageDataset

# Values of a tensor that torch processes in one thread on a CPU; they also stay in its cache. With more threads, each
# operation would wait for cores on which the workers run.
_ONE_THREAD = 2**15 - 1


class Geometry(NamedTuple):
    """Origin of the pixels of a view, so that dense targets, e.g. masks, can follow them.

    Attributes:
        box: top, left, height and width of the crop, float32 (N, 4), in pixels of the image; it may extend beyond it.
        flipped: whether the crop was then flipped horizontally and vertically, bool (N, 2).
        size: height and width of the image in pixels, int64 (N, 2).
    """

    box: torch.Tensor
    flipped: torch.Tensor
    size: torch.Tensor


class Batch(NamedTuple):
    """Images with their targets. Read the fields by name: further ones may follow.

    Attributes:
        images: normalized, float32 (N, C, H, W); with several views of each image a tuple of them, see `Task.views`.
        targets: int64 (N,), or float32 (N, classes) where an image has several labels; of structured targets a dict or
            a tuple of tensors (N, ...), see `ImageDataset.targets`.
        index: the index of each image in the data set, int64 (N,); None if it is unknown, e.g. in a measurement.
        extra: the batches of the further loaders of the task, by name, see `Task.extra_loaders`.
        broken: which images of an evaluation could not be read and are black, bool (N,); None if all were read.
        geometry: a `Geometry`, with several views a tuple of them; None unless `Task.needs_geometry`.
    """

    images: Any
    targets: Any
    index: torch.Tensor | None = None  # type: ignore[assignment]  # in place of the method of tuples
    extra: Mapping[str, "Batch"] = {}
    broken: torch.Tensor | None = None
    geometry: Any = None

    @property
    def first_images(self) -> torch.Tensor:
        """The images of the first view."""
        return self.images if isinstance(self.images, torch.Tensor) else self.images[0]


def map_leaves(kind: type | tuple[type, ...], function: Callable[[Any], Any], value: Any) -> Any:
    """Return nested dicts and tuples, e.g. a Batch, with a function applied to each leaf of a type."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {name: map_leaves(kind, function, item) for name, item in value.items()}
    if isinstance(value, tuple):
        items = [map_leaves(kind, function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device without waiting for pending work of a GPU, as a copy from pageable memory would.

    torch's allocator keeps the page-locked copy until the transfer ends.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


# ------------------------------------------------------------------------------------ normalization


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
