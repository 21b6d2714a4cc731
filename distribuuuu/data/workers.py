"""Loader workers: processes, threads or none; batches are identical either way."""

import atexit
import contextlib
import copy
import functools
import gc
import itertools
import multiprocessing.connection
import signal
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from distribuuuu.config import ConfigError
from distribuuuu.config.plugins import ImportedPlugins
from distribuuuu.data.batch import map_leaves
from distribuuuu.data.samplers import BatchKeys, EvalSampler, ResumableDistributedSampler
from distribuuuu.data.samples import HostBatch, Samples
from distribuuuu.data.shared_batches import BatchMemory
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.host import count_cores
from distribuuuu.launch.processes import set_up_worker

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


class Pass(NamedTuple):
    """An iteration over the batches of a data set, from the sampler's position; over `num` of them if expected.

    The batches of equal samplers are equal.
    """

    samples: Samples
    sampler: EvalSampler | ResumableDistributedSampler
    num: int | None = None


def start_workers(
    passes: Sequence[Pass], kind: str, num_workers: int, pin_memory: bool, batch_bytes: int = 0
) -> list["WorkerBatches"]:
    """Return for each pass an iterable over its batches; the same workers make all of them.

    Args:
        passes: each iteration starts at the position that the sampler then has.
        kind: "process" (forked now, kept until the end) or "thread".
        num_workers: 0: this process makes the batches itself.
        pin_memory: put the batches into page-locked memory.
        batch_bytes: size of the images of the largest batch, for which processes share memory; 0: unknown.
    """
    sources = [one.samples for one in passes]
    if num_workers and kind == "process":
        pool: Pool = ProcessPool(sources, num_workers, pin_memory, batch_bytes)
    else:
        pool = ThreadPool(num_workers, pin_memory) if num_workers else Pool(pin_memory)
    workers = Workers(pool, sources)
    return [WorkerBatches(workers, one) for one in passes]


# The samples and the keys of a batch to make.
BatchRequest = tuple[Samples, BatchKeys]


class Stream:
    """The batches to make: those of one pass after the other, the first pass from a position on.

    Attributes:
        pending: the pass and the position of each batch that was started and is not taken yet, the oldest first.
        following: those of the batch after the one that was taken last.
    """

    following: tuple[Pass, int] | None = None

    def __init__(self, passes: Iterable[Pass], first: int):
        self.pending: deque[tuple[Pass, int]] = deque()
        self._batches = self._list_batches(passes, first)

    def start(self, num: int) -> Iterator[BatchRequest]:
        """Yield the requests of the next batches, until `num` of them are pending."""
        for place, request in itertools.islice(self._batches, num - len(self.pending)):
            self.pending.append(place)
            yield request

    @staticmethod
    def _list_batches(passes: Iterable[Pass], first: int) -> Iterator[tuple[tuple[Pass, int], BatchRequest]]:
        for samples, sampler, end in passes:
            scheduled = samples.images.remote.schedule(sampler) if samples.images.remote else sampler
            for position, keys in enumerate(itertools.islice(scheduled, first, end), first):
                yield (Pass(samples, sampler), position), (samples, keys)
            first = 0


class Workers:
    """A pool that makes the batches of several data sets, the `sources`, one pass after the other.

    Attributes:
        expected: the passes that probably follow the next one. At its end, the pool continues with them; if another
            pass follows, their batches are discarded. Passes over other data sets, whose loader has workers of its own,
            are skipped. The iterable must not refer to the workers, which keep it.
        stream: what the pool makes; None: a pass starts anew.
    """

    def __init__(self, pool: "Pool", sources: Sequence[Samples]):
        self.pool, self._sources = pool, sources
        self.expected: Iterable[Pass] = ()
        self.stream: Stream | None = None

    def read(self, current: Pass) -> Iterator[HostBatch]:
        """Yield the batches of a pass. If passes are read in turn, some batches are made again."""
        expected, self.expected, sources = self.expected, (), self._sources
        with _failures_explained(self.pool.processes):
            for position in range(len(current.sampler)):
                stream, self.stream = self.stream, None  # after an error, no pass continues with this stream
                if not stream or (stream.pending[0] if stream.pending else stream.following) != (current, position):
                    self.pool.clear()
                    passes = (one for one in itertools.chain([current], expected) if one.samples in sources)
                    stream = Stream(passes, position)
                for request in stream.start(1 + self.pool.num_ahead):
                    self.pool.submit(request)
                batch = self.pool.take()
                stream.pending.popleft()
                stream.following, self.stream = (current, position + 1), stream
                yield batch


class WorkerBatches:
    """The batches of a data set; each iteration starts at the position of the sampler."""

    def __init__(self, workers: Workers, source: Pass):
        self.workers, self._source = workers, source

    def __iter__(self) -> Iterator[HostBatch]:
        return self.workers.read(Pass(self._source.samples, copy.copy(self._source.sampler)))


class Pool:
    """Makers of batches in the order of their submission: here the calling thread, in subclasses workers.

    Attributes:
        num_ahead: how many batches besides the next one may be submitted before one is taken.
        processes: the workers that are processes.
    """

    num_ahead = 0
    processes: Sequence[multiprocessing.Process] = ()

    def __init__(self, pin_memory: bool):
        self._pin_memory = pin_memory
        self._submitted: deque[Any] = deque()

    def submit(self, request: BatchRequest) -> None:
        """Start a batch."""
        self._submitted.append(request)

    def take(self) -> HostBatch:
        """Wait for the oldest batch and return it."""
        return _make_batch(self._submitted.popleft(), self._pin_memory)

    def clear(self) -> None:
        """Discard all batches that were submitted."""
        self._submitted.clear()


