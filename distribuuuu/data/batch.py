"""Batches: their form, how they are made from images, normalization on the device, and the pools that make them.

A `Pool` makes batches in the calling thread; those of workers.py make identical ones in processes and threads.
"""

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from distribuuuu.config import ConfigError
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import DEFAULTS, DecodeOptions, open_lazy_image
from distribuuuu.data.samplers import BatchKeys, EvalSampler, ResumableDistributedSampler
from distribuuuu.data.seeding import SampleKey, SampleRNG, derive_seed
from distribuuuu.data.transforms import Transform

# Values of a tensor that torch processes in one thread on a CPU; they also stay in its cache. With more threads, each
# operation would wait for cores on which the workers run.
_ONE_THREAD = 2**15 - 1


class Batch(NamedTuple):
    """Images with their targets. Read the fields by name: further ones may follow.

    Attributes:
        images: normalized, float32 (N, C, H, W); with several views of each image a tuple of them, see `Task.views`.
        targets: int64 (N,), or float32 (N, classes) where an image has several labels; of structured targets a dict or
            a tuple of tensors (N, ...), see `ImageDataset.targets`.
        index: the index of each image in the data set, int64 (N,); None if it is unknown, e.g. in a measurement.
        extra: the batches of the further loaders of the task, by name, see `Task.extra_loaders`.
        broken: which images of an evaluation could not be read and are black, bool (N,); None if all were read.
    """

    images: Any
    targets: Any
    index: torch.Tensor | None = None  # type: ignore[assignment]  # in place of the method of tuples
    extra: Mapping[str, "Batch"] = {}
    broken: torch.Tensor | None = None

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


