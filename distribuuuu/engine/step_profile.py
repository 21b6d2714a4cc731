"""Times of the parts of training steps, and a trace by torch's profiler (`train --profile N`)."""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import counted
from distribuuuu.distributed import comm as dist
from distribuuuu.engine.run import Run, Training
from distribuuuu.engine.state import record_event, seconds_between

logger = logging.getLogger(__name__)

# Steps before the trace, which compile and allocate; operations that are listed; the folder in OUT_DIR.
WARM_UP, NUM_LISTED, FOLDER = 3, 10, "profile"


class StepParts:
    """The seconds of the parts of training steps in a `with` block: data, forward, backward, optimizer.

    Each is a label in a trace. On CUDA, events measure them, and nothing waits for the device before `shares`.
    `data` is the wait for a batch and its normalization, `forward` has the loss, `optimizer` the clipping.
    """

    def __init__(self, training: Training):
        state, self._device = training.state, training.train_loader.device
        self._methods = {"data": (training.train_loader, "batches_from"), "forward": (training.task, "train_step"),
                         "backward": (state.precision, "backward"), "optimizer": (state.precision, "step")}  # fmt: skip

    def restart(self) -> None:
        """Forget what was measured: the block begins here."""
        self._marks: dict[str, list[tuple[Any, Any]]] = {part: [] for part in self._methods}
        self._started = mark_time(self._device)

    def __enter__(self) -> "StepParts":
        self.restart()
        for part, (owner, name) in self._methods.items():
            call = self._batches if part == "data" else functools.partial(self._call, part)
            setattr(owner, name, functools.partial(call, getattr(owner, name)))
        return self

    def __exit__(self, *error: Any) -> None:
        for owner, name in self._methods.values():
            vars(owner).pop(name, None)  # the method of its class is called again

    def _call(self, part: str, function: Callable, *args: Any) -> Any:
        started = mark_time(self._device)
        with record_function(part):
            returned = function(*args)
        self._marks[part].append((started, mark_time(self._device)))
        return returned

    def _batches(self, batches_from: Callable[..., Iterator], *position: Any) -> Iterator:
        batches = batches_from(*position)
        while (batch := self._call("data", next, batches, None)) is not None:
            yield batch

    def shares(self) -> tuple[float, dict[str, float]]:
        """Return the seconds so far, and the share of each part and of the rest; on CUDA, wait for the device."""
        ended = mark_time(self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        total_s = max(1e-9, seconds_between(self._started, ended))
        sums = {part: sum(seconds_between(*pair) for pair in pairs) for part, pairs in self._marks.items()}
        shares = {part: seconds / total_s for part, seconds in sums.items()}
        return total_s, {**shares, "other": max(0.0, 1 - sum(shares.values()))}


def mark_time(device: torch.device) -> Any:
    """Return an event on CUDA, which the device records after all queued work; else the present time in seconds."""
    return record_event() if device.type == "cuda" else time.perf_counter()


def profile_steps(run: Run, num_steps: int) -> None:
    """Profile steps of a run, after some others.

    Raises:
        ConfigError: the run has fewer steps left.
    """
    left = run.log.total_steps - run.state.epoch * run.train_loader.num_steps - run.state.step
    if left < WARM_UP + num_steps:
        message = f"got {num_steps}; the run has {counted(left, 'step')} left, and the first {WARM_UP} are not profiled"
        raise ConfigError(Problem("--profile", f"{message}; fix: a smaller number, or another OUT_DIR"))
    steps, numbers, block = run.log.steps, iter(range(1, WARM_UP + num_steps + 1)), contextlib.ExitStack()
    parts = block.enter_context(StepParts(run))  # before the epoch opens its batches

    def profiled(*args: Any) -> Iterator[int]:
        for step in steps(*args):
            yield step
            number = next(numbers, 0)
            if number == WARM_UP:
                block.enter_context(profiling(run, num_steps, parts))
            elif number == WARM_UP + num_steps:
                block.close()

    run.log.steps = profiled  # type: ignore[method-assign, assignment]


@contextlib.contextmanager
def profiling(run: Run, num_steps: int, parts: StepParts) -> Iterator[None]:
    """Write a trace of the steps of the block, and on CUDA of its memory, to OUT_DIR/profile; log a summary."""
    folder, on_cuda = Path(run.cfg.OUT_DIR) / FOLDER, run.train_loader.device.type == "cuda"
    folder.mkdir(exist_ok=True)
    if on_cuda:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    with profile() as profiler:
        parts.restart()
        yield
        total_s, shares = parts.shares()
    trace = folder / f"trace_rank{dist.rank()}.json.gz"
    profiler.export_chrome_trace(str(trace))
    if on_cuda:
        torch.cuda.memory._dump_snapshot(str(folder / f"memory_rank{dist.rank()}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
    text = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
    logger.info("profile of %s of %.1f ms: %s", counted(num_steps, "step"), 1e3 * total_s / num_steps, text)
    order = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    logger.info("%s", profiler.key_averages().table(order, NUM_LISTED, max_name_column_width=40))
    logger.info("trace, for https://ui.perfetto.dev: %s", trace)
