"""Loader workers: processes, threads or none; batches are identical either way."""

import atexit
import contextlib
import functools
import multiprocessing.connection
import os
import signal
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.utils.data import DataLoader

from distribuuuu.config import ConfigError
from distribuuuu.data.samplers import BatchKeys, MicroBatchSampler
from distribuuuu.data.samples import Batch, Samples, collate
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.host import count_cores
from distribuuuu.launch.signals import set_up_worker_signals

# Batches that each worker prepares ahead; more than two cost memory and gain nothing.
PREFETCH = 2
# Seconds within which the system reports the death of a process whose connection is closed.
_DEATH_S = 1.0

_LESS_MEMORY = "set fewer TRAIN.WORKERS, DATA.WORKER_KIND thread or a smaller TRAIN.BATCH_SIZE"
# Likely cause of each signal that ends a worker, and the fix; any other signal is a crash in native code.
_MEANINGS = {
    "SIGKILL": f"the system may have run out of memory; fix: {_LESS_MEMORY}",
    "SIGBUS": "the shared memory in /dev/shm may be too small; fix: enlarge it (docker run --shm-size 8g), or set"
    " DATA.WORKER_KIND thread",
    "SIGTERM": "another program terminated it",
}
_CRASH = "native code crashed, e.g. an image decoder; fix: set DATA.DECODER pil, or TRAIN.WORKERS 0 to find the image"


class LoaderWorkerError(ConfigError):
    """A worker was killed, crashed or ran out of memory; the message names the cause and the fix."""

    one_process = True
    status = 1


def count_workers(chosen: int, launch: Launch) -> int:
    """Return TRAIN.WORKERS; for -1, this process's share of the cores available on its machine."""
    return chosen if chosen >= 0 else max(1, count_cores() // launch.local_world_size)


def start_workers(
    samples: Samples, sampler: MicroBatchSampler, kind: str, num_workers: int, pin_memory: bool
) -> Iterable[Batch]:
    """Return an iterable over the batches of a sampler; each iteration starts at the sampler's position.

    Args:
        samples, sampler: the samples, and the keys of each batch.
        kind: "process" (forked now, kept until the end) or "thread".
        num_workers: 0: this process makes the batches itself.
        pin_memory: put the batches into page-locked memory.
    """
    if kind == "thread" and num_workers:
        return ThreadWorkers(samples, sampler, num_workers, pin_memory)
    return ProcessWorkers(samples, sampler, num_workers, pin_memory)


class _GatedSampler:
    """A sampler that yields nothing until it is opened, so that idle workers can be started."""

    def __init__(self, sampler: MicroBatchSampler):
        self.sampler = sampler
        self.is_open = False

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[BatchKeys]:
        return iter(self.sampler if self.is_open else ())


class ProcessWorkers:
    """Processes, forked on construction, that prepare batches ahead and live as long as this object."""

    def __init__(self, samples: Samples, sampler: MicroBatchSampler, num_workers: int, pin_memory: bool):
        gate = _GatedSampler(sampler)
        # More workers than cores are the user's choice; the log reports the time spent waiting for batches.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        self._batches = DataLoader(
            samples,
            batch_sampler=gate,
            num_workers=num_workers,
            collate_fn=collate,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            prefetch_factor=PREFETCH if num_workers else None,
            worker_init_fn=functools.partial(set_up_worker_signals, parent=os.getpid()),
            # From Python 3.14, fork is not the default.
            multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
        )
        with _without_sigchld_handler():
            iter(self._batches)
        gate.is_open = True
        self._processes = list(getattr(self._batches._iterator, "_workers", ()))
        if thread := getattr(self._batches._iterator, "_pin_memory_thread", None):
            threading.excepthook = functools.partial(_hide_consequence, threading.excepthook, thread, self._processes)
        # The workers ignore the SIGTERM that multiprocessing's exit handler, or a garbage-collected DataLoader, would
        # send them, so they are shut down before either.
        atexit.register(weakref.finalize(self, _shut_down, self._batches))

    def __iter__(self) -> Iterator[Batch]:
        with _failures_explained(self._processes):
            yield from self._batches


