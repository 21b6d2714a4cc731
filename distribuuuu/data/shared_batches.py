"""Memory in which loader processes return batches: mapped once, and used again when the batch is gone."""

import itertools
import math
import mmap
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distribuuuu.data.samplers import BatchKeys
from distribuuuu.data.samples import HostBatch, Samples

# By number, which is the same in a forked process.
_MEMORIES: "weakref.WeakValueDictionary[int, BatchMemory]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class BatchMemory:
    """Slots for the images of a batch, shared with processes that are forked later.

    torch returns each batch in new shared memory: its pages are mapped and cleared by the system, and a file descriptor
    is sent through a socket, which another thread of the worker serves. Here neither happens. The memory is anonymous,
    so the size of /dev/shm does not limit it.

    Args:
        num_slots: number of batches.
        slot_bytes: largest size of the images of a batch; larger ones are returned as torch does.
    """

    def __init__(self, num_slots: int, slot_bytes: int):
        self._memory = mmap.mmap(-1, num_slots * slot_bytes)
        self._slot_bytes = slot_bytes
        self._free = deque(range(num_slots))
        self.number = next(_NUMBERS)
        _MEMORIES[self.number] = self

    def reserve(self) -> int | None:
        """Return a free slot; None: all are in use."""
        return self._free.popleft() if self._free else None

    def release(self, slot: int) -> None:
        """Free a slot; any thread may call it."""
        self._free.append(slot)

    def view(self, slot: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return the start of a slot as a uint8 array."""
        return np.frombuffer(self._memory, np.uint8, math.prod(shape), slot * self._slot_bytes).reshape(shape)

    def fill(self, samples: Samples, keys: BatchKeys, slot: int) -> "_Returned":
        """Return what a worker sends for a batch that it makes in a slot; it arrives as a Batch."""
        shapes: list[tuple[int, ...]] = []

        def allocate(image: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
            if image.dtype != torch.uint8 or math.prod(shape) > self._slot_bytes:
                return image.new_empty(shape)
            shapes.append(shape)
            return torch.from_numpy(self.view(slot, shape))

        images, targets, broken = samples.batch(keys, allocate)
        if images is None or not shapes:
            return _Returned(self.number, slot, None, (images, targets, broken))
        return _Returned(self.number, slot, shapes[0], (None, targets.numpy(), broken))


@dataclass(frozen=True)
class _Returned:
    """A batch whose images are in a slot, if it has a shape; it arrives as a Batch."""

    memory: int
    slot: int
    shape: tuple[int, ...] | None
    batch: tuple[Any, Any, tuple[str, ...]]

    def __reduce__(self) -> tuple:
        return _receive, (self.memory, self.slot, self.shape, self.batch)


def _receive(number: int, slot: int, shape: tuple[int, ...] | None, batch: tuple) -> HostBatch:
    """Return a batch whose slot becomes free when no tensor refers to its images any more."""
    memory = _MEMORIES[number]
    if shape is None:
        memory.release(slot)
        return batch
    pixels = memory.view(slot, shape)
    weakref.finalize(pixels, memory.release, slot).atexit = False
    _, targets, broken = batch
    return torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.from_numpy(targets), broken
