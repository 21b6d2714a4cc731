"""Loader workers: processes or threads."""

import atexit
import contextlib
import gc
import itertools
import math
import mmap
import multiprocessing
import os
import pickle
import queue
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from distribuuuu.config import ConfigError
from distribuuuu.data.batch import (
    PREFETCH,
    BatchRequest,
    HostBatch,
    LoaderWorkerError,
    Pool,
    Samples,
    make_batch,
    map_leaves,
    pinned,
)
from distribuuuu.data.samplers import BatchKeys
from distribuuuu.data.seeding import unlocked_generators
from distribuuuu.launch.processes import set_up_worker

# Seconds within which the system reports the death of a process whose connection is closed.
_DEATH_S = 5.0
# Seconds that a worker has to exit.
_END_S = 1.0


class ThreadPool(Pool):
    """Threads: decoding and resizing release the GIL, and no batch crosses processes."""

    def __init__(self, sources: Sequence[Samples], num_workers: int, pin_memory: bool):
        super().__init__(sources, pin_memory)
        self.num_ahead = PREFETCH * num_workers
        self._threads, self._has_failed = ThreadPoolExecutor(num_workers, "loader"), threading.Event()
        weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)
        # torch uses one thread within each worker: the other cores belong to the other workers and to the model. It
        # stores the number per thread that has set it, and the last number set for all others.
        num_threads, started = torch.get_num_threads(), threading.Barrier(num_workers + 1)

        def use_one_thread() -> None:
            torch.get_num_threads()  # read first, or torch resets this thread to the number of all others
            torch.set_num_threads(1)
            started.wait()

        for _ in range(num_workers):
            self._threads.submit(use_one_thread)
        started.wait()
        torch.set_num_threads(num_threads)

    def submit(self, request: BatchRequest) -> None:
        """Let a thread make a batch."""
        self._submitted.append(self._threads.submit(_make_batch, self._has_failed, *request, self._pin_memory))

    def take(self) -> HostBatch:
        """Wait for the oldest batch and return it."""
        with unlocked_generators():
            return self._submitted.popleft().result()

    def clear(self) -> None:
        """Discard all batches, after those that are being made."""
        with unlocked_generators():
            wait([future for future in self._submitted if not future.cancel()])
        self._has_failed = threading.Event()
        super().clear()


def _make_batch(has_failed: threading.Event, *request: Any) -> HostBatch:
    """Make a batch, but none after one that failed: a process ends when its threads do, and each may await a server."""
    if has_failed.is_set():
        raise CancelledError
    try:
        return make_batch(*request)
    except BaseException:
        has_failed.set()
        raise


# --------------------------------------------------------------------------------------- processes


class ProcessPool(Pool):
    """Processes, started on construction, that live as long as this object; each makes every n-th batch.

    Each has a pipe, in which it gets the keys of a batch and returns its labels. The pixels are in slots of memory that
    all processes share, see `BatchMemory`. A process has ended if its end of the pipe is closed.
    """

    def __init__(self, sources: Sequence[Samples], num_workers: int, pin_memory: bool, batch_bytes: int):
        super().__init__(sources, pin_memory)
        self.num_ahead = PREFETCH * num_workers
        self._memory = None
        if batch_bytes and sys.platform == "linux":
            with contextlib.suppress(OSError):  # without enough memory, the pipes carry the pixels
                # Besides the batches made ahead, the last one and the next.
                self._memory = BatchMemory(self.num_ahead + 2, batch_bytes)
        # From Python 3.14, fork is not the default.
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        pipes: list[Connection] = []
        self.processes: list[Any] = []
        # They ignore the SIGTERM that multiprocessing sends at exit, so they end before.
        atexit.register(weakref.finalize(self, _end_workers, os.getpid(), pipes, self.processes))
        for _ in range(num_workers):
            own, other = context.Pipe()
            pipes.append(own)
            plugins, inherited = None, pipes
            if context.get_start_method() != "fork":  # it must import the plug-ins before it reads objects of them
                plugins, inherited = import_module("distribuuuu.config.plugins").ImportedPlugins(), []
            arguments = plugins, self._sources, self._memory, other, inherited
            self.processes.append(context.Process(target=_work, args=arguments, daemon=True))
            self.processes[-1].start()
            other.close()
        self._turns = itertools.cycle(zip(pipes, self.processes, strict=True))
        self._pinning = ThreadPoolExecutor(1, "pin memory") if pin_memory else None
        if self._pinning:
            weakref.finalize(self, self._pinning.shutdown, wait=False, cancel_futures=True)

    def submit(self, request: BatchRequest) -> None:
        """Let the process whose turn it is make a batch."""
        pipe, process = next(self._turns)
        slot = self._memory.reserve() if self._memory else None
        with contextlib.suppress(ConnectionError):  # it has ended, as `take` will report
            pipe.send((self._sources.index(request[0]), request[1], slot))
        sent = pipe, process, slot, self._memory
        self._submitted.append(self._pinning.submit(_receive_pinned, *sent) if self._pinning else sent)

    def take(self) -> HostBatch:
        """Wait for the oldest batch and return it."""
        sent = self._submitted.popleft()
        if isinstance(sent, Future):
            return sent.result()
        with torch.inference_mode(False):  # an evaluation may be running, and the batch be for training
            return _receive(*sent)

    def clear(self) -> None:
        """Discard all batches, after they are made."""
        while self._submitted:
            with contextlib.suppress(Exception):
                self.take()


