"""One sample: read, decoded, transformed; and what becomes of a broken one."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import DEFAULTS, DecodeOptions
from distribuuuu.data.draws import SampleKey, SampleRNG
from distribuuuu.data.picture import open_lazy_image
from distribuuuu.data.seeding import derive_seed
from distribuuuu.data.transforms import Transform

# How many other images a broken one may be replaced by before the data counts as broken.
MAX_SUBSTITUTES = 20


@dataclass(frozen=True)
class Sample:
    """One image on its way to a batch: uint8 (3, H, W), what `ImageDataset.label` says, and what went wrong before."""

    pixels: torch.Tensor | None
    label: "int | np.ndarray"
    broken: tuple[str, ...] = ()


class Samples(Dataset):
    """The images of a set by position, which all randomness follows from: the same in any worker or none.

    Args:
        images: the set.
        transform: from a picture and its draws to uint8 (3, H, W).
        decoder: see `decode`.
        skip_broken: take another image in the place of one that cannot be read, the same one each time.
        options: see `decode`.
    """

    def __init__(
        self,
        images: ImageDataset,
        transform: Transform,
        decoder: str,
        skip_broken: bool,
        options: DecodeOptions = DEFAULTS,
    ):
        self.images = images
        self.transform = transform
        self.decoder = decoder
        self.skip_broken = skip_broken
        self.options = options

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, where: SampleKey) -> Sample:
        key, index, *size = where
        transform = self.transform.at_size(*size) if size else self.transform
        broken: list[str] = []
        for attempt in range(1 + MAX_SUBSTITUTES * self.skip_broken):
            chosen = index if attempt == 0 else derive_seed(key, index, attempt) % len(self.images)
            try:
                picture = open_lazy_image(self.images.read(chosen), self.decoder, self.options)
                return Sample(transform(picture, SampleRNG(key, index)), self.images.label(chosen), tuple(broken))
            except MemoryError as error:  # the lack of memory is no fault of the image
                raise MemoryError(self.images.describe(chosen)) from error
            except Exception as error:  # decoders raise nearly anything; the loader names the file and the cause
                broken.append(f"{self.images.describe(chosen)}: {type(error).__name__}: {reason_of(error)}")
        return Sample(None, -1, tuple(broken))


def reason_of(error: Exception) -> str:
    """Return what an error says, without the path, which is named before it."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


Batch = tuple[torch.Tensor | None, torch.Tensor, tuple[str, ...]]


def collate(samples: list[Sample]) -> Batch:
    """Return (uint8 (N, 3, H, W), targets, messages); no images when one of them could not be had.

    The channels of a pixel lie side by side in memory, as decoders and resizing leave them.
    """
    broken = tuple(message for sample in samples for message in sample.broken)
    if any(sample.pixels is None for sample in samples):
        return None, torch.empty(0), broken
    # In a worker process this stacks right into the memory that it shares.
    pixels = default_collate([sample.pixels.permute(1, 2, 0) for sample in samples]).permute(0, 3, 1, 2)
    return pixels, as_targets([sample.label for sample in samples]), broken


def as_targets(labels: "list[int] | list[np.ndarray]") -> torch.Tensor:
    """Return what `ImageDataset.label` says of N images: int64 (N,), or of a multilabel set float32 (N, classes)."""
    targets = np.array(labels)
    return torch.from_numpy(targets if targets.ndim == 2 else targets.astype(np.int64, copy=False))
