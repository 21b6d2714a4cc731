"""Samples for DATA.LOADER device: small images are decoded once, kept on the device, and cropped there in batches."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from distribuuuu.config import ConfigError
from distribuuuu.data.augment import AugmentedCrop, Erasing
from distribuuuu.data.batch import (
    Allocate,
    Batch,
    HostBatch,
    Samples,
    as_targets,
    copy_to_device,
    map_leaves,
    transform_at,
)
from distribuuuu.data.crops import PaddedCrop, random_padded_corner, reflect
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import DEFAULTS, DecodeOptions, open_lazy_image
from distribuuuu.data.samplers import BatchKeys
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import CenterCrop, Transform, crop_ends, draw_flips, resize_to_cover, resized_size
from distribuuuu.data.views import EpochTransforms

# Images that a thread decodes at a time; the crops that are computed for a whole batch.
_CHUNK, BATCHED = 256, PaddedCrop | CenterCrop


class DeviceDataset(ImageDataset):
    """The images of another data set, decoded and kept on a device as uint8.

    Attributes:
        same_size: all images as uint8 (N, C, H, W) if they have one size and none is broken, else None; C is 1 for
            gray images.
        labels: the targets of all images on the device, see `Batch.targets`.
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
    # The keys of some batches, the color that each view erases with, and what was drawn for the batches.
    _drawn: tuple[Any, list[Any], list[torch.Tensor]] = None, [], []

    @classmethod
    def load(
        cls, images: ImageDataset, device: torch.device, num_threads: int, transform: Any, decoder: str,
        skip_broken: bool, options: DecodeOptions, notes: list[str], **others: Any
    ) -> "DeviceSamples":  # fmt: skip
        """Return the samples of a data set, see `Samples`; add a note if images are cropped one by one.

        Augmentation other than erasing runs on the host, where the pixels then are: from the device they would be
        copied back image by image.
        """
        stages = transform.stages.values() if isinstance(transform, EpochTransforms) else [transform]
        crops = [split_erasing(view)[0] for stage in stages for view in stage.views]
        device = torch.device("cpu") if any(isinstance(crop, AugmentedCrop) for crop in crops) else device
        decoded = DeviceDataset(images, decoder, device, num_threads, options)
        if decoded.same_size is None or not all(isinstance(crop, BATCHED) for crop in crops):
            rule = "batches are cropped at once for images of one size, by DATA.CROP pad and in evaluations"
            notes.append(f"DATA.LOADER device: images are cropped one by one; {rule}")
        return cls(decoded, transform, decoder, skip_broken, options, **others)

    def make_batch(self, keys: BatchKeys, allocate: Allocate) -> HostBatch:
        """Return the batch of some keys; images of one size are cropped together if the crops allow that."""
        transform, pixels = transform_at(self.transform, keys.rows[0].tolist()), self.images.same_size
        views = [split_erasing(view) for view in transform.views]
        can_batch = all(isinstance(crop, BATCHED) for crop, _ in views)
        if pixels is None or not can_batch:
            return super().make_batch(keys, allocate)
        if self._drawn[0] is not keys.block:
            colors = [erase and copy_to_device(erase.color, pixels.device) for _, erase in views]
            self._drawn = keys.block, colors, draw_crops(views, pixels[:1], keys.block)
        (index,), *drawn = (part[:, keys.first : keys.first + len(keys)] for part in self._drawn[2])
        images = tuple(
            crop_batch(crop, pixels[index], one, color).expand(-1, self.options.channels, -1, -1)
            for (crop, _), one, color in zip(views, drawn, self._drawn[1], strict=True)
        )
        targets = map_leaves(torch.Tensor, lambda target: target[index], self.images.labels)
        return Batch(images if len(images) > 1 else images[0], targets, index), ()


def draw_crops(
    views: Sequence[tuple[Transform, Erasing | None]], pixels: torch.Tensor, keys: np.ndarray
) -> list[torch.Tensor]:
    """Return the images (1, N) of keys (N, 2 to 4), and for each view the rows that `crop_batch` takes.

    They are int64 on the device of some pixels of the images, computed on the host and copied in one transfer.
    """
    seeds, indices, *chosen = keys.T.astype(np.uint64)
    parts = [keys[:, 1][None]]
    for (crop, erase), rng in zip(views, SampleRNG(seeds, indices, *chosen).split(len(views)), strict=True):
        drawn = np.empty((0, len(keys)), np.int64)
        if isinstance(crop, PaddedCrop):
            flips = (np.broadcast_to(flipped, len(keys)) for flipped in reversed(draw_flips(rng, crop)))
            cover = resized_size("cover", crop_ends(pixels).shape[-2:], crop.size)
            corner = random_padded_corner(rng, *cover, crop.size, crop.padding)
            sides = zip(corner, flips, crop.shape, strict=True)
            drawn = np.array([
                part for start, flipped, side in sides for part in (start + flipped * (side - 1), 1 - 2 * flipped)
            ]).astype(np.int64)  # fmt: skip
        parts.append(np.concatenate([drawn, erase.rectangles(rng, *crop.shape)]) if erase else drawn)
    moved = copy_to_device(torch.from_numpy(np.concatenate(parts)), pixels.device)
    return list(moved.split([len(part) for part in parts]))


def split_erasing(view: Transform) -> tuple[Transform, Erasing | None]:
    """Return the crop of a view, and the erasing if that is all that follows and the crop is a `PaddedCrop`."""
    if isinstance(view, AugmentedCrop) and isinstance(view.crop, PaddedCrop) and view.only_erases:
        return view.crop, view.erase  # type: ignore[return-value]
    return view, None


def crop_batch(
    crop: Transform, pixels: torch.Tensor, drawn: torch.Tensor, color: torch.Tensor | None = None
) -> torch.Tensor:
    """Return uint8 (N, C, height, width) from images of one size; per image the same as from a call of the crop.

    `drawn` is int64 (4, N): the first row of a crop and the step to the next one, -1 if it is flipped; the same of its
    columns. With a color (channels, 1, 1), four more rows are those of `Erasing.rectangles`. It is empty for a
    `CenterCrop`.
    """
    if isinstance(crop, CenterCrop):
        return crop.crop(pixels)
    assert isinstance(crop, PaddedCrop)
    pixels = resize_to_cover(crop_ends(pixels), crop.size, crop.interpolation)
    height, width = pixels.shape[-2:]
    top, down, left, across, *rectangles = drawn[..., None]
    rows, columns = (
        first + step * torch.arange(side, device=pixels.device)
        for first, step, side in zip((top, left), (down, across), crop.shape, strict=True)
    )
    if crop.mode == "reflect":
        padded, rows, columns = pixels, reflect(rows, height), reflect(columns, width)
    else:
        padded, rows, columns = pad(pixels, [crop.padding] * 4), rows + crop.padding, columns + crop.padding
    # index (N, 1, 1), rows (N, height, 1) and columns (N, 1, width) together select (N, height, width) pixels, each
    # of C adjacent values.
    index = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    images = padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    if color is None:
        return images
    first, end, left, right = rectangles
    rows, columns = (torch.arange(side, device=pixels.device) for side in crop.shape)
    is_erased = ((first <= rows) & (rows < end))[:, :, None] & ((left <= columns) & (columns < right))[:, None]
    return torch.where(is_erased[:, None], color, images)
