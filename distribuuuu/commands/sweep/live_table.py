"""Progress of a sweep in the terminal: the rows that have changed, and a line about all."""

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


def format_rows(sweep: Sweep, rows: Sequence[TrialRow]) -> list[str]:
    """Return the lines of a table, the heading first."""
    lines = [["trial", "status", "epochs", sweep.metric, "seeds", *short_names(sweep)]]
    for row in rows:
        trial = sweep.trials[row.trial]
        objective = "" if row.objective is None else f"{row.objective:.4g}"
        cells = [row.trial, row.status, f"{row.epochs}/{trial.epochs}", objective, len(row.seeds) or ""]
        lines.append([*map(str, cells), *trial.values.values(), *row.failures.values()])
    return align_columns(lines, ">" * len(lines[0]))


class LiveTable:
    """Printer of the rows that have changed since the last call.

    Args:
        sweep: the sweep.
        stream: a terminal or a file.
    """

    def __init__(self, sweep: Sweep, stream: TextIO):
        self._sweep, self._stream = sweep, stream
        self._known: dict[int, tuple] = {}

    def show(self, rows: Sequence[TrialRow], running: Collection[Job] = ()) -> None:
        """Show the rows of `trials.build_rows`."""
        heading, *lines = format_rows(self._sweep, rows)
        states = {row.trial: (row.status, row.objective, len(row.seeds), tuple(row.failures)) for row in rows}
        changed = [
            line for row, line in zip(rows, lines, strict=True) if self._known.get(row.trial) != states[row.trial]
        ]
        if changed:
            print(heading, *changed, summarize(self._sweep, rows), sep="\n", file=self._stream, flush=True)
        self._known = states
