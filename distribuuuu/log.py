"""What a run shows: a log on the terminal and in train.log, metrics.jsonl, TensorBoard and a progress bar.

Only the main process writes; the others pass on warnings.
"""

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from distribuuuu import distributed as dist
from distribuuuu.metrics import StepTiming
from distribuuuu.records import EventFile, RecordFile, drop_records_after
from distribuuuu.verdict import MOST_WAIT

logger = logging.getLogger("distribuuuu")
# Rows of the table of steps; a terminal shows a bar in their place.
_steps = logging.getLogger("distribuuuu.steps")

_HEADER = f"{'epoch':>7} {'step':>9} {'loss':>8} {{measures}} {'lr':>8} {'img/s':>7} {'wait':>5} {'eta':>8}"
_ROW = "{epoch:>7} {step:>9} {loss:>8.4f} {measures} {lr:>8.2g} {images_per_s:>7.0f} {wait:>5.0%} {eta:>8}"
# Steps or seconds of a start before the share of waiting for data is looked at: of a handful of steps it is noise.
# Within a long epoch it is looked at about once a minute: what the epoch's first batches cost is a small part of that.
_NOISE_STEPS, _NOISE_S = 50, 20.0
_WATCH_S = 60.0


class _TerminalHandler(logging.StreamHandler):
    """Print above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record; the bar makes way and comes back."""
        with tqdm.external_write_mode(file=sys.stderr):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Pass over a line that cannot be written, e.g. to a file on a full disk."""


class _FileHandler(logging.FileHandler):
    """Write to train.log as long as the disk takes it."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Pass over a line that cannot be written; the terminal has it."""

    def close(self) -> None:
        """Close the file, with what was written."""
        with contextlib.suppress(OSError):
            super().close()


