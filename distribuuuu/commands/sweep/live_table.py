"""Progress of a sweep in the terminal: a table that is redrawn in place; elsewhere the changed rows are printed."""

import logging
import shutil
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TextIO

from distribuuuu.commands.output import align_columns
from distribuuuu.commands.sweep.trials import FAILED, FINISHED, PAUSED, RUNNING, WAITING, Job, Sweep, TrialRow
from distribuuuu.config.errors import counted


def short_names(sweep: Sweep) -> list[str]:
    """Return the names of the swept options without their sections, as far as they stay distinct."""
    keys = list(sweep.trials[0].values)
    last = [key.rpartition(".")[2] for key in keys]
    return [key if last.count(name) > 1 else name for key, name in zip(keys, last, strict=True)]


def summarize(sweep: Sweep, rows: Sequence[TrialRow]) -> str:
    """Return the best trial, the number of trials of each status, and the epochs of the search, as a line."""
    counts = Counter(row.status for row in rows)
    statuses = [f"{counts[name]} {name}" for name in (RUNNING, WAITING, PAUSED, FINISHED, FAILED) if counts[name]]
    epochs = f"{sum(row.epochs for row in rows)} of {counted(sum(one.epochs for one in sweep.trials), 'epoch')}"
    best = f"best: trial {rows[0].trial}; " if rows[0].objective is not None else ""
    return f"{best}{counted(len(rows), 'trial')}: {', '.join(statuses)}; {epochs}"


def format_rows(sweep: Sweep, rows: Sequence[TrialRow], width: int = 80, num: int = 1_000_000) -> list[str]:
    """Return the lines of a table of the first `num` rows, none longer than `width` characters."""
    lines = [["trial", "status", "epochs", sweep.metric, "seeds", *short_names(sweep)]]
    for row in rows[:num]:
        trial = sweep.trials[row.trial]
        cells = [row.trial, row.status, f"{row.epochs}/{trial.epochs}", _number(row.objective), len(row.seeds) or ""]
        lines.append([*map(str, cells), *trial.values.values(), *row.failures.values()])
    texts = align_columns(lines, ">" * len(lines[0]))
    return [text if len(text) <= width else f"{text[: width - 1]}…" for text in texts]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if abs(value) >= 10 else f"{value:.4g}"


class LiveTable(logging.Handler):
    """The table of a sweep on a stream; as a handler, it prints warnings above the table.

    Args:
        sweep: the sweep.
        stream: a terminal, or a file or pipe, which is given the changed rows.
    """

    def __init__(self, sweep: Sweep, stream: TextIO):
        super().__init__(logging.WARNING)
        self._sweep, self._stream = sweep, stream
        self._shown: list[str] = []
        self._known: dict[int, tuple] = {}

    def show(self, rows: Sequence[TrialRow], running: Collection[Job] = ()) -> None:
        """Show the rows of `trials.build_rows`."""
        if self._stream.isatty():
            width, height = shutil.get_terminal_size()
            lines = format_rows(self._sweep, rows, width - 1, max(1, height - 4))
            self._redraw([*lines, summarize(self._sweep, rows)[: width - 1]])
            return
        states = {row.trial: (row.status, row.objective, len(row.seeds), tuple(row.failures)) for row in rows}
        heading, *lines = format_rows(self._sweep, rows, width=200)
        changed = [
            line for row, line in zip(rows, lines, strict=True) if self._known.get(row.trial) != states[row.trial]
        ]
        if changed:
            print(heading, *changed, summarize(self._sweep, rows), sep="\n", file=self._stream, flush=True)
        self._known = states

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record above the table."""
        self._redraw(self._shown, f"{self.format(record)}\n")

    def _redraw(self, lines: list[str], above: str = "") -> None:
        """Replace the table by other lines: move the cursor up to its first line, and clear all below."""
        start = f"\x1b[{len(self._shown)}F\x1b[J" if self._shown else ""
        if above or lines != self._shown:
            print(f"{start}{above}", *(f"{line}\n" for line in lines), sep="", end="", file=self._stream, flush=True)
        self._shown = lines
