"""Loader workers that are threads."""

import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from distribuuuu.data.make_batch import HostBatch, Samples
from distribuuuu.data.seeding import lend_generators
from distribuuuu.data.workers import PREFETCH, BatchRequest, Pool, make_batch


class ThreadPool(Pool):
    """Threads: decoding and resizing release the GIL, and no batch crosses processes."""

    def __init__(self, sources: Sequence[Samples], num_workers: int, pin_memory: bool):
        super().__init__(sources, pin_memory)
        self.num_ahead = PREFETCH * num_workers
        self._threads = ThreadPoolExecutor(num_workers, "loader")
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
        self._submitted.append(self._threads.submit(make_batch, *request, self._pin_memory))

    def take(self) -> HostBatch:
        """Wait for the oldest batch and return it."""
        with lend_generators():
            return self._submitted.popleft().result()

    def clear(self) -> None:
        """Discard all batches, after those that are being made."""
        with lend_generators():
            wait([future for future in self._submitted if not future.cancel()])
        super().clear()