def _make_batch(request: BatchRequest, pin_memory: bool) -> HostBatch:
    samples, keys = request
    batch, broken = samples.batch(keys)
    return map_leaves(torch.Tensor, torch.Tensor.pin_memory, batch) if pin_memory else batch, broken


class ThreadPool(Pool):
    """Threads: decoding and resizing release the GIL, and no batch crosses processes."""

    def __init__(self, num_workers: int, pin_memory: bool):
        super().__init__(pin_memory)
        self.num_ahead = PREFETCH * num_workers
        self._threads = ThreadPoolExecutor(num_workers, "loader")
        weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)
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
            self._threads.submit(use_one_thread)
        started.wait()
        torch.set_num_threads(num_threads)

    def submit(self, request: BatchRequest) -> None:
        """Let a thread make a batch."""
        self._submitted.append(self._threads.submit(_make_batch, request, self._pin_memory))

    def take(self) -> HostBatch:
        """Wait for the oldest batch and return it."""
        return self._submitted.popleft().result()

    def clear(self) -> None:
        """Discard all batches, after those that are being made."""
        wait([future for future in self._submitted if not future.cancel()])
        super().clear()


# -------------------------------------------------------- processes: the only place that knows the DataLoader of torch


class ProcessPool(Pool):
    """Processes of a DataLoader, forked on construction, that live as long as this object."""

    def __init__(self, sources: Sequence[Samples], num_workers: int, pin_memory: bool, batch_bytes: int):
        super().__init__(pin_memory)
        self.num_ahead = PREFETCH * num_workers
        memory = None
        if batch_bytes and sys.platform == "linux":
            with contextlib.suppress(OSError):  # without enough memory, batches are returned as torch does
                # Besides the batches made ahead, the last one and the next.
                memory = BatchMemory(self.num_ahead + 2, batch_bytes)
        # More workers than cores are the user's choice; the log reports the time spent waiting for batches.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        self._batches = DataLoader(
            _Maker(sources, memory),
            batch_sampler=_Sender(self._submitted, sources, memory),
            num_workers=num_workers,
            collate_fn=_unchanged,
            pin_memory=pin_memory,
            persistent_workers=True,
            prefetch_factor=PREFETCH,
            worker_init_fn=_set_up_worker,
            # From Python 3.14, fork is not the default.
            multiprocessing_context="fork" if sys.platform == "linux" else None,
        )
        with _without_sigchld_handler():
            running: Any = iter(self._batches)
        self._running: Iterator[HostBatch] | None = None
        self.processes = list(running._workers)
        if thread := getattr(running, "_pin_memory_thread", None):
            threading.excepthook = functools.partial(_hide_consequence, threading.excepthook, thread, self.processes)
        # The workers ignore the SIGTERM that multiprocessing's exit handler, or a garbage-collected DataLoader, would
        # send them, so they are shut down before either.
        atexit.register(weakref.finalize(self, running._shutdown_workers))

    def take(self) -> HostBatch:
        """Wait for the oldest batch and return it; the batches submitted before are sent to the workers here."""
        if self._running is None:
            self._running = iter(self._batches)  # always the same object
        # The batch, or another one that arrives before it, may be for training; an evaluation may be running.
        with torch.inference_mode(False):
            return next(self._running)

    def clear(self) -> None:
        """Discard all batches; the DataLoader does so when it is iterated anew."""
        super().clear()
        self._running = None


class _Sender:
    """The batch sampler: of each batch submitted the number of its samples, its keys, and a slot of the memory."""

    def __init__(self, submitted: deque[BatchRequest], sources: Sequence[Samples], memory: BatchMemory | None):
        self._submitted, self._sources, self._memory = submitted, sources, memory

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> tuple[int, BatchKeys, int | None]:
        if not self._submitted:
            raise StopIteration
        samples, keys = self._submitted.popleft()
        return self._sources.index(samples), keys, self._memory.reserve() if self._memory else None


class _Maker(Dataset):
    """The data set, from which a worker selects a whole batch."""

    def __init__(self, sources: Sequence[Samples], memory: BatchMemory | None):
        self._sources, self._memory = sources, memory

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is not forked must import the plug-ins before it reads objects of their classes.
        return {"_plugins": ImportedPlugins(), **vars(self)}

    def __getitems__(self, sent: tuple[int, BatchKeys, int | None]) -> Any:
        number, keys, slot = sent
        samples = self._sources[number]
        return samples.batch(keys) if slot is None or not self._memory else self._memory.fill(samples, keys, slot)


def _unchanged(batch: Any) -> Any:
    return batch


def _set_up_worker(worker_id: int) -> None:
    """Let a worker exit with its parent, and leave all objects as they were at the fork.

    Otherwise, the garbage collector could shut down workers of the parent here, with tracebacks of multiprocessing; it
    would also write to the memory of all objects, which would no longer be shared.
    """
    gc.freeze()
    set_up_worker()


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
