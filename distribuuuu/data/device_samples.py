"""Samples for DATA.LOADER device: small images are decoded once, kept on the device, and cropped there in batches."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from distribuuuu.config import ConfigError
from distribuuuu.data.augment import AugmentedCrop, ErasedCrop
from distribuuuu.data.batch import Batch, copy_to_device, map_leaves
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import DEFAULTS, DecodeOptions, open_lazy_image
from distribuuuu.data.make_batch import Allocate, HostBatch, Samples, as_targets
from distribuuuu.data.seeding import BatchRNG, SampleKey, derive_seed
from distribuuuu.data.transforms import BatchTransform, EpochTransforms, Views, list_views, transform_at

# Images that a thread decodes at a time.
_CHUNK = 256


class DeviceDataset(ImageDataset):
    """The images of another data set, decoded and kept on a device as uint8.

    Args:
        images: the data set to read.
        decoder: see `decode`.
        device: where the pixels are kept.
        num_threads: threads that read and decode.
        options: see `decode`.

    Attributes:
        same_size: all images as uint8 (N, C, H, W) if they have one size and none is broken, else None; C is 1 for
            gray images.
        labels: the targets of all images on the device, see `Batch.targets`.

    Raises:
        ConfigError: the device has too little memory.
    """

    labels: Any

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
        self.targets, self.digest = images.targets, images.digest
        self._errors: dict[int, Exception] = {}
        decoded = self._decode_all(decoder, num_threads)
        self._shapes = np.array([pixels.shape for pixels in decoded], dtype=np.int64).reshape(-1, 3)
        self._offsets = np.concatenate([[0], self._shapes.prod(1).cumsum()])
        try:
            self._pixels = torch.cat([pixels.reshape(-1) for pixels in decoded]).to(device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"DATA.LOADER: the {self._offsets[-1] / 1e6:.0f} MB of the images do not fit on {device}; use host"
            ) from error
        targets = as_targets([images.label(index) for index in range(len(images))], images.targets)
        self.labels = map_leaves(torch.Tensor, lambda target: target.to(device), targets)
        is_one_size = not self._errors and (self._shapes == self._shapes[0]).all()
        self.same_size = self._pixels.view(-1, *self._shapes[0].tolist()) if is_one_size else None

    def _decode_all(self, decoder: str, num_threads: int) -> list[torch.Tensor]:
        def decode_chunk(first: int) -> list[torch.Tensor]:
            return [self._decode(index, decoder) for index in range(first, min(first + _CHUNK, len(self)))]

        with ThreadPoolExecutor(max(1, num_threads)) as pool:
            return [pixels for chunk in pool.map(decode_chunk, range(0, len(self), _CHUNK)) for pixels in chunk]

    def _decode(self, index: int, decoder: str) -> torch.Tensor:
        """Return uint8 (C, H, W), C 1 for a gray image; for a broken one, record the error and return no pixels."""
        try:
            pixels = open_lazy_image(self._images.read(index), decoder, self._options).pixels()
        except Exception as error:  # decoders raise nearly anything; the loader reports the file and the cause
            error.__cause__ = error.__context__ = None  # with the tracebacks, the frames of the decoder are freed
            self._errors[index] = error.with_traceback(None)
            return torch.empty(0, 0, 0, dtype=torch.uint8)
        return pixels[:1] if pixels.stride(0) == 0 else pixels

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: int) -> torch.Tensor:
        """Return the pixels of image `index`: uint8 (3, H, W) on the device."""
        if index in self._errors:
            raise self._errors[index].with_traceback(None)  # otherwise each raise lengthens the traceback
        pixels = self._pixels[self._offsets[index] : self._offsets[index + 1]]
        return pixels.view(*self._shapes[index].tolist()).expand(self._options.channels, -1, -1)

    def label(self, index: int) -> Any:
        """Return the label of image `index`."""
        return self._images.label(index)

    def describe(self, index: int) -> str:
        """Return the name of image `index` for messages."""
        return self._images.describe(index)


class DeviceSamples(Samples):
    """Samples of a DeviceDataset, made on the device: the workers' pixels, up to a GPU's rounding when it resizes."""

    images: DeviceDataset

    @classmethod
    def load(
        cls, images: ImageDataset, device: torch.device, num_threads: int, transform: Any, decoder: str,
        skip_broken: bool, options: DecodeOptions, **others: Any
    ) -> "DeviceSamples":  # fmt: skip
        """Return the samples of a data set; for the arguments see `DeviceDataset` and `Samples`.

        Other augmentation than erasing runs on the host, where the pixels then are: from the device they would be
        copied back image by image.
        """
        stages = transform.stages.values() if isinstance(transform, EpochTransforms) else [transform]
        is_on_host = any(isinstance(view, AugmentedCrop) and not isinstance(view, ErasedCrop)
                         for stage in stages for view in list_views(stage))  # fmt: skip
        device = torch.device("cpu") if is_on_host else device
        decoded = DeviceDataset(images, decoder, device, num_threads, options)
        return cls(decoded, transform, decoder, skip_broken, options, **others)

    def make_batch(self, keys: Sequence[SampleKey], allocate: Allocate) -> HostBatch:
        """Return the batch of some keys; images of one size are transformed together if the transforms allow that."""
        transform = transform_at(self.transform, keys[0])  # one epoch for the batch
        pixels, views = self.images.same_size, list_views(transform)
        if pixels is None or self.keeps_geometry or not all(isinstance(view, BatchTransform) for view in views):
            return super().make_batch(keys, allocate)
        index = copy_to_device(torch.tensor([index for _, index, *_ in keys]), pixels.device)
        images = []
        for number, view in enumerate(views):
            rng = BatchRNG([(derive_seed(*key[:2]), number) for key in keys] if number else keys)  # as in `Views`
            found = view.transform_batch(pixels[index], rng)  # type: ignore[attr-defined]
            images.append(found.expand(-1, self.options.channels, -1, -1))
        targets = map_leaves(torch.Tensor, lambda target: target[index], self.images.labels)
        return Batch(tuple(images) if isinstance(transform, Views) else images[0], targets, index), ()
