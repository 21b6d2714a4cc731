"""Process pool that yields its results in the order of the images."""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.launch.processes import set_up_worker

# Maximum number of pending tasks per worker.
AHEAD = 3

# The function that a worker applies to the index of an image.
_function: Callable[[int], Any]


def map_in_order(
    function: Callable[[int], Any], indices: range, num_workers: int, chunk: int = 4
) -> Generator[tuple[range, list[Any]], None, None]:
    """Yield (some indices, the result of each) in order; close the generator to stop the workers early.

    The workers (0: this process) inherit the function by fork, so only its results are pickled, of `chunk` images at a
    time. If one dies, a ConfigError is raised.
    """
    chunks = [indices[start : start + chunk] for start in range(0, len(indices), chunk)]
    if num_workers == 0:
        yield from ((part, [function(index) for index in part]) for part in chunks)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(num_workers, context, _start_worker, (function,))
    pending: deque[tuple[range, Future]] = deque()
    try:
        for part in chunks:
            pending.append((part, pool.submit(_run_chunk, part)))
            if len(pending) == AHEAD * num_workers:
                first, future = pending.popleft()
                yield first, future.result()
        for part, future in pending:
            yield part, future.result()
    except BrokenProcessPool as error:
        reason = "the system may be out of memory; run the same command again with fewer --workers"
        raise ConfigError(f"--workers {num_workers}: a worker process was killed: {reason}") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(function: Callable[[int], Any]) -> None:
    """Ignore signals except the SIGTERM of the pool, and die with the parent."""
    global _function
    _function = function
    set_up_worker()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    import torch

    torch.set_num_threads(1)


def _run_chunk(chunk: range) -> list[Any]:
    return [_function(index) for index in chunk]
