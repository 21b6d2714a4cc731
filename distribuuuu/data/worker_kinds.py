"""Loader workers by their kind: processes, threads or none."""

from collections.abc import Sequence

from distribuuuu.data.workers import Pass, Pool, WorkerBatches


def start_workers(
    passes: Sequence[Pass], kind: str, num_workers: int, pin_memory: bool, batch_bytes: int = 0
) -> list[WorkerBatches]:
    """Return for each pass an iterable over its batches; the same workers make all of them.

    Args:
        passes: each iteration starts at the position that the sampler then has.
        kind: "process" (forked now, kept until the end) or "thread".
        num_workers: 0: this process makes the batches itself.
        pin_memory: put the batches into page-locked memory.
        batch_bytes: size of the images of the largest batch, for which processes share memory; 0: unknown.
    """
    sources = [one.samples for one in passes]
    if not num_workers:
        pool = Pool(sources, pin_memory)
    elif kind == "process":
        from distribuuuu.data.process_workers import ProcessPool

        pool = ProcessPool(sources, num_workers, pin_memory, batch_bytes)
    else:
        from distribuuuu.data.thread_workers import ThreadPool

        pool = ThreadPool(sources, num_workers, pin_memory)
    return [WorkerBatches(pool, one) for one in passes]
