"""Logging of a run: terminal, train.log, metrics.jsonl, TensorBoard, progress bar.

Only the main process writes files; the other processes print warnings.
"""

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from distribuuuu.config import ConfigError, run_files
from distribuuuu.distributed import comm as dist
from distribuuuu.files.atomic_file import open_for_writing
from distribuuuu.files.untrusted import printable
from distribuuuu.records import metric_writers
from distribuuuu.records.metric_writers import RecordFile, format_decimal, format_duration, format_lr, format_speed

logger = logging.getLogger("distribuuuu")

# Seconds between two logged steps while no metrics are read.
LOG_INTERVAL_S = 15.0
# Rows of a table per header, and the width up to which columns are two spaces apart: with the date of train.log, a line
# then has at most 80 characters.
_ROWS_PER_HEADER, _MAX_WIDTH = 20, 65
# Progress bars: the position, the time left of the epoch or the evaluation, then what `Log` appends.
_BAR_FORMAT = "{desc} |{bar}| {n_fmt}/{total_fmt} [{remaining}{postfix}]"
# Variable of the environment of runs that are a stage of a command: the terminal then shows rows and warnings only.
STAGE_MARK = "DISTRIBUUUU_STAGE"
_TERMINAL_TIME, _FILE_TIME = "%H:%M:%S", "%m-%d %H:%M:%S"


class _LineFormatter(logging.Formatter):
    """Format of a line: time, rank if it is not 0, level from WARNING on, message."""

    def __init__(self, time_format: str):
        super().__init__(f"%(asctime)s {'' if dist.is_main() else f'[rank {dist.rank()}] '}%(message)s", time_format)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line of a record, whose message may name files: further lines of it are indented."""
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        record.message = level + printable(record.getMessage(), keep="\n\t").replace("\n", "\n    ")
        return super().formatMessage(record)


class _Handler(logging.StreamHandler):
    """Handler of the terminal, which prints above the progress bar, or of a file."""

    def __init__(self, path: Path | None = None):
        super().__init__(open_for_writing(path, "a", encoding="utf-8") if path else None)
        self._is_file = path is not None
        self.setFormatter(_LineFormatter(_FILE_TIME if path else _TERMINAL_TIME))
        if path is None and STAGE_MARK in os.environ:
            self.addFilter(lambda record: record.name == logger.name or record.levelno >= logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignore a line that cannot be written, e.g. on a full disk."""

    def close(self) -> None:
        """Close the file; ignore that buffered lines cannot be written."""
        with contextlib.suppress(OSError):
            if self._is_file:
                self.stream.close()
        super().close()


@contextlib.contextmanager
def logging_to(out_dir: str | os.PathLike, log_name: str) -> Iterator[None]:
    """Log to the terminal and to out_dir/log_name, if a name is given; other ranks print warnings only."""
    handlers = [_Handler(), *([_open_file(out_dir, log_name)] if dist.is_main() and log_name else [])]
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(logging.INFO if dist.is_main() else logging.WARNING)
    logger.propagate = False
    try:
        yield
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


def append_to_log(out_dir: str | os.PathLike, log_name: str, *lines: str) -> None:
    """Append lines to out_dir/log_name but not to the terminal; ignore write errors."""
    with contextlib.suppress(OSError, ConfigError), contextlib.closing(_open_file(out_dir, log_name)) as handler:
        for line in lines:
            handler.emit(logging.LogRecord(logger.name, logging.ERROR, __file__, 0, line, None, None))


def _open_file(out_dir: str | os.PathLike, log_name: str) -> _Handler:
    path = Path(out_dir) / log_name
    try:
        return _Handler(path)
    except OSError as error:
        raise ConfigError(f"OUT_DIR: {path} cannot be written: {error.strerror}") from error


