"""Samples for DATA.LOADER device: small images are decoded once, kept on the device, and cropped there in batches."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from distribuuuu.config import ConfigError
from distribuuuu.data.augment import AugmentedCrop, Erasing
from distribuuuu.data.batch import Batch, HostBatch, Samples, as_targets, copy_to_device, map_leaves, transform_at
from distribuuuu.data.crops import PaddedCrop, random_padded_corner, random_resized_boxes, reflect
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import DEFAULTS, DecodeOptions, open_lazy_image
from distribuuuu.data.samplers import BatchKeys
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import CenterCrop, ResizedCrop, Transform, draw_flips
from distribuuuu.data.views import EpochTransforms

# Images that a thread decodes at a time.
_CHUNK = 256


class DeviceDataset(ImageDataset):
    """The images of another data set, decoded and kept on a device as uint8.

    Attributes:
        same_size: all images as uint8 (N, C, H, W) if they have one size and none is broken, else None; C is 1 for
            gray images.
        labels: the targets of all images on the device, see `Batch.targets`.
    """

    labels: Any

    def __init__(self, images: ImageDataset, decoder: str, device: torch.device, num_threads: int, options=DEFAULTS):
        self._images, self._options = images, options
        self.classes, self.mean, self.std, self.crop = images.classes, images.mean, images.std, images.crop
        self.targets, self.digest = images.targets, images.digest
        self.label, self.describe = images.label, images.describe  # type: ignore[method-assign]
        self._errors: dict[int, Exception] = {}

        def decode_chunk(first: int) -> list[torch.Tensor]:
            return [self._decode(index, decoder) for index in range(first, min(first + _CHUNK, len(images)))]

        with ThreadPoolExecutor(max(1, num_threads)) as pool:
            decoded = [pixels for chunk in pool.map(decode_chunk, range(0, len(images), _CHUNK)) for pixels in chunk]
        self._shapes = np.array([pixels.shape for pixels in decoded], dtype=np.int64).reshape(-1, 3)
        self._offsets = np.concatenate([[0], self._shapes.prod(1).cumsum()])
        try:
            self._pixels = torch.cat([pixels.reshape(-1) for pixels in decoded]).to(device)
        except torch.OutOfMemoryError as error:
            size = f"{self._offsets[-1] / 1e6:.0f} MB"
            raise ConfigError(f"DATA.LOADER: the {size} of the images do not fit on {device}; use host") from error
        targets = as_targets([images.label(index) for index in range(len(images))], images.targets)
        self.labels = map_leaves(torch.Tensor, lambda target: target.to(device), targets)
        is_one_size = not self._errors and (self._shapes == self._shapes[0]).all()
        self.same_size = self._pixels.view(-1, *self._shapes[0].tolist()) if is_one_size else None

    def takes_batches(self, crop: Transform) -> bool:
        """Return whether a crop takes all images of a batch at once; MPS has no float64, which resizing may need."""
        if self.same_size is None or not isinstance(crop, ResizedCrop):
            return self.same_size is not None and not isinstance(crop, AugmentedCrop)
        is_exact = self.same_size.dtype == torch.uint8 and self.same_size.device.type != "mps"
        return is_exact and not crop.interpolation.startswith("opencv")

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


class DeviceSamples(Samples):
    """Samples of a DeviceDataset, made on the device: the workers' pixels, up to a GPU's rounding in `resize`."""

    images: DeviceDataset
    # The keys of some batches; their views, if they are cropped together; and what `draw_crops` returned for them.
    _drawn: tuple[Any, Any, Any] = None, (), ()

    @classmethod
    def load(
        cls, images: ImageDataset, device: torch.device, num_threads: int, transform: Any, decoder: str,
        skip_broken: bool, options: DecodeOptions, notes: list[str], **others: Any
    ) -> "DeviceSamples":  # fmt: skip
        """Return the samples of a data set, see `Samples`; add a note if images are cropped one by one.

        If they are augmented, other than by erasing, the pixels are kept on the host, where that runs.
        """
        stages = transform.stages.values() if isinstance(transform, EpochTransforms) else [transform]
        crops = [split_erasing(view)[0] for stage in stages for view in stage.views]
        device = torch.device("cpu") if any(isinstance(crop, AugmentedCrop) for crop in crops) else device
        decoded = DeviceDataset(images, decoder, device, num_threads, options)
        if not all(map(decoded.takes_batches, crops)):
            notes.append("DATA.LOADER device: images are cropped one by one, not in batches; see docs/large_data.md")
        return cls(decoded, transform, decoder, skip_broken, options, **others)

    def make_batch(self, keys: BatchKeys, allocate: Any) -> HostBatch:
        """Return the batch of some keys; images of one size are cropped together if the crops allow that."""
        pixels: Any = self.images.same_size
        if self._drawn[0] is not keys.block:
            views = [split_erasing(view) for view in transform_at(self.transform, keys.rows[0].tolist()).views]
            is_possible = all(self.images.takes_batches(crop) for crop, _ in views)
            self._drawn = keys.block, views, is_possible and draw_crops(views, pixels[:1], keys.block)
        _, views, found = self._drawn
        if not found:
            return super().make_batch(keys, allocate)
        rows = iter(found[0][:, keys.first : keys.first + len(keys)])
        index = next(rows)
        images = tuple(
            crop_batch(crop, pixels[index], rows, *fixed).expand(-1, self.options.channels, -1, -1)
            for (crop, _), fixed in zip(views, found[1], strict=True)
        )
        targets = map_leaves(torch.Tensor, lambda target: target[index], self.images.labels)
        return Batch(images if len(images) > 1 else images[0], targets, index), ()


def split_erasing(view: Transform) -> tuple[Transform, Erasing | None]:
    """Return the crop of a view, and the erasing if that, with one color, is all that follows."""
    if isinstance(view, AugmentedCrop) and view == AugmentedCrop(view.crop, erase=view.erase):
        return (view.crop, view.erase) if isinstance(view.erase, Erasing) and not view.erase.std else (view, None)
    return view, None


def draw_crops(views: Sequence[Any], pixels: torch.Tensor, keys: np.ndarray) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Return the images of keys (N, 2 to 4) and what each view draws: int64 (rows, N); and its color and its tables.

    They are on the device of some pixels of the images, see `crop_batch`; the rows are copied there at once.
    """
    seeds, indices, *chosen = keys.T.astype(np.uint64)
    parts, fixed = [keys[:, 1][None]], []
    for (crop, erase), rng in zip(views, SampleRNG(seeds, indices, *chosen).split(len(views)), strict=True):
        tables: tuple[Any, ...] = ()
        if not isinstance(crop, CenterCrop):
            flips = [np.broadcast_to(is_flipped, len(keys)) for is_flipped in draw_flips(rng, crop)]
            height, width = (pixels if isinstance(crop, ResizedCrop) else crop.crop(pixels)).shape[-2:]
            corners, places = np.zeros((2, 2, len(keys)), np.int64)
            if isinstance(crop, ResizedCrop):
                corners, places = np.split(random_resized_boxes(rng, height, width, crop), 2)
                if crop.interpolation == "random":
                    places = 2 * places + (rng.uniform() >= 0.5)
            elif isinstance(crop, PaddedCrop):
                corner = random_padded_corner(rng, height, width, crop.size, crop.padding)
                places = np.array(corner, np.int64) + crop.padding
            parts.append(np.stack([corners[::-1], 2 * places[::-1] + flips], 1).reshape(4, -1))
            tables = tabulate(crop, width, crop.shape[1]), tabulate(crop, height, crop.shape[0])
        parts += [erase.rectangles(rng, *crop.shape)] if erase else []
        fixed.append((erase and erase.color, tables))
    found = torch.from_numpy(np.concatenate(parts)), tuple(fixed)
    return map_leaves(torch.Tensor, lambda part: copy_to_device(part, pixels.device), found)


