"""A trace of training steps by torch's profiler, and the times of their parts (`train --profile N`)."""

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, record_function

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import counted
from distribuuuu.distributed import comm as dist
from distribuuuu.engine.run import Run

logger = logging.getLogger(__name__)

# Steps before the trace, which compile and allocate; operations and gaps that are listed; the folder in OUT_DIR.
WARM_UP, NUM_LISTED, FOLDER = 3, 10, "profile"


@contextlib.contextmanager
def labeled_parts(run: Run) -> Iterator[None]:
    """Label the parts of steps in a trace: data, forward (with the loss), backward, optimizer (with the clipping)."""
    precision = run.state.precision
    methods = {"data": (run.train_loader, "batches_from"), "forward": (run.task, "train_step"),
               "backward": (precision, "backward"), "optimizer": (precision, "step")}  # fmt: skip

    def call(part: str, function: Callable, *args: Any) -> Any:
        with record_function(part):
            return function(*args)

    def open_batches(batches_from: Callable[..., Iterator], *position: Any) -> Iterator:
        batches = batches_from(*position)
        while (batch := call("data", next, batches, None)) is not None:
            yield batch

    for part, (owner, name) in methods.items():
        labeled = open_batches if part == "data" else functools.partial(call, part)
        setattr(owner, name, functools.partial(labeled, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name in methods.values():
            vars(owner).pop(name, None)  # the method of its class is called again


def _sum_parts(run: Run) -> dict[str, float]:
    """Return the seconds of each part of all steps so far; on CUDA, wait for the device."""
    if run.train_loader.device.type == "cuda":
        torch.cuda.synchronize(run.train_loader.device)
    for part, seconds in {"data": run.train_loader.pop_data_time(), **run.state.clock.pop()}.items():
        run.log.spent[part] += seconds
    return {part: run.log.spent[part] for part in ("data", "forward", "backward", "optimizer", "step")}


def find_gaps(events: Iterable[Any], on_cuda: bool) -> list[tuple[float, str]]:
    """Return the longest gaps between operations, on the GPU or in the thread of the steps: ms, and what follows."""
    threads = {event.thread for event in events if event.name == "forward"}
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events
                   if not event.is_user_annotation and (event.device_type == DeviceType.CUDA) == on_cuda
                   and (on_cuda or event.thread in threads))  # fmt: skip
    ends = itertools.accumulate((end for _, end, _ in spans), max)
    gaps = (((start - end) / 1e3, name) for (start, _, name), end in zip(spans[1:], ends, strict=False))
    return sorted((gap for gap in gaps if gap[0] > 0), reverse=True)[:NUM_LISTED]


@contextlib.contextmanager
def profile_steps(run: Run, num_steps: int, stop_epoch: int | None) -> Iterator[None]:
    """Profile steps of the run in the block, after some others; raise ConfigError if it has fewer left."""
    per_epoch = run.train_loader.num_steps
    end = min(run.log.total_steps, per_epoch * (stop_epoch or run.cfg.OPTIM.MAX_EPOCH))
    left = max(0, end - run.state.epoch * per_epoch - run.state.step)
    if left < WARM_UP + num_steps:
        message = f"got {num_steps}; the run has {counted(left, 'step')} left, and the first {WARM_UP} are not profiled"
        raise ConfigError(Problem("--profile", f"{message}; fix: a smaller number, or another OUT_DIR"))
    steps, numbers, block = run.log.steps, iter(range(1, WARM_UP + num_steps + 1)), contextlib.ExitStack()
    block.enter_context(labeled_parts(run))  # before the epoch opens its batches

    def profiled(*args: Any) -> Iterator[int]:
        for step in steps(*args):
            yield step
            number = next(numbers, 0)
            if number == WARM_UP:
                block.enter_context(profiling(run, num_steps))
            elif number == WARM_UP + num_steps:
                block.close()

    run.log.steps = profiled  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if next(numbers, 0):
            logger.warning("--profile: no trace; this start took fewer than %s", counted(WARM_UP + num_steps, "step"))
            block.pop_all()


@contextlib.contextmanager
def profiling(run: Run, num_steps: int) -> Iterator[None]:
    """Write a trace of the steps of the block, and on CUDA of its memory, to OUT_DIR/profile; log a summary."""
    folder, on_cuda = Path(run.cfg.OUT_DIR) / FOLDER, run.train_loader.device.type == "cuda"
    folder.mkdir(exist_ok=True)
    if on_cuda:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    with profile() as profiler:
        before, started = _sum_parts(run), time.perf_counter()
        yield
        after, total_s = _sum_parts(run), time.perf_counter() - started
    shares = {part: (after[part] - before[part]) / total_s for part in after}
    shares["other"] = max(0.0, 1 - sum(shares.values()))
    trace = folder / f"trace_rank{dist.rank()}.json.gz"
    profiler.export_chrome_trace(str(trace))
    if on_cuda:
        torch.cuda.memory._dump_snapshot(str(folder / f"memory_rank{dist.rank()}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
    text = ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share)
    logger.info("profile of %s of %.1f ms: %s", counted(num_steps, "step"), 1e3 * total_s / num_steps, text)
    order = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    logger.info("%s", profiler.key_averages().table(order, NUM_LISTED, max_name_column_width=40))
    gaps = ", ".join(f"{gap:.2f} ms before {name}" for gap, name in find_gaps(profiler.events(), on_cuda))
    logger.info("longest gaps without an operation: %s", gaps or "none")
    logger.info("trace, for https://ui.perfetto.dev: %s", trace)