@contextlib.contextmanager
def _without_sigchld_handler() -> Iterator[None]:
    """Restore the SIGCHLD handler after the block, in which DataLoader replaces it by one that raises.

    It would raise anywhere in the main thread when a worker dies, e.g. in a library that catches the error. Without it,
    waiting for the next batch of that worker fails.
    """
    is_main = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD")
    before = signal.getsignal(signal.SIGCHLD) if is_main else None
    yield
    if before is not None:
        signal.signal(signal.SIGCHLD, before)


@contextlib.contextmanager
def _failures_explained(processes: Sequence[multiprocessing.Process] = ()) -> Iterator[None]:
    """Raise LoaderWorkerError for an error in the block that a dead worker or a lack of memory has caused.

    The other workers are killed: if the dead one holds a lock of their queue, they cannot exit.
    """
    try:
        yield
    except Exception as error:
        may_be_death = isinstance(error, (RuntimeError, OSError, EOFError))
        if dead := _find_dead(processes, _DEATH_S if may_be_death else 0):
            for process in processes:
                if process is not dead:
                    process.kill()
            dead.join()
            raise LoaderWorkerError(_describe_death(dead.pid, dead.exitcode or 0)) from error
        if isinstance(error, MemoryError):
            what = str(error).strip().rpartition("\n")[2].removeprefix("MemoryError: ")
            raise LoaderWorkerError(f"loading {what} ran out of memory; fix: {_LESS_MEMORY}") from error
        raise


def _find_dead(processes: Sequence[multiprocessing.Process], wait_s: float) -> multiprocessing.Process | None:
    """Return a process that has ended, or ends within `wait_s`.

    The exit code is read by one thread only: of two that read it at once, one gets None.
    """
    ended = multiprocessing.connection.wait([process.sentinel for process in processes], wait_s) if processes else ()
    return next((process for process in processes if process.sentinel in ended), None)


def _describe_death(pid: int | None, exitcode: int) -> str:
    if exitcode >= 0:
        return f"loader worker (pid {pid}) ended with status {exitcode}; fix: set TRAIN.WORKERS 0 to find the cause"
    name = signal.Signals(-exitcode).name
    return f"loader worker (pid {pid}) was killed by {name}: {_MEANINGS.get(name, _CRASH)}"


def _hide_consequence(hook, thread: threading.Thread, processes: Sequence, failure: threading.ExceptHookArgs) -> None:
    """Call the previous excepthook, unless the thread that pins memory failed because a worker died."""
    if failure.thread is not thread or not _find_dead(processes, _DEATH_S):
        hook(failure)


def _shut_down(batches: DataLoader) -> None:
    getattr(batches._iterator, "_shutdown_workers", lambda: None)()


class ThreadWorkers:
    """Threads that prepare batches ahead: decoding and resizing release the GIL, and no batch crosses processes."""

    def __init__(self, samples: Samples, sampler: MicroBatchSampler, num_workers: int, pin_memory: bool):
        self._samples = samples
        self._sampler = sampler
        self._pin_memory = pin_memory
        self._max_pending = PREFETCH * num_workers
        self._pool = ThreadPoolExecutor(num_workers, "loader")
        self._use_one_core_per_thread(num_workers)

    def _use_one_core_per_thread(self, num_workers: int) -> None:
        """Let torch use one thread within each worker: the other cores belong to the other workers and to the model.

        torch stores the number per thread that has set it, and the last number set for all others.
        """
        num_threads, started = torch.get_num_threads(), threading.Barrier(num_workers + 1)

        def use_one_thread() -> None:
            torch.get_num_threads()  # read first, or torch resets this thread to the number of all others
            torch.set_num_threads(1)
            started.wait()

        for _ in range(num_workers):
            self._pool.submit(use_one_thread)
        started.wait()
        torch.set_num_threads(num_threads)

    def __iter__(self) -> Iterator[Batch]:
        pending: deque[Future] = deque()
        try:
            for keys in self._sampler:
                pending.append(self._pool.submit(self._make_batch, keys))
                if len(pending) > self._max_pending:
                    yield _next_batch(pending)
            while pending:
                yield _next_batch(pending)
        finally:  # also if the epoch is left early
            for future in pending:
                future.cancel()

    def _make_batch(self, keys: BatchKeys) -> Batch:
        images, targets, broken = collate([self._samples[key] for key in keys])
        if self._pin_memory and images is not None:
            images, targets = images.pin_memory(), targets.pin_memory()
        return images, targets, broken


def _next_batch(pending: deque[Future]) -> Batch:
    with _failures_explained():
        return pending.popleft().result()