def set_up_logging(out_dir: str | os.PathLike, log_name: str) -> None:
    """Send the package's log to the terminal and to out_dir/log_name; other ranks only warn, on the terminal.

    Without a name there is no file.
    """
    close_logging()
    main = dist.is_main()
    prefix = "" if main else f"[rank {dist.rank()}] "
    formatter = logging.Formatter(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S")
    handlers: list[logging.Handler] = [_TerminalHandler(sys.stderr)]
    if main and log_name:
        handlers.append(_file_handler(out_dir, log_name))
    handlers[0].setFormatter(formatter)
    if shows_bar():
        handlers[0].addFilter(lambda record: record.name != _steps.name)
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(logging.INFO if main else logging.WARNING)
    logger.propagate = False


@contextlib.contextmanager
def logging_to(out_dir: str | os.PathLike, log_name: str) -> Iterator[None]:
    """Set up logging for the length of a block, see `set_up_logging`."""
    set_up_logging(out_dir, log_name)
    try:
        yield
    finally:
        close_logging()


def append_to_log(out_dir: str | os.PathLike, log_name: str, *lines: str) -> None:
    """Add lines to out_dir/log_name alone, as far as the disk takes them; for what the terminal gets elsewhere."""
    with contextlib.suppress(OSError), contextlib.closing(_file_handler(out_dir, log_name)) as handler:
        for line in lines:
            handler.emit(logging.LogRecord(logger.name, logging.ERROR, __file__, 0, line, None, None))


def _file_handler(out_dir: str | os.PathLike, log_name: str) -> _FileHandler:
    handler = _FileHandler(Path(out_dir) / log_name, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    return handler


def close_logging() -> None:
    """Take the handlers off the package's logger and close their files."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def shows_bar() -> bool:
    """Tell whether this process draws a progress bar: the main one, on a terminal."""
    return dist.is_main() and sys.stderr.isatty()


def progress(items: Iterable, label: str, total: int | None = None, initial: int = 0, every: int = 1) -> tqdm:
    """Return the items behind a bar, where one is shown, that moves every so many items."""
    return tqdm(
        items,
        desc=label,
        total=total,
        initial=initial,
        miniters=every,
        disable=not shows_bar(),
        leave=False,
        dynamic_ncols=True,
    )


def evaluation_bar(every: int) -> Callable[[Iterable], tqdm]:
    """Return what shows an evaluation loader behind a bar that moves every so many batches."""
    return functools.partial(progress, label="evaluation", every=every)


def format_duration(seconds: float) -> str:
    """Return h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class RunLog:
    """metrics.jsonl, TensorBoard and the table of steps of one run.

    Args:
        out_dir: the folder of the run.
        tensorboard: write events to out_dir/tensorboard.
        measures: the percentages among the metrics: name -> what it is called, e.g. {"top1": "top1", "topk": "top5"};
            the first tells which evaluation is best.
        num_epochs: epochs of the run.
        num_steps: steps of an epoch.
        epoch, step: where this start begins; records of later positions, from a run that was killed, are removed.
        timing: the clock of the steps; None: a new one.
    """

    def __init__(
        self,
        out_dir: str | os.PathLike,
        *,
        tensorboard: bool,
        measures: dict[str, str],
        num_epochs: int,
        num_steps: int,
        epoch: int = 0,
        step: int = 0,
        timing: StepTiming | None = None,
    ):
        self.measures, self.merit = measures, next(iter(measures))
        self.num_epochs = num_epochs
        self.num_steps = num_steps
        self._out_dir = Path(out_dir)
        self._shows_curves = tensorboard
        self._records: RecordFile | None = None
        self._events: EventFile | None = None
        self._has_warned = False
        self._timing = timing or StepTiming()
        self.rewind(epoch, step)

    def rewind(self, epoch: int, step: int) -> None:
        """Go on from an earlier position: remove the records of later ones."""
        self._started = self._last_read = time.perf_counter()
        self._first_position = epoch * self.num_steps + step
        self._is_first_read = True
        if not dist.is_main():
            return
        path = self._out_dir / "metrics.jsonl"
        drop_records_after(path, epoch, step)
        self._records = RecordFile(path)
        if self._shows_curves:
            self._close_events()
            self._events = EventFile(self._out_dir / "tensorboard", purge_step=self._first_position + 1)

    @property
    def has_tensorboard(self) -> bool:
        """Tell whether this process writes TensorBoard events."""
        return self._events is not None

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *error: Any) -> None:
        self._close_events()

    def _close_events(self) -> None:
        if self._events:
            self._events.close()

    def steps(self, epoch: int, first: int) -> Iterator[int]:
        """Yield the steps of an epoch from `first` on, behind a bar; `train` counts its time from here."""
        self._last_read = time.perf_counter()
        if first < self.num_steps:  # else only the evaluation is left
            self._timing.begin(self._last_read)
        self._watched_s = self._waited_s = 0.0
        _steps.info(_HEADER.format(measures=" ".join(f"{called:>6}" for called in self.measures.values())))
        label = f"epoch {epoch + 1}/{self.num_epochs}"
        self._bar = progress(range(first, self.num_steps), label, total=self.num_steps, initial=first)
        yield from self._bar

    def train(self, epoch: int, step: int, lr: float, metrics: dict, wait_s: float) -> None:
        """Record what the meter read after `step` steps of an epoch, and the seconds spent waiting for data."""
        now = self._last_read = time.perf_counter()
        elapsed = self._timing.end_row(now, metrics["count"], is_last=step == self.num_steps)
        position = epoch * self.num_steps + step
        speed = {
            "images_per_s": metrics["count"] / elapsed,
            "wait": min(1.0, wait_s / elapsed),
            "eta_s": (now - self._started)
            / (position - self._first_position)
            * (self.num_epochs * self.num_steps - position),
        }
        self._watch_wait(elapsed, wait_s, position - self._first_position, step == self.num_steps)
        self._write("train", epoch, step, {"lr": lr, **metrics, **speed})
        merit = f"{self.measures[self.merit]} {metrics[self.merit]:.1f}"
        self._bar.set_postfix_str(f"loss {metrics['loss']:.3f}, {merit}", refresh=False)
        shown = {"epoch": f"{epoch + 1}/{self.num_epochs}", "step": f"{step}/{self.num_steps}", "lr": lr}
        measures = " ".join(f"{metrics[name]:>6.2f}" for name in self.measures)
        _steps.info(_ROW.format(**shown, **metrics, **speed, measures=measures, eta=format_duration(speed["eta_s"])))

    def _watch_wait(self, elapsed: float, wait_s: float, num_steps: int, ends_epoch: bool) -> None:
        """Warn once if an epoch, or a minute of it, is spent waiting for data; a start's first read is left out.

        The first batches of a start are always waited for.
        """
        if self._is_first_read:
            self._is_first_read = False
            return
        self._watched_s, self._waited_s = self._watched_s + elapsed, self._waited_s + wait_s
        is_noise = num_steps < _NOISE_STEPS and self._last_read - self._started < _NOISE_S
        if is_noise or not (ends_epoch or self._watched_s >= _WATCH_S):
            return
        share, self._watched_s, self._waited_s = min(1.0, self._waited_s / self._watched_s), 0.0, 0.0
        if share > MOST_WAIT and dist.is_main() and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "waiting for data takes %.0f %% of the time; python tools/time_net.py with the same config says what"
                " would help", 100 * share
            )  # fmt: skip

    def evaluation(self, epoch: int, results: dict[str, dict], bests: dict[str, float]) -> None:
        """Record the evaluation at the end of an epoch; its seconds count from the last `train`.

        Args:
            epoch: from 0.
            results: what the meter read for each kind of weights, "raw" and "ema".
            bests: the best of the run for each kind, of the first measure.
        """
        seconds, merit = time.perf_counter() - self._last_read, self.measures[self.merit]
        for weights, metrics in results.items():
            kind, label = ("eval", "") if weights == "raw" else (f"eval_{weights}", f"{weights} ")
            best = bests[weights]
            self._write(kind, epoch, self.num_steps, {**metrics, f"best_{merit}": best, "seconds": seconds})
            measures = " ".join(f"{called} {metrics[name]:.2f}" for name, called in self.measures.items())
            logger.info(
                "epoch %d/%d: %s%s loss %.4f of %d images; best %s %.2f",
                epoch + 1, self.num_epochs, label, measures, metrics["loss"], metrics["count"], merit, best,
            )  # fmt: skip

    def images(self, tag: str, pixels: torch.Tensor) -> None:
        """Show uint8 (N, 3, H, W) as a grid in TensorBoard."""
        if self._events and len(pixels):
            from torchvision.utils import make_grid

            self._events.image(tag, make_grid(pixels, nrow=8), 0)

    def _write(self, kind: str, epoch: int, step: int, values: dict) -> None:
        values = {self.measures.get(name, name): value for name, value in values.items()}
        if self._records:
            time_s = round(time.time(), 3)
            self._records.append({"kind": kind, "epoch": epoch + 1, "step": step, **values, "time": time_s})
        if self._events:
            for name, value in values.items():
                if name in ("count", "eta_s"):  # no curves
                    continue
                self._events.scalar(f"{kind}/{name}", value, epoch * self.num_steps + step)