def has_progress_bar() -> bool:
    """Return whether this process draws a progress bar: the main process, on a terminal or in a notebook."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    is_notebook = kernel is not None and kernel.IPKernelApp.initialized()
    return dist.is_main() and sys.stderr is not None and (is_notebook or sys.stderr.isatty())


def progress(
    items: Iterable | None, label: str, total: int | None = None, initial: int = 0, every: int = 1, **options: Any
) -> tqdm:
    """Wrap the items, of which `initial` are done, in a progress bar; it is hidden off a terminal.

    Without items, the caller updates the bar. `options` are arguments of tqdm, e.g. `unit` to show a rate.
    """
    style: dict[str, Any] = {"disable": not has_progress_bar(), "leave": False, "dynamic_ncols": True}
    style["bar_format"] = None if "unit" in options else _BAR_FORMAT
    return tqdm(items, desc=label, total=total, initial=initial, miniters=every, **{**style, **options})


@dataclass(kw_only=True, eq=False)
class Log:
    """metrics.jsonl, the TensorBoard events and the table of steps of a run.

    Attributes:
        train_metrics, eval_metrics: display names of the metrics, e.g. {"top1": "top1", "topk": "top5"}; the first
            evaluation metric selects the best epoch.
        num_steps: steps per whole epoch.
        images_per_step: images per step of all processes.
        timing: images and seconds of the training steps over all starts, which the log adds to.
        total_steps: steps of the run; 0: all epochs are whole.
        writers: TensorBoard events and others that take the rows and the images; none on the other processes.
    """

    out_dir: str | os.PathLike
    train_metrics: dict[str, str]
    eval_metrics: dict[str, str]
    num_epochs: int
    num_steps: int
    images_per_step: int
    timing: dict[str, float] = field(default_factory=lambda: {"images": 0, "seconds": 0.0})
    total_steps: int = 0
    writers: Sequence[Any] = ()

    def __post_init__(self):
        self._means: tuple[str, ...] = ()  # of `StepOutput.sums`, in the rows so far
        self._end = self.num_steps
        self._build_table()
        self._evaluation = ""  # of the bar
        # Seconds of this start by part; those of data and checkpoints are in others too.
        parts = ("training", "data", "forward", "backward", "optimizer", "step", "evaluation", "checkpoints")
        self.spent: dict[str, float] = dict.fromkeys(parts, 0.0)
        self._scalars: dict[int, dict[str, float]] = {}  # by epoch
        self._records: RecordFile | None = None
        self._stage: str | None = None

    def _build_table(self) -> None:
        """Choose the columns of the table, whose next row has a header."""
        totals = {"epoch": self.num_epochs, "step": self.num_steps}
        self._widths = {name: max(len(name), 2 * len(str(total)) + 1) for name, total in totals.items()}
        labels = (*self.train_metrics.values(), *self._means)
        self._widths |= {"loss": 6, **{label: max(5 + (label == "loss"), len(label)) for label in labels}}
        self._widths |= {"lr": 6, "img/s": 5, "data": 4, "eta": 6}
        self._num_rows = 0

    def _log_cells(self, cells: dict[str, str]) -> None:
        """Log a row of the table; columns without a cell show '-'."""
        gap = "  " if sum(self._widths.values()) + 2 * len(self._widths) <= _MAX_WIDTH else " "
        logger.info("%s", gap.join(f"{cells.get(name, '-'):>{width}}" for name, width in self._widths.items()))

    def rewind(self, epoch: int, step: int) -> None:
        """Begin or continue at a position; remove the records after it, which an interrupted run has left."""
        self._started = self._last_read = self._shown_at = time.perf_counter()
        self._first_position = self._read_position = epoch * self.num_steps + step
        # Time and position from which the ETA is extrapolated: after the first step, which compiles and allocates.
        self._eta_origin: tuple[float, int] | None = None
        self._num_rows = 0
        if not dist.is_main():
            return
        path = Path(self.out_dir) / run_files.METRICS
        metric_writers.drop_records_after(path, epoch, step)
        self._records = RecordFile(path)
        for writer in self.writers:
            writer.rewind(self._first_position)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *error: Any) -> None:
        for writer in self.writers:
            writer.end()

    def steps(self, epoch: int, first: int, end: int | None = None) -> Iterator[int]:
        """Yield the steps of an epoch from `first` to before `end`, with a progress bar.

        The clock of `add_train_row` starts. Without `end`, the epoch is whole.
        """
        self._end = self.num_steps if end is None else end
        self._last_read, self._read_position = time.perf_counter(), epoch * self.num_steps + first
        label = f"epoch {epoch + 1}/{self.num_epochs}"
        self._bar = progress(range(first, self._end), label, total=self._end, initial=first)
        self._show_in_bar()
        yield from self._bar

    def add_train_row(
        self, epoch: int, step: int, lr: float, metrics: dict, data_time_s: float, parts: Mapping[str, float] = {}
    ) -> None:
        """Log the metrics after `step` steps of an epoch, if any, and the seconds of waiting for data and of others."""
        if not metrics["count"]:
            return
        now, position = time.perf_counter(), epoch * self.num_steps + step
        elapsed, images = now - self._last_read, (position - self._read_position) * self.images_per_step
        self.timing["images"] += images
        self.timing["seconds"] += elapsed
        for part, seconds in {"training": elapsed, "data": data_time_s, **parts}.items():
            self.spent[part] += seconds
        speed = {
            "images_per_s": images / elapsed,
            "wait": min(1.0, data_time_s / elapsed),
            "eta_s": self._eta_s(now, position),
        }
        self._last_read, self._read_position = now, position
        self._write("train", epoch, step, {"lr": lr, **metrics, **speed})
        known = ("count", "loss", "skipped_steps", *self.train_metrics, *self._means)
        if means := tuple(name for name in metrics if name not in known):
            self._means += means
            self._build_table()
        first = "".join(f", {label} {metrics[name]:.1f}" for name, label in list(self.train_metrics.items())[:1])
        self._show_in_bar(f"run {format_duration(speed['eta_s'])}, loss {metrics['loss']:.3f}{first}")
        values = {label: format_decimal(metrics[name], 5, decimals=2) for name, label in self.train_metrics.items()}
        values |= {name: format_decimal(metrics.get(name, 0.0), 6) for name in self._means}
        cells = {**values, "loss": format_decimal(metrics["loss"], 6), "data": f"{speed['wait']:.0%}"}
        self._add_row(now, position, lr, speed["images_per_s"], speed["eta_s"], cells)

    def _show_in_bar(self, text: str = "") -> None:
        """Show a text and the last evaluation at the end of the bar."""
        self._bar.set_postfix_str(", ".join(filter(None, (text, self._evaluation))), refresh=False)

    def set_stage(self, epoch: int, stage: str | None) -> None:
        """Set the stage of the training, which is logged when it changes and is part of each record."""
        if stage != self._stage:
            logger.info("epoch %d: stage %s", epoch + 1, stage)
        self._stage = stage

    def show_step(self, epoch: int, step: int, lr: float) -> None:
        """Log a step without metrics: the first one of a start, then one every LOG_INTERVAL_S seconds.

        Only the main process logs it, by its own clock. The loss is missing because reading it is a collective.
        """
        now, position = time.perf_counter(), epoch * self.num_steps + step
        if self._eta_origin and now - self._shown_at < LOG_INTERVAL_S:
            return
        images_per_s = (position - self._read_position) * self.images_per_step / (now - self._last_read)
        eta_s = self._eta_s(now, position) if self._eta_origin else None
        self._add_row(now, position, lr, images_per_s, eta_s, {})

    def _add_row(
        self, now: float, position: int, lr: float, images_per_s: float, eta_s: float | None, metrics: dict[str, str]
    ) -> None:
        epoch, step = (position - 1) // self.num_steps, (position - 1) % self.num_steps + 1
        cells = {"epoch": f"{epoch + 1}/{self.num_epochs}", "step": f"{step}/{self._end}", "lr": format_lr(lr)}
        cells |= {"img/s": format_speed(images_per_s)} | ({} if eta_s is None else {"eta": format_duration(eta_s)})
        if self._num_rows % _ROWS_PER_HEADER == 0:
            self._log_cells({name: name for name in self._widths})
        self._num_rows += 1
        self._log_cells({**cells, **metrics})
        self._shown_at, self._eta_origin = now, self._eta_origin or (now, position)

    def _eta_s(self, now: float, position: int) -> float:
        """Return the estimated seconds until the end of the run, at the speed of this start."""
        since, first = self._eta_origin or (self._started, self._first_position)
        return (now - since) / (position - first) * ((self.total_steps or self.num_epochs * self.num_steps) - position)

    def add_evaluation_rows(self, epoch: int, results: dict[str, dict], bests: Mapping[str, Any]) -> None:
        """Log the evaluation at the end of an epoch, from 0; its seconds count from the last `train`.

        `results` are those of `evaluate` by kind of weights, "raw" or "ema"; `bests` the best evaluation of each kind.
        """
        seconds, best_texts = time.perf_counter() - self._last_read, []
        self.spent["evaluation"] += seconds
        selecting = next(iter(self.eval_metrics.values()), "loss")
        for weights, metrics in results.items():
            kind, suffix = ("eval", "") if weights == "raw" else (f"eval_{weights}", f", {weights}")
            best = bests[weights]
            logged = self._scalars.pop(epoch, {})
            entries = {**logged, **metrics, f"best_{selecting}": best.value, "seconds": seconds}
            self._write(kind, epoch, self._end, entries)
            values = metric_writers.format_result(metrics, self.eval_metrics, decimals=2)
            logger.info("validation, epoch %d%s: %s", epoch + 1, suffix, values)
            self._evaluation = f"val {values.split(' ')[-1 if selecting == 'loss' else 1]}"
            best_texts.append(f"{suffix[2:]} {best.describe(selecting)}".lstrip())
            if math.isnan(metrics.get(next(iter(self.eval_metrics), "loss"), 0.0)):
                message = "validation, epoch %d%s: %s is not a number and cannot select the best weights"
                logger.warning(message, epoch + 1, suffix, selecting)
        logger.info("best %s so far: %s", selecting, ", ".join(best_texts))
        self._shown_at = time.perf_counter()

    def images(self, tag: str, pixels: torch.Tensor, epoch: int = -1) -> None:
        """Pass (N, 3, H, W), uint8 or float from 0 to 1, as a grid to the writers after an epoch; -1: before all."""
        if self.writers and len(pixels):
            from torchvision.utils import make_grid

            grid = make_grid(pixels, nrow=8)
            for writer in self.writers:
                writer.image(tag, grid, (epoch + 1) * self.num_steps)

    def scalars(self, values: Mapping[str, float | torch.Tensor], epoch: int) -> None:
        """Add numbers by name to the record of the evaluation after an epoch, from 0, and to the writers.

        Raises:
            ConfigError: a name is one that each record has.
        """
        if taken := values.keys() & {"kind", "epoch", "step", "stage", "time"}:
            raise ConfigError(f"log.scalars: got {', '.join(sorted(taken))}; expected names that no record has")
        self._scalars.setdefault(epoch, {}).update({name: float(value) for name, value in values.items()})

    def _write(self, kind: str, epoch: int, step: int, values: dict) -> None:
        labels = self.train_metrics if kind == "train" else self.eval_metrics
        values = {labels.get(name, name): value for name, value in values.items()}
        if self._records:
            time_s = round(time.time(), 3)
            stage = {} if self._stage is None else {"stage": self._stage}
            record = {"kind": kind, "epoch": epoch + 1, "step": step, **values, **stage, "time": time_s}
            self._records.append(record)
            for writer in self.writers:
                writer.row(record, epoch * self.num_steps + step)
