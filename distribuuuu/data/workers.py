"""Makers of batches, without workers or the base of them; batches are identical either way."""

import copy
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from distribuuuu.config import ConfigError
from distribuuuu.data.batch import map_leaves
from distribuuuu.data.make_batch import HostBatch, Samples
from distribuuuu.data.samplers import BatchKeys, EvalSampler, ResumableDistributedSampler
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.host import count_cores

# Batches that each worker prepares ahead; more than two cost memory and gain nothing.
PREFETCH = 2


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
        scheduled = samples.images.remote.schedule(sampler) if samples.images.remote else sampler
        for position, keys in enumerate(itertools.islice(scheduled, first, end), first):
            yield (Pass(samples, sampler), position), (samples, keys)
        first = 0


class WorkerBatches:
    """The batches of a data set; each iteration starts at the position of the sampler."""

    def __init__(self, pool: Pool, source: Pass):
        self.pool, self._source = pool, source

    def __iter__(self) -> Iterator[HostBatch]:
        return self.pool.read(Pass(self._source.samples, copy.copy(self._source.sampler)))
