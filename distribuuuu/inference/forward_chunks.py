"""Chunks of images, each for one forward pass.

The last bits of a result depend on the number of images in its forward pass. The chunks depend only on the number of
all images and on TEST.BATCH_SIZE, so results are the same for any number of processes and workers.
A broken image is replaced by zeros, so that its chunk keeps its size.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from distribuuuu.data.batch import Batch, Pass, Samples
from distribuuuu.data.datasets.base import ImageDataset, read_file
from distribuuuu.data.image_faults import ImageFault
from distribuuuu.data.loader import Loader, count_bytes, start_workers
from distribuuuu.data.samplers import BatchKeys, EvalSampler, split_images

T = TypeVar("T")
# Images that a worker loads at a time.
LOADED = 32


def one_behind(items: Iterable[T], device: torch.device) -> Iterator[T]:
    """Yield items; on CUDA each one after the next, which the device computes while the host reads this one."""
    held: list[T] = []
    for item in items:
        yield from held
        held = [item] if device.type == "cuda" else []
        if not held:
            yield item
    yield from held


def list_spans(num_images: int, chunk_size: int) -> list[range]:
    """Return the positions of the images of each chunk; the last chunk may have fewer images."""
    return [range(first, min(first + chunk_size, num_images)) for first in range(0, num_images, chunk_size)]


class UnlabeledImages(ImageDataset):
    """Images without labels: paths, PIL images, or uint8 pixels; the label of an image is its position."""

    def __init__(self, items: Sequence[Any]):
        self.items = items
        self.labels = range(len(items))

    def read(self, index: int) -> Any:
        """Return the bytes of a file, or the image itself."""
        item = self.items[index]
        return read_file(os.fspath(item)) if isinstance(item, (str, os.PathLike)) else item

    def describe(self, index: int) -> str:
        """Return the path of an image; of one in memory its position."""
        item = self.items[index]
        return os.fspath(item) if isinstance(item, (str, os.PathLike)) else f"image {index}"


class SpanSampler(EvalSampler):
    """The images of some chunks, in batches of at most `batch_size` that do not cross the end of a chunk."""

    def __init__(self, spans: Sequence[range], batch_size: int):
        self.spans = spans
        self.batch_size = batch_size
        self.max_num_batches = len(self)

    def __len__(self) -> int:
        return sum(map(self.num_batches, self.spans))

    def num_batches(self, span: range) -> int:
        return -(-len(span) // self.batch_size)

    def __iter__(self) -> Iterator[BatchKeys]:
        for span in self.spans:
            yield from split_images(span, self.batch_size)


class ChunkLoader(Loader):
    """The chunks `spans` of a list of images on a device, transformed by an `EvalTransform`.

    A worker loads `batch_size` images at a time, which does not change the result; it is of a `kind`, "process" or
    "thread".
    """

    sampler: SpanSampler

    def __init__(
        self,
        images: ImageDataset,
        transform: Any,
        spans: Sequence[range],
        device: torch.device,
        batch_size: int,
        workers: int,
        kind: str,
    ):
        samples = Samples(images, transform.crop, transform.decoder, True, transform.options, substitutes=False)
        sampler = SpanSampler(spans, batch_size)
        pin_memory, batch_bytes = device.type == "cuda", count_bytes(samples, sampler)
        (batches,) = start_workers([Pass(samples, sampler)], kind, workers, pin_memory, batch_bytes)
        super().__init__(samples, sampler, batches, transform.normalizer(device, transform.channels_last))
        # The fault of each image that cannot be read, by its position, until its chunk is taken.
        self._causes: dict[int, ImageFault] = {}

    def host_batches(self) -> Iterator[Batch]:
        """Yield batches of uint8 images (N, 3, H, W) as they come from the workers."""
        for batch, faults in self._batches:
            assert batch is not None and batch.index is not None  # broken images are zeros
            broken = batch.index[batch.broken].tolist() if batch.broken is not None else []
            self._causes.update(zip(broken, faults, strict=True))
            yield batch

    def chunks(self) -> Iterator[tuple[range, torch.Tensor, dict[int, ImageFault]]]:
        """Yield each chunk: its positions, its images float32 (N, 3, H, W), and the faults of those not read."""
        batches = iter(self)
        for span in self.sampler.spans:
            parts = [batch.images for batch in itertools.islice(batches, self.sampler.num_batches(span))]
            images = torch.cat(parts) if len(parts) > 1 else parts[0]
            yield span, images, {index: self._causes.pop(index) for index in span if index in self._causes}