def tabulate(crop: Any, side: int, size: int) -> tuple[torch.Tensor, ...]:
    """Return the pixels of a side that are summed for each one of the output, and their weights: (M, size, K) each.

    Each two rows are a place of the crop, upright and flipped. Of a `ResizedCrop` they are a side of the box from 0,
    with pixels from its start; for "random" by bilinear, then by bicubic interpolation. The weights are those of torch
    for uint8 on a CPU, multiples of a power of two, so that the sums are exact: in float32 if no pixel is further away
    than two.
    """
    if isinstance(crop, ResizedCrop):
        kinds = ("bilinear", "bicubic") if crop.interpolation == "random" else (crop.interpolation,)
        sides = np.maximum(1, np.arange(side + 1))[:, None, None]
        reach = -(-max(side, size) * (1 + ("bicubic" in kinds)) // size)
        center = sides / size * (np.arange(size)[:, None] + 0.5)
        index = np.floor(center).astype(np.int64) + np.arange(-reach, reach + 1)
        far, is_inside = abs(index + 0.5 - center) / np.maximum(1, sides / size), (index >= 0) & (index < sides)
        cubic = np.where(far < 1, (1.5 * far - 2.5) * far**2 + 1, ((2.5 - 0.5 * far) * far - 4) * far + 2) * (far < 2)
        values = [(np.maximum(1 - far, 0) if kind == "bilinear" else cubic) * is_inside for kind in kinds]
        weights = np.stack([value / value.sum(-1, keepdims=True) for value in values], 1)
        one = 2.0 ** np.minimum(np.frexp(32767.5 / weights.max((2, 3), keepdims=True))[1] - 1, 22)
        weights = (np.rint(weights * one) / one).astype(np.float32 if reach <= 2 else np.float64)
        index = np.broadcast_to(index.clip(0, sides - 1)[:, None], weights.shape)
    else:
        padding = crop.padding if isinstance(crop, PaddedCrop) else 0
        at = np.arange(side + 2 * padding - size + 1)[:, None, None, None] + np.arange(size)[:, None] - padding
        at = reflect(at, side) if crop.mode == "reflect" else at
        index, weights = at.clip(0, side - 1), ((at >= 0) & (at < side)).astype(np.uint8)
    parts = (np.stack([part, part[:, :, ::-1]], 2) for part in (index, weights))
    return tuple(torch.from_numpy(part.reshape(-1, *part.shape[3:])) for part in parts)


def crop_batch(crop: Any, pixels: torch.Tensor, drawn: Iterator[torch.Tensor], color: Any, tables: Any) -> torch.Tensor:
    """Return uint8 (N, C, height, width) from images of one size; per image the same as from a call of the crop.

    `drawn` yields int64 (N,): for the table of the columns, then that of the rows, the pixel from which its pixels
    count, and the row of the table; with a color (channels, 1, 1), then the rows of `Erasing.rectangles`.
    """
    num, device, values = pixels.shape[0], pixels.device, pixels if isinstance(crop, ResizedCrop) else crop.crop(pixels)
    for dim, (index, weights), first, place in zip((3, 2), tables, drawn, drawn, strict=False):
        is_sum, lines, side = index.shape[2] > 1, values.movedim(dim, 1), values.shape[dim]
        lines = lines.to(weights.dtype if is_sum else pixels.dtype, memory_format=torch.contiguous_format)
        starts = first + torch.arange(0, num * side, side, device=device)
        summed, shares = index.index_select(0, place) + starts[:, None, None], weights.index_select(0, place)
        table = lines.reshape(num * side, -1)
        if is_sum:
            bags = torch.arange(0, summed.numel(), summed.shape[2], device=device)
            values, *_ = torch.embedding_bag(table, summed.flatten(), bags, False, 0, False, shares.flatten())
            values = values.add_(0.5).clamp_(0, 255).to(pixels.dtype)
        else:
            values = table.index_select(0, summed.flatten()) * shares.view(-1, 1)
        values = values.view(num, -1, *lines.shape[2:]).movedim(1, dim)
    if color is None:
        return values
    firsts, ends = torch.stack([next(drawn) for _ in range(4)]).view(2, 2, num, 1).unbind(1)
    places = torch.arange(max(crop.shape), device=device)
    rows, columns = ((firsts <= places) & (places < ends)).unbind()
    is_erased = rows[:, None, : crop.shape[0], None] & columns[:, None, None, : crop.shape[1]]
    return torch.where(is_erased, color, values)
