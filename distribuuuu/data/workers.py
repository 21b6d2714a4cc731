"""Loader workers: processes, threads, or the training process itself. All make the same batches."""

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
from torch.utils.data import DataLoader, Sampler

from distribuuuu.config import ConfigError
from distribuuuu.data.samplers import Batch as Positions
from distribuuuu.data.samples import Batch, Samples, collate
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.host import count_cores
from distribuuuu.launch.signals import set_up_worker_signals

# Batches that each worker is ahead; more than two change nothing but the memory.
PREFETCH = 2
# Seconds until the system reports that a process has died whose connection is closed already.
_DEATH_S = 1.0

_LESS_MEMORY = "set fewer TRAIN.WORKERS, DATA.WORKER_KIND thread or a smaller TRAIN.BATCH_SIZE"
# What a signal that ends a worker means, and what helps; any other one is a crash in native code.
_MEANINGS = {
    "SIGKILL": f"the system may have run out of memory; fix: {_LESS_MEMORY}",
    "SIGBUS": "the shared memory in /dev/shm may be too small; fix: enlarge it (docker run --shm-size 8g), or set"
    " DATA.WORKER_KIND thread",
    "SIGTERM": "another program ended it",
}
_CRASH = "native code crashed, e.g. an image decoder; fix: set DATA.DECODER pil, or TRAIN.WORKERS 0 to find the image"


class LoaderWorkerError(ConfigError):
    """A worker was killed, crashed or ran out of memory; says by what, and what helps."""

    one_process = True
    status = 1


def count_workers(chosen: int, launch: Launch) -> int:
    """Return TRAIN.WORKERS, or, for -1, the cores that this process may use, shared with the others of its machine."""
    return chosen if chosen >= 0 else max(1, count_cores() // launch.local_world_size)


def start_workers(
    samples: Samples, sampler: Sampler[Positions], kind: str, num_workers: int, pin_memory: bool
) -> Iterable[Batch]:
    """Return the batches of a sampler; each iteration starts over at the sampler's position.

    Args:
        samples: what the batches are made of.
        sampler: gives the positions of each batch.
        kind: "process": forked here and now, and there to stay; "thread".
        num_workers: how many; 0: the process makes its batches by itself.
        pin_memory: put the batches into page-locked memory.
    """
    if kind == "thread" and num_workers:
        return ThreadWorkers(samples, sampler, num_workers, pin_memory)
    return ProcessWorkers(samples, sampler, num_workers, pin_memory)


class _Gate:
    """A sampler that yields nothing until it is opened, so that workers can be started without work."""

    def __init__(self, sampler: Sampler[Positions]):
        self.sampler = sampler
        self.is_open = False

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Positions]:
        return iter(self.sampler if self.is_open else ())


class ProcessWorkers:
    """Processes, forked here and now, that make batches ahead and stay until this object goes."""

    def __init__(self, samples: Samples, sampler: Sampler[Positions], num_workers: int, pin_memory: bool):
        gate = _Gate(sampler)
        # More workers than cores are the user's choice; the log says how long the batches were waited for.
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
            # From Python 3.14 on a fork has to be asked for.
            multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
        )
        with _without_sigchld_handler():
            iter(self._batches)
        gate.is_open = True
        self._processes = list(self._batches._iterator._workers) if num_workers else []
        if thread := getattr(self._batches._iterator, "_pin_memory_thread", None):
            threading.excepthook = functools.partial(_hide_consequence, threading.excepthook, thread, self._processes)
        # The workers do not hear the SIGTERM that multiprocessing's exit handler and a DataLoader that the garbage
        # collector has taken apart would send them, so they are told to end before either.
        atexit.register(weakref.finalize(self, _end_processes, self._batches))

    def __iter__(self) -> Iterator[Batch]:
        with _failures_explained(self._processes):
            yield from self._batches


@contextlib.contextmanager
def _without_sigchld_handler() -> Iterator[None]:
    """Keep the SIGCHLD handler from before the block, which DataLoader replaces by one that raises.

    It would raise wherever the main thread is when a worker dies, e.g. within a library that catches the error. Without
    it the wait for the next batch of that worker fails.
    """
    is_main = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD")
    before = signal.getsignal(signal.SIGCHLD) if is_main else None
    yield
    if before is not None:
        signal.signal(signal.SIGCHLD, before)


