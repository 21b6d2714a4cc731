"""Memory in which loader processes return batches: mapped once, and used again when the batch is gone."""

import itertools
import math
import mmap
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from distribuuuu.data.batch import map_leaves
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

    def view(self, slot: int) -> np.ndarray:
        """Return a slot as a uint8 array."""
        return np.frombuffer(self._memory, np.uint8, self._slot_bytes, slot * self._slot_bytes)

    def fill(self, samples: Samples, keys: BatchKeys, slot: int) -> "_Returned":
        """Return what a worker sends for a batch that it makes in a slot; it arrives as a HostBatch."""
        memory, used, places = self.view(slot), 0, {}

        def allocate(image: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
            nonlocal used
            start, end = used, used + math.prod(shape) * image.element_size()
            if end > self._slot_bytes:
                return image.new_empty(shape)
            images = torch.from_numpy(memory[start:end]).view(image.dtype).view(shape)
            used, places[images.data_ptr()] = end, _Place(start, end, image.dtype, shape)
            return images

        def pack(tensor: torch.Tensor) -> Any:
            # An array is sent in the message, a tensor in shared memory of its own.
            return places.get(tensor.data_ptr()) or (tensor.numpy() if tensor.ndim < 3 else tensor)

        batch, broken = samples.batch(keys, allocate)
        return _Returned(self.number, slot, map_leaves(torch.Tensor, pack, batch), broken)


class _Place(NamedTuple):
    """The images (N, H, W, C) of a batch in a slot: their bytes, their type and their shape."""

    start: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Returned:
    """A batch whose images are in a slot, if it has images; it arrives as a HostBatch."""

    memory: int
    slot: int
    batch: Any
    broken: tuple[str, ...]

    def __reduce__(self) -> tuple:
        return _receive, (self.memory, self.slot, self.batch, self.broken)


def _receive(number: int, slot: int, batch: Any, broken: tuple[str, ...]) -> HostBatch:
    """Return a batch whose slot becomes free when no tensor refers to its images any more."""
    memory = _MEMORIES[number]
    pixels = memory.view(slot)
    weakref.finalize(pixels, memory.release, slot).atexit = False

    def unpack(leaf: "_Place | np.ndarray") -> torch.Tensor:
        if isinstance(leaf, np.ndarray):
            return torch.from_numpy(leaf)
        part = pixels[leaf.start : leaf.end]  # keeps `pixels`
        return torch.from_numpy(part).view(leaf.dtype).view(leaf.shape).permute(0, 3, 1, 2)

    return map_leaves((_Place, np.ndarray), unpack, batch), broken