class Normalizer:
    """Moves batches to the device and normalizes them there.

    Args:
        mean, std: per channel, in units of `one`, the value of a pixel that counts as 1, see PIXEL_RANGES.
        in_parts: whether workers use the other cores: a CPU then takes parts that one thread does.
        compiled: whether one compiled kernel converts and normalizes, with the same bits as the operations of torch.
    """

    def __init__(
        self,
        device: torch.device,
        mean: Sequence[float],
        std: Sequence[float],
        channels_last: bool,
        compiled: bool = False,
        one: float = 255,
        in_parts: bool = True,
    ):
        self.device = device
        self.mean = torch.tensor(mean, dtype=torch.float32, device=device).view(-1, 1, 1) * one
        self.scale = 1 / (torch.tensor(std, dtype=torch.float32, device=device).view(-1, 1, 1) * one)
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._normalize = torch.compile(_normalize, dynamic=False) if compiled else None
        self._most_images, self._in_parts = 0, in_parts and device.type == "cpu"

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
        if self._in_parts:
            num = max(1, _ONE_THREAD // max(1, pixels[0:1].numel()))
            rows = max(1, _ONE_THREAD // (max(1, pixels.shape[1]) * num * max(1, pixels.shape[3])))
        for part, image in zip(pixels.split(num), images.split(num), strict=True):
            for source, target in zip(part.split(rows, 2), image.split(rows, 2), strict=True):
                target.copy_(source).sub_(self.mean).mul_(self.scale)
        return images

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


# ------------------------------------------------------------------------------------------ samples

# How many substitutes are tried for a broken image before the data set counts as broken.
MAX_SUBSTITUTES = 20
# Batches that each worker prepares ahead; more than two cost memory and gain nothing.
PREFETCH = 2

# A batch of uint8 images, None if one of them could not be read; and the `ImageFault` of each broken image.
HostBatch = tuple[Batch | None, tuple[Any, ...]]
# From an image (H, W, 3) and a shape (N, H, W, 3) to uninitialized memory for a batch.
Allocate = Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]


class Sample(NamedTuple):
    """One sample of a batch.

    Attributes:
        pixels: uint8 (3, H, W), with several views a tuple of them; None: no image could be read, see `Samples`.
        index: the image in the data set, that of the substitute for a broken one.
        broken: the `ImageFault` of each image that could not be read.
    """

    pixels: torch.Tensor | tuple[torch.Tensor, ...] | None
    label: Any
    index: int  # type: ignore[assignment]  # in place of the method of tuples
    broken: tuple[Any, ...] = ()


@dataclass(eq=False)
class Samples:
    """Samples of a data set by their key, on which all randomness depends: the same in every worker.

    Attributes:
        transform: from an image and its random numbers to uint8 (3, H, W), or to several views; or that of each epoch.
        skip_broken: go on if an image cannot be read. In training, another one takes its place, which depends on the
            seed and the epoch. In an evaluation nothing does: its pixels are zeros, and `Batch.broken` marks it.
        extra: by name, the samples of other data sets that come along with each batch, see `BatchKeys`.
        substitutes: whether the samples are for training.
    """

    images: ImageDataset
    transform: Transform
    decoder: str
    skip_broken: bool
    options: DecodeOptions = DEFAULTS
    extra: dict[str, "Samples"] = field(default_factory=dict)
    substitutes: bool = True

    def batch(self, keys: Any, allocate: Allocate = torch.Tensor.new_empty) -> HostBatch:
        """Return the batch of some keys, `BatchKeys` or a list of `SampleKey`, and of the keys of other data sets."""
        keys = keys if isinstance(keys, BatchKeys) else BatchKeys(keys)
        batch, broken = self.make_batch(keys, allocate)
        if not self.extra:
            return batch, broken
        others = {name: one.batch(keys.extra[name], allocate) for name, one in self.extra.items()}
        broken += sum((messages for _, messages in others.values()), ())
        extra = {name: other for name, (other, _) in others.items() if other}
        return batch._replace(extra=extra) if batch and len(extra) == len(others) else None, broken

    def make_batch(self, keys: BatchKeys, allocate: Allocate) -> HostBatch:
        """Return the batch of some keys of this data set.

        The channels of a pixel are adjacent in memory, as decoders and resizing return them. Each image is copied into
        the batch at once, while it is in the cache of the processor.
        """
        views: list[torch.Tensor] = []
        rows: list[tuple[torch.Tensor, ...]] = []
        labels, index, unread = [], [], []
        broken: tuple[Any, ...] = ()
        for row, sample in enumerate(self.make(key, keys.substitutes) for key in keys):
            labels.append(sample.label)
            index.append(sample.index)
            broken += sample.broken
            if sample.pixels is None:
                unread.append(row)
                continue
            for number, pixels in enumerate(sample.pixels if isinstance(sample.pixels, tuple) else (sample.pixels,)):
                if number == len(views):
                    image = pixels.permute(1, 2, 0)
                    views.append(allocate(image, (len(keys), *image.shape)).permute(0, 3, 1, 2))
                    rows.append(views[number].unbind())
                target = rows[number][row]
                if (found := (pixels.shape, pixels.dtype)) != (expected := (target.shape, target.dtype)):
                    raise ValueError(f"{self.transform} returned different images: {expected}, {found}")
                target.copy_(pixels)
        if unread and (not self.skip_broken or self.substitutes):
            return None, broken
        if not views:
            example = torch.empty(0, dtype=self.options.dtype)
            shapes = [view.shape for view in transform_at(self.transform, next(iter(keys))).views]
            channels = self.options.channels
            views = [allocate(example, (len(keys), *shape, channels)).permute(0, 3, 1, 2) for shape in shapes]
        targets = as_targets(labels, self.images.targets)
        batch = Batch(tuple(views) if len(views) > 1 else views[0], targets, torch.tensor(index))
        if unread:
            marks = torch.zeros(len(keys), dtype=torch.bool).index_fill_(0, torch.tensor(unread), True)
            for view in views:
                view[marks] = 0
            batch = batch._replace(broken=marks)
        return batch, broken

    def make(self, key: SampleKey, substitutes: Sequence[int] = ()) -> Sample:
        """Return a sample; the substitute of a broken image is one of some images, by default of all."""
        seed, index, *_ = key
        transform = transform_at(self.transform, key)
        broken: list[Any] = []
        for attempt in range(1 + MAX_SUBSTITUTES * (self.skip_broken and self.substitutes)):
            drawn = derive_seed(seed, index, attempt) if attempt else 0
            others = substitutes or range(len(self.images))
            chosen = others[drawn % len(others)] if attempt else index
            try:
                image = open_lazy_image(self.images.read(chosen), self.decoder, self.options)
                pixels = transform(image, SampleRNG(*key))
            except MemoryError as error:  # not the image's fault
                raise MemoryError(self.images.describe(chosen)) from error
            except ConfigError:  # the fault of the network, the disk or an augmentation; the message is complete
                raise
            except Exception as error:  # decoders raise nearly anything; the loader reports the file and the cause
                from distribuuuu.data.image_faults import explain_fault

                broken.append(explain_fault(self.images.describe(chosen), error))
                continue
            return Sample(pixels, self.images.label(chosen), chosen, tuple(broken))
        return Sample(None, self.images.label(index), index, tuple(broken))


def transform_at(transform: Transform, key: SampleKey) -> Transform:
    """Return the transform of a sample."""
    return transform.at_epoch(key[2]) if len(key) > 2 else transform


def as_targets(labels: Sequence[Any], kind: str = "label") -> Any:
    """Return the labels of N images, of a kind of `ImageDataset.targets`, in the form of `Batch.targets`."""
    if kind != "structured":
        targets = np.array(labels)
        return torch.from_numpy(targets if targets.ndim == 2 else targets.astype(np.int64, copy=False))
    if isinstance(labels[0], Mapping):
        return {name: as_targets([label[name] for label in labels], kind) for name in labels[0]}
    if isinstance(labels[0], tuple):
        return tuple(as_targets(part, kind) for part in zip(*labels, strict=True))
    values = np.array(labels)
    return torch.from_numpy(values.astype(np.float32 if values.dtype.kind == "f" else np.int64, copy=False))


# ------------------------------------------------------------------------------------ makers of batches


class LoaderWorkerError(ConfigError):
    """A worker was killed, crashed or ran out of memory; the message names the cause and the fix."""

    one_process = True
    status = 1


class Pass(NamedTuple):
    """An iteration over the batches of a data set, from the sampler's position; over `num` of them if expected.

    The batches of equal samplers are equal.
    """

    samples: Samples
    sampler: EvalSampler | ResumableDistributedSampler
    num: int | None = None


# The samples and the keys of a batch to make.
BatchRequest = tuple[Samples, BatchKeys]


class Pool:
    """Makers of batches in the order of their submission: here the calling thread, in subclasses workers.

    Attributes:
        num_ahead: how many batches besides the next one may be submitted before one is taken.
        expected: the passes that probably follow the next one. At its end, the pool continues with them; if another
            pass follows, their batches are discarded. Passes over other data sets, whose loader has workers of its own,
            are skipped. The iterable must not refer to the pool, which keeps it.
    """

    num_ahead = 0

    def __init__(self, sources: Sequence[Samples], pin_memory: bool):
        self._sources, self._pin_memory = list(sources), pin_memory
        self._submitted: deque[Any] = deque()
        self.expected: Iterable[Pass] = ()
        # The pass and the position of each batch that was started and is not taken, the oldest first; and of the batch
        # after the one that was taken last.
        self._pending: deque[tuple[Pass, int]] = deque()
        self._following: tuple[Pass, int] | None = None
        # The batches to start next; None: a pass starts anew.
        self._requests: Iterator[tuple[tuple[Pass, int], BatchRequest]] | None = None

    def read(self, current: Pass) -> Iterator[HostBatch]:
        """Yield the batches of a pass. If passes are read in turn, some batches are made again."""
        expected, self.expected, sources = self.expected, (), self._sources
        for position in range(len(current.sampler)):
            requests, self._requests = self._requests, None  # after an error, no pass continues with them
            if not requests or (self._pending[0] if self._pending else self._following) != (current, position):
                self.clear()
                self._pending.clear()
                known = (one for one in itertools.chain([current], expected) if one.samples in sources)
                requests = _list_batches(known, position)
            for place, request in itertools.islice(requests, 1 + self.num_ahead - len(self._pending)):
                self._pending.append(place)
                self.submit(request)
            try:
                batch = self.take()
            except MemoryError as error:
                from distribuuuu.hints.loader_workers import LESS_MEMORY

                raise LoaderWorkerError(f"loading {error} ran out of memory; fix: {LESS_MEMORY}") from error
            self._pending.popleft()
            self._following, self._requests = (current, position + 1), requests
            yield batch

    def submit(self, request: BatchRequest) -> None:
        """Start a batch."""
        self._submitted.append(request)

    def take(self) -> HostBatch:
        """Wait for the oldest batch and return it."""
        samples, keys = self._submitted.popleft()
        return make_batch(samples, keys, self._pin_memory)

    def clear(self) -> None:
        """Discard all batches that were submitted."""
        self._submitted.clear()


def make_batch(samples: Samples, keys: BatchKeys, pin_memory: bool) -> HostBatch:
    """Return a batch, in page-locked memory if asked."""
    made = samples.batch(keys)
    return pinned(made) if pin_memory else made


def pinned(made: HostBatch) -> HostBatch:
    """Return a batch in page-locked memory."""
    batch, broken = made
    return map_leaves(torch.Tensor, torch.Tensor.pin_memory, batch), broken


def _list_batches(passes: Iterable[Pass], first: int) -> Iterator[tuple[tuple[Pass, int], BatchRequest]]:
    """Yield the place and the request of each batch, of the first pass from a position on."""
    for samples, sampler, end in passes:
        for position, keys in enumerate(itertools.islice(sampler, first, end), first):
            yield (Pass(samples, sampler), position), (samples, keys)
        first = 0


class WorkerBatches:
    """The batches of a data set; each iteration starts at the position of the sampler."""

    def __init__(self, pool: Pool, source: Pass):
        self.pool, self._source = pool, source

    def __iter__(self) -> Iterator[HostBatch]:
        return self.pool.read(Pass(self._source.samples, copy.copy(self._source.sampler)))
