"""A whole set on the device: small images are read once, and cropped and flipped there, many at a time."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch.utils.data import Sampler

from distribuuuu.config import ConfigError
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import DEFAULTS, DecodeOptions
from distribuuuu.data.draws import BatchRNG
from distribuuuu.data.picture import open_lazy_image
from distribuuuu.data.samplers import Batch as Positions
from distribuuuu.data.samples import Batch, Samples, as_targets, collate
from distribuuuu.launch.host import copy_to_device

# Images that a thread decodes at a time.
_CHUNK = 256


class DeviceDataset(ImageDataset):
    """The pixels of another set, uint8 on a device.

    Args:
        images: the set to read.
        decoder: see `decode`.
        device: where the pixels are kept.
        num_threads: threads that read and decode.
        options: see `decode`.

    Attributes:
        same_size: all images, uint8 (N, C, H, W), when they are of one size and none is broken; else None. C is 1 for
            grey ones.
        labels: the targets of all images on the device: int64 (N,), or of a multilabel set float32 (N, classes).

    Raises:
        ConfigError: the device has too little memory.
    """

    def __init__(
        self,
        images: ImageDataset,
        decoder: str,
        device: torch.device,
        num_threads: int,
        options: DecodeOptions = DEFAULTS,
    ):
        self._images, self._options = images, options
        self.classes, self.mean, self.std, self.crop = images.classes, images.mean, images.std, images.crop
        self.multilabel = images.multilabel
        self._errors: dict[int, Exception] = {}
        pictures = self._read_all(decoder, num_threads)
        self._shapes = np.array([picture.shape for picture in pictures], dtype=np.int64).reshape(-1, 3)
        self._offsets = np.concatenate([[0], self._shapes.prod(1).cumsum()])
        try:
            self._pixels = torch.cat([picture.reshape(-1) for picture in pictures]).to(device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"DATA.LOADER: the {self._offsets[-1] / 1e6:.0f} MB of the images do not fit on {device}; use host"
            ) from error
        self.labels = as_targets([images.label(index) for index in range(len(images))]).to(device)
        is_one_size = not self._errors and (self._shapes == self._shapes[0]).all()
        self.same_size = self._pixels.view(-1, *self._shapes[0].tolist()) if is_one_size else None

    def _read_all(self, decoder: str, num_threads: int) -> list[torch.Tensor]:
        def read_some(first: int) -> list[torch.Tensor]:
            return [self._read_one(index, decoder) for index in range(first, min(first + _CHUNK, len(self)))]

        with ThreadPoolExecutor(max(1, num_threads)) as pool:
            return [picture for some in pool.map(read_some, range(0, len(self), _CHUNK)) for picture in some]

    def _read_one(self, index: int, decoder: str) -> torch.Tensor:
        """Return uint8 (C, H, W), with one channel for a grey image; nothing for a broken one, which is remembered."""
        try:
            pixels = open_lazy_image(self._images.read(index), decoder, self._options).pixels()
        except Exception as error:  # decoders raise nearly anything; the loader names the file and the cause
            self._errors[index] = error
            return torch.empty(0, 0, 0, dtype=torch.uint8)
        return pixels[:1] if pixels.stride(0) == 0 else pixels

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: int) -> torch.Tensor:
        """Return the pixels of image `index`: uint8 (3, H, W) on the device."""
        if index in self._errors:
            raise self._errors[index]
        pixels = self._pixels[self._offsets[index] : self._offsets[index + 1]]
        return pixels.view(*self._shapes[index].tolist()).expand(3, -1, -1)

    def label(self, index: int) -> int | np.ndarray:
        """Return what the other set says of image `index`."""
        return self._images.label(index)

    def describe(self, index: int) -> str:
        """Return what to call image `index` in a message."""
        return self._images.describe(index)


class DeviceLoader:
    """The batches of a sampler, made on the device: the same pixels as from workers, but for how a GPU rounds a resize.

    Args:
        samples: a set of DeviceDataset, with its transform.
        sampler: gives the positions of each batch.
    """

    def __init__(self, samples: Samples, sampler: Sampler[Positions]):
        self._samples = samples
        self._sampler = sampler
        self._transform = samples.transform
        self._all = samples.images.same_size if hasattr(samples.transform, "of_batch") else None

    def __iter__(self) -> Iterator[Batch]:
        for positions in self._sampler:
            if self._all is None:
                yield collate([self._samples[position] for position in positions])
            else:
                chosen = copy_to_device(torch.tensor([index for _, index, *_ in positions]), self._all.device)
                _, _, *size = positions[0]  # one size for the whole batch
                transform = self._transform.at_size(*size) if size else self._transform
                pixels = transform.of_batch(self._all[chosen], BatchRNG(positions))
                yield pixels.expand(-1, 3, -1, -1), self._samples.images.labels[chosen], ()
