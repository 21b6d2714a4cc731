"""Samples: images read, decoded and transformed, with substitutes for broken ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from distribuuuu.config import ConfigError
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import DEFAULTS, DecodeOptions, open_lazy_image
from distribuuuu.data.seeding import SampleKey, SampleRNG, derive_seed
from distribuuuu.data.transforms import Transform

# How many substitutes are tried for a broken image before the data set counts as broken.
MAX_SUBSTITUTES = 20

# Images (N, 3, H, W), targets, and a message for each broken image; None for the images if one could not be read.
HostBatch = tuple[torch.Tensor | None, torch.Tensor, tuple[str, ...]]
# From an image (H, W, 3) and a shape (N, H, W, 3) to uninitialized memory for a batch.
Allocate = Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True)
class Sample:
    """One sample of a batch.

    Attributes:
        pixels: uint8 (3, H, W); None: no image could be read.
        label: see `ImageDataset.label`.
        broken: a message for each image that could not be read.
    """

    pixels: torch.Tensor | None
    label: int | np.ndarray
    broken: tuple[str, ...] = ()


@dataclass(eq=False)
class Samples(Dataset):
    """Samples of a data set by their key, on which all randomness depends: the same in every worker.

    Attributes:
        images: the data set.
        transform: from an image and its random numbers to uint8 (3, H, W).
        decoder: see `decode`.
        skip_broken: substitute another image for one that cannot be read, always the same one.
        options: see `decode`.
    """

    images: ImageDataset
    transform: Transform
    decoder: str
    skip_broken: bool
    options: DecodeOptions = DEFAULTS

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, keys: Sequence[SampleKey], allocate: Allocate = torch.Tensor.new_empty) -> HostBatch:
        """Return the batch of some keys.

        The channels of a pixel are adjacent in memory, as decoders and resizing return them. Each image is copied into
        the batch at once, while it is in the cache of the processor.

        Raises:
            ValueError: the transform returned images of different sizes or types.
        """
        if self.images.remote:
            self.images.remote.read_ahead(keys)
        batch, num_read = torch.empty(0), 0
        labels: list[int | np.ndarray] = []
        broken: tuple[str, ...] = ()
        for row, sample in enumerate(map(self.__getitem__, keys)):
            labels.append(sample.label)
            broken += sample.broken
            if sample.pixels is not None:
                image = sample.pixels.permute(1, 2, 0)
                batch = batch if num_read else allocate(image, (len(keys), *image.shape))
                num_read += 1
                if (found := (image.shape, image.dtype)) != (expected := (batch.shape[1:], batch.dtype)):
                    raise ValueError(f"{self.transform} returned different images: {expected}, {found}")
                batch[row].copy_(image)
        if num_read < len(keys):
            return None, torch.empty(0), broken
        return batch.permute(0, 3, 1, 2), as_targets(labels), broken

    def __getitem__(self, key: SampleKey) -> Sample:
        seed, index, *size = key
        transform = self.transform.at_size(*size) if size else self.transform
        broken: list[str] = []
        for attempt in range(1 + MAX_SUBSTITUTES * self.skip_broken):
            chosen = index if attempt == 0 else derive_seed(seed, index, attempt) % len(self.images)
            try:
                image = open_lazy_image(self.images.read(chosen), self.decoder, self.options)
                return Sample(transform(image, SampleRNG(seed, index)), self.images.label(chosen), tuple(broken))
            except MemoryError as error:  # not the image's fault
                raise MemoryError(self.images.describe(chosen)) from error
            except ConfigError:  # the network's or the disk's fault; the message is complete
                raise
            except Exception as error:  # decoders raise nearly anything; the loader reports the file and the cause
                broken.append(f"{self.images.describe(chosen)}: {type(error).__name__}: {reason_of(error)}")
        return Sample(None, -1, tuple(broken))


def reason_of(error: Exception) -> str:
    """Return the message of an error, without the path of an OSError."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def as_targets(labels: Sequence[int | np.ndarray]) -> torch.Tensor:
    """Return the labels of N images as targets: int64 (N,), or for a multilabel set float32 (N, classes)."""
    targets = np.array(labels)
    return torch.from_numpy(targets if targets.ndim == 2 else targets.astype(np.int64, copy=False))
