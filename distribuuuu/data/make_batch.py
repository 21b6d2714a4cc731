"""Batches: images read, decoded and transformed, with a substitute or a mark for broken ones; and who makes them.

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
from torch.utils.data import Dataset

from distribuuuu.config import ConfigError
from distribuuuu.config.derived import height_and_width
from distribuuuu.data.batch import Batch, Geometry, map_leaves
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import DEFAULTS, DecodeOptions, open_lazy_image
from distribuuuu.data.samplers import BatchKeys, EvalSampler, ResumableDistributedSampler
from distribuuuu.data.seeding import SampleKey, SampleRNG, derive_seed
from distribuuuu.data.transforms import Transform
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.host import count_cores

# How many substitutes are tried for a broken image before the data set counts as broken.
MAX_SUBSTITUTES = 20
# Batches that each worker prepares ahead; more than two cost memory and gain nothing.
PREFETCH = 2

# A batch of uint8 images, None if one of them could not be read; and a message for each broken image.
HostBatch = tuple[Batch | None, tuple[str, ...]]
# From an image (H, W, 3) and a shape (N, H, W, 3) to uninitialized memory for a batch.
Allocate = Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]


class Sample(NamedTuple):
    """One sample of a batch.

    Attributes:
        pixels: uint8 (3, H, W), with several views a tuple of them; None: no image could be read, see `Samples`.
        label: see `ImageDataset.label`.
        index: the image in the data set, that of the substitute for a broken one.
        broken: a message for each image that could not be read.
        geometry: that of the pixels, see `SampleRNG.geometry`.
    """

    pixels: torch.Tensor | tuple[torch.Tensor, ...] | None
    label: Any
    index: int  # type: ignore[assignment]  # in place of the method of tuples
    broken: tuple[str, ...] = ()
    geometry: Any = None


@dataclass(eq=False)
class Samples(Dataset):
    """Samples of a data set by their key, on which all randomness depends: the same in every worker.

    Attributes:
        images: the data set.
        transform: from an image and its random numbers to uint8 (3, H, W), or to several views; or that of each epoch.
        decoder: see `decode`.
        skip_broken: go on if an image cannot be read. In training, another one takes its place, always the same one. In
            an evaluation nothing does: its pixels are zeros, and `Batch.broken` marks it.
        options: see `decode`.
        extra: by name, the samples of other data sets that come along with each batch, see `JointKeys`.
        substitutes: whether the samples are for training.
        keeps_geometry: return `Batch.geometry`.
    """

    images: ImageDataset
    transform: Transform
    decoder: str
    skip_broken: bool
    options: DecodeOptions = DEFAULTS
    extra: dict[str, "Samples"] = field(default_factory=dict)
    substitutes: bool = True
    keeps_geometry: bool = False

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, keys: Any, allocate: Allocate = torch.Tensor.new_empty) -> HostBatch:
        """Return the batch of some keys, a list of `SampleKey`; with other data sets, the batches of `JointKeys`.

        Raises:
            ValueError: the transform returned images of different sizes or types, or structured labels differ in form.
        """
        batch, broken = self.make_batch(keys, allocate)
        if not self.extra:
            return batch, broken
        others = {name: one.batch(keys.extra[name], allocate) for name, one in self.extra.items()}
        broken += sum((messages for _, messages in others.values()), ())
        extra = {name: other for name, (other, _) in others.items() if other}
        return batch._replace(extra=extra) if batch and len(extra) == len(others) else None, broken

    def read_ahead(self, keys: Any) -> None:
        """Start to fetch the images of a batch that are at a URL."""
        if self.images.remote:
            self.images.remote.read_ahead(keys)
        for name, one in self.extra.items():
            one.read_ahead(keys.extra[name])

    def make_batch(self, keys: Sequence[SampleKey], allocate: Allocate) -> HostBatch:
        """Return the batch of some keys of this data set.

        The channels of a pixel are adjacent in memory, as decoders and resizing return them. Each image is copied into
        the batch at once, while it is in the cache of the processor.
        """
        views: list[torch.Tensor] = []
        labels, index, unread, geometry = [], [], [], []
        broken: tuple[str, ...] = ()
        for row, sample in enumerate(map(self.__getitem__, keys)):
            labels.append(sample.label)
            geometry.append(sample.geometry)
            index.append(sample.index)
            broken += sample.broken
            if sample.pixels is None:
                unread.append(row)
                continue
            for number, pixels in enumerate(sample.pixels if isinstance(sample.pixels, tuple) else (sample.pixels,)):
                image = pixels.permute(1, 2, 0)
                if number == len(views):
                    views.append(allocate(image, (len(keys), *image.shape)))
                view = views[number]
                if (found := (image.shape, image.dtype)) != (expected := (view.shape[1:], view.dtype)):
                    raise ValueError(f"{self.transform} returned different images: {expected}, {found}")
                view[row].copy_(image)
        if unread and (not self.skip_broken or self.substitutes):
            return None, broken
        sizes = [height_and_width(view.size) for view in transform_at(self.transform, keys[0]).views]
        if not views:
            example = torch.empty(0, dtype=self.options.dtype)
            views = [allocate(example, (len(keys), *size, self.options.channels)) for size in sizes]
        marks = torch.zeros(len(keys), dtype=torch.bool)
        for row in unread:
            marks[row] = True
            for view in views:
                view[row] = 0
        images = tuple(view.permute(0, 3, 1, 2) for view in views)
        targets = as_targets(labels, self.images.targets)
        batch = Batch(images if len(sizes) > 1 else images[0], targets, torch.tensor(index))
        if self.keeps_geometry:
            batch = batch._replace(geometry=as_geometry(geometry, len(sizes)))
        return batch._replace(broken=marks) if unread else batch, broken

    def __getitem__(self, key: SampleKey) -> Sample:
        seed, index, *_ = key
        transform = transform_at(self.transform, key)
        broken: list[str] = []
        for attempt in range(1 + MAX_SUBSTITUTES * (self.skip_broken and self.substitutes)):
            chosen = index if attempt == 0 else derive_seed(seed, index, attempt) % len(self.images)
            try:
                image = open_lazy_image(self.images.read(chosen), self.decoder, self.options)
                rng = SampleRNG(*key)
                pixels = transform(image, rng)
            except MemoryError as error:  # not the image's fault
                raise MemoryError(self.images.describe(chosen)) from error
            except ConfigError:  # the fault of the network, the disk or an augmentation; the message is complete
                raise
            except Exception as error:  # decoders raise nearly anything; the loader reports the file and the cause
                broken.append(f"{self.images.describe(chosen)}: {type(error).__name__}: {reason_of(error)}")
                continue
            return Sample(pixels, self.images.label(chosen), chosen, tuple(broken), rng.geometry)
        return Sample(None, self.images.label(index), index, tuple(broken))


def transform_at(transform: Transform, key: SampleKey) -> Transform:
    """Return the transform of a sample."""
    return transform.at_epoch(key[2]) if len(key) > 2 else transform


def as_geometry(found: Sequence[Any], num_views: int) -> Geometry | tuple[Geometry, ...]:
    """Return the geometry of N samples as in `Batch.geometry`; zeros for a broken image."""
    views = [[one[view] if one and num_views > 1 else one for one in found] for view in range(num_views)]
    rows = [torch.tensor([one or (0,) * 8 for one in view], dtype=torch.float32) for view in views]
    parts = tuple(Geometry(row[:, :4], row[:, 4:6].bool(), row[:, 6:].long()) for row in rows)
    return parts if num_views > 1 else parts[0]


def reason_of(error: Exception) -> str:
    """Return the message of an error, without the path of an OSError."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


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


def count_workers(chosen: int, launch: Launch) -> int:
    """Return TRAIN.WORKERS; for -1, this process's share of the cores available on its machine."""
    return chosen if chosen >= 0 else max(1, count_cores() // launch.local_world_size)


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

    They make the batches of several data sets, the `sources`, one pass after the other.

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
                requests = _list_batches(
                    (one for one in itertools.chain([current], expected) if one.samples in sources), position
                )
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
        request[0].read_ahead(request[1])
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