@contextlib.contextmanager
def _failures_explained(processes: Sequence[multiprocessing.Process] = ()) -> Iterator[None]:
    """Raise LoaderWorkerError in place of an error in the block that comes from a dead worker or from lack of memory.

    The other workers are killed: one that died with a lock of their queue would keep them from ending.
    """
    try:
        yield
    except Exception as error:
        may_follow = isinstance(error, (RuntimeError, OSError, EOFError))
        if dead := _find_dead(processes, _DEATH_S if may_follow else 0):
            for process in processes:
                if process is not dead:
                    process.kill()
            dead.join()
            raise LoaderWorkerError(_describe_death(dead.pid, dead.exitcode)) from error
        if isinstance(error, MemoryError):
            what = str(error).strip().rpartition("\n")[2].removeprefix("MemoryError: ")
            raise LoaderWorkerError(f"loading {what} ran out of memory; fix: {_LESS_MEMORY}") from error
        raise


def _find_dead(processes: Sequence[multiprocessing.Process], wait_s: float) -> multiprocessing.Process | None:
    """Return a process that has ended, or ends within some seconds.

    Its exit code is left to one thread: of two that ask at once, one is told that there is none.
    """
    ended = multiprocessing.connection.wait([process.sentinel for process in processes], wait_s) if processes else ()
    return next((process for process in processes if process.sentinel in ended), None)


def _describe_death(pid: int, exitcode: int) -> str:
    if exitcode >= 0:
        return f"loader worker (pid {pid}) ended with status {exitcode}; fix: set TRAIN.WORKERS 0 to find the cause"
    name = signal.Signals(-exitcode).name
    return f"loader worker (pid {pid}) was killed by {name}: {_MEANINGS.get(name, _CRASH)}"


def _hide_consequence(before, thread: threading.Thread, processes: Sequence, problem: threading.ExceptHookArgs) -> None:
    """Print what a thread died of, unless it is the thread that pins memory, after a worker has died."""
    if problem.thread is not thread or not _find_dead(processes, _DEATH_S):
        before(problem)


def _end_processes(batches: DataLoader) -> None:
    if batches._iterator is not None:
        batches._iterator._shutdown_workers()


class ThreadWorkers:
    """Threads that make batches ahead: decoding and resizing leave Python's lock, and no batch changes processes."""

    def __init__(self, samples: Samples, sampler: Sampler[Positions], num_workers: int, pin_memory: bool):
        self._samples = samples
        self._sampler = sampler
        self._pin_memory = pin_memory
        self._ahead = PREFETCH * num_workers
        self._pool = ThreadPoolExecutor(num_workers, "loader")
        self._compute_alone(num_workers)

    def _compute_alone(self, num_workers: int) -> None:
        """Use one thread for the tensors of each worker: the cores belong to the other workers and to the model.

        torch keeps the number for each thread that has set it, and the last one set for all others.
        """
        own, started = torch.get_num_threads(), threading.Barrier(num_workers + 1)
        for _ in range(num_workers):
            # Asked for first: torch sets the number of a thread that has not asked to that of all others.
            self._pool.submit(lambda: (torch.get_num_threads(), torch.set_num_threads(1), started.wait()))
        started.wait()
        torch.set_num_threads(own)

    def __iter__(self) -> Iterator[Batch]:
        positions = iter(self._sampler)
        waiting: deque[Future] = deque()
        try:
            for batch in positions:
                waiting.append(self._pool.submit(self._make, batch))
                if len(waiting) > self._ahead:
                    yield _take(waiting)
            while waiting:
                yield _take(waiting)
        finally:  # also where an epoch is left early
            for future in waiting:
                future.cancel()

    def _make(self, positions: Positions) -> Batch:
        pixels, labels, broken = collate([self._samples[position] for position in positions])
        if self._pin_memory and pixels is not None:
            pixels, labels = pixels.pin_memory(), labels.pin_memory()
        return pixels, labels, broken


def _take(waiting: deque[Future]) -> Batch:
    with _failures_explained():
        return waiting.popleft().result()
