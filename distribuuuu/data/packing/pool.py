"""Work on images in worker processes, with the answers in the order of the images."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.launch.signals import die_with_parent, ignore_signals

# Images that a worker takes at a time, and how many such handfuls there may be for each worker.
CHUNK = 4
AHEAD = 3

# What a worker does with the number of an image.
_work: Callable[[int], Any]


def in_order(work: Callable[[int], Any], numbers: range, num_workers: int) -> Iterator[tuple[range, list[Any]]]:
    """Yield (some numbers, work(number) of each), in order; close it to end the workers early.

    Args:
        work: it is inherited by the workers, so it needs no pickling; what it returns does.
        numbers: of the images.
        num_workers: processes; 0: work here.

    Raises:
        ConfigError: a worker died.
    """
    chunks = [numbers[start : start + CHUNK] for start in range(0, len(numbers), CHUNK)]
    if num_workers == 0:
        yield from ((chunk, [work(number) for number in chunk]) for chunk in chunks)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(num_workers, context, _start_worker, (work, os.getpid()))
    waiting: deque = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_work_on, chunk)))
            if len(waiting) == AHEAD * num_workers:
                yield _take(waiting)
        while waiting:
            yield _take(waiting)
    except BrokenProcessPool as error:
        why = "the system may have run out of memory: run the same command again with fewer --workers"
        raise ConfigError(f"--workers {num_workers}: a worker process was killed; {why}") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _take(waiting: deque) -> tuple[range, list[Any]]:
    chunk, answer = waiting.popleft()
    return chunk, answer.result()


def _start_worker(work: Callable[[int], Any], parent: int) -> None:
    """Leave the signals to the parent, except its end and the SIGTERM that the pool sends."""
    global _work
    _work = work
    ignore_signals()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    import torch

    torch.set_num_threads(1)


def _work_on(chunk: range) -> list[Any]:
    return [_work(number) for number in chunk]