class BatchMemory:
    """Slots for the images of a batch, shared with processes that are forked later.

    It is mapped once. A slot is used again when no tensor refers to its images any more; larger images than fit into it
    are sent in the pipe. The memory is anonymous, so the size of /dev/shm does not limit it.
    """

    def __init__(self, num_slots: int, slot_bytes: int):
        self._memory, self._slot_bytes = mmap.mmap(-1, num_slots * slot_bytes), slot_bytes
        self._free = deque(range(num_slots))

    def reserve(self) -> int | None:
        """Return a free slot; None: all are in use."""
        return self._free.popleft() if self._free else None

    def view(self, slot: int) -> np.ndarray:
        """Return a slot as a uint8 array."""
        return np.frombuffer(self._memory, np.uint8, self._slot_bytes, slot * self._slot_bytes)

    def open(self, slot: int) -> np.ndarray:
        """Return a slot that becomes free with the array and its views."""
        pixels = self.view(slot)
        weakref.finalize(pixels, self._free.append, slot).atexit = False
        return pixels


class _Pixels(NamedTuple):
    """The images (N, H, W, C) of a batch: an array, or the bytes of a slot from `start` on."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    array: np.ndarray | None = None


def _receive(pipe: Connection, process: Any, slot: int | None, memory: BatchMemory | None) -> HostBatch:
    """Wait for the batch that a process makes and return it; raise its error, or LoaderWorkerError if it has ended."""
    pixels = memory.open(slot) if memory and slot is not None else np.empty(0, np.uint8)
    try:
        batch, broken, error, trace = pipe.recv()
    except (EOFError, OSError) as closed:
        from distribuuuu.hints.loader_workers import describe_death

        process.join(_DEATH_S)
        raise LoaderWorkerError(describe_death(process.pid, process.exitcode)) from closed
    if error:
        raise error from (RuntimeError(f"in a loader worker:\n{trace}") if trace else None)

    def unpack(leaf: "_Pixels | np.ndarray") -> torch.Tensor:
        if isinstance(leaf, np.ndarray):
            return torch.from_numpy(leaf)
        if leaf.array is not None:
            return torch.from_numpy(leaf.array).permute(0, 3, 1, 2)
        part = pixels[leaf.start : leaf.start + math.prod(leaf.shape) * leaf.dtype.itemsize]  # keeps `pixels`
        return torch.from_numpy(part).view(leaf.dtype).view(leaf.shape).permute(0, 3, 1, 2)

    return map_leaves((_Pixels, np.ndarray), unpack, batch), broken


def _receive_pinned(*sent: Any) -> HostBatch:
    return pinned(_receive(*sent))


def _end_workers(parent: int, pipes: Sequence[Connection], processes: Sequence[Any]) -> None:
    """End the workers, in the process that has started them; kill those that do not end at once."""
    if os.getpid() != parent:
        return
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.send(None)
    for process in processes:
        process.join(_END_S)
        process.kill()
        process.join()


def _work(
    plugins: Any, sources: Sequence[Samples], memory: BatchMemory | None, pipe: Connection, inherited: Sequence
) -> None:
    """Make the batches that are requested, until the parent has ended; runs in a process of its own."""
    gc.freeze()  # the objects of the parent stay as they are, and their memory shared
    set_up_worker()
    torch.set_num_threads(1)
    for end in inherited:
        end.close()
    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(pipe, requests), daemon=True).start()
    while True:
        number, keys, slot = requests.get()
        try:
            pixels = memory.view(slot) if memory and slot is not None else np.empty(0, np.uint8)
            answer: tuple[Any, ...] = (*_pack_batch(sources[number], keys, pixels), None, "")
        except Exception as error:
            is_message = isinstance(error, (ConfigError, MemoryError))
            answer = None, (), _picklable(error), "" if is_message else traceback.format_exc()
        try:
            pipe.send(answer)
        except ConnectionError:
            os._exit(0)


def _read_requests(pipe: Connection, requests: queue.SimpleQueue) -> None:
    """Pass requests on, so that the parent never waits to send one; exit with the parent, or when it says so."""
    with contextlib.suppress(EOFError, OSError):
        while (request := pipe.recv()) is not None:
            requests.put(request)
    sys.stdout.flush()
    os._exit(0)


def _pack_batch(samples: Samples, keys: BatchKeys, memory: np.ndarray) -> tuple[Any, tuple[str, ...]]:
    """Return a batch as it is sent: its images are in the memory if they fit, other tensors are arrays."""
    used, places = 0, {}

    def allocate(image: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        nonlocal used
        start, end = used, used + math.prod(shape) * image.element_size()
        if end <= len(memory):
            used, array = end, None
            images = torch.from_numpy(memory[start:end]).view(image.dtype).view(shape)
        else:
            images = image.new_empty(shape)
            array = images.numpy()
        places[images.data_ptr()] = _Pixels(start, image.dtype, shape, array)
        return images

    batch, broken = samples.batch(keys, allocate)
    return map_leaves(torch.Tensor, lambda part: places.get(part.data_ptr()) or part.numpy(), batch), broken


def _picklable(error: Exception) -> Exception:
    """Return an error, or its text if another process cannot read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
