"""Results of a sweep: the rows of its trials, read from the files of their runs, as a table and as a page."""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribuuuu import __version__
from distribuuuu.checkpoint.manager import CheckpointManager, position_of
from distribuuuu.checkpoint.weights_files import KINDS, RAW
from distribuuuu.commands.html.charts import Mark, Series, line_chart
from distribuuuu.commands.html.history import read_history, read_lines
from distribuuuu.commands.html.page import Column, PageSection, build_page, html
from distribuuuu.commands.output import align_columns
from distribuuuu.commands.sweep.plan import MAX_TRIALS, Plan
from distribuuuu.commands.sweep.search_space import to_texts
from distribuuuu.config.errors import counted
from distribuuuu.files.untrusted import printable

CONSOLE_FILE, FAILED_FILE, BEST_FILE = "console.log", "failed.txt", "best.yaml"
# Status of a trial by that in Optuna; one that failed without a failed run has the values of another trial.
STATUSES = {"RUNNING": "running", "WAITING": "waiting", "PRUNED": "paused", "COMPLETE": "finished", "FAIL": "skipped"}
# Points of a curve at most.
_MAX_POINTS = 40


@dataclass(frozen=True)
class Row:
    """A trial in the table."""

    trial: int
    status: str  # of `STATUSES`, or "failed"; paused: stopped early by the pruner
    epochs: int  # finished ones of the run of the first seed
    planned: int  # OPTIM.MAX_EPOCH
    curve: Mapping[int, float]  # the objective after each epoch of that run
    seeds: Mapping[int, float]  # the objective of each finished run after the last epoch, by seed
    objective: float | None  # mean over `seeds`; without a finished run, the newest value, if any
    failures: Mapping[int, str]  # error of each failed run, by seed; its output is in CONSOLE_FILE of its folder
    values_of: Mapping[str, str]  # the swept options


def build_row(plan: Plan, trial: Any) -> Row:
    """Return the row of a trial of Optuna."""
    values, number, (first, *_) = to_texts(trial.params), trial.user_attrs["number"], plan.seeds
    runs = {seed: read_values(plan.folder(number, seed), plan.metric) for seed in plan.seeds}
    planned, (epochs, curve) = plan.last_epoch(values), runs[first]
    seeds = {seed: found[planned] for seed, (_, found) in runs.items() if planned in found}
    known = [value for _, value in sorted(curve.items()) if not math.isnan(value)]
    objective = sum(seeds.values()) / len(seeds) if seeds else known[-1] if known else None
    failures = {seed: text for seed in runs if (text := read_failure(plan.folder(number, seed)))}
    status = "failed" if first in failures else "finished" if first in seeds else STATUSES[trial.state.name]
    return Row(number, status, epochs, planned, curve, seeds, objective, failures, values)


def read_values(folder: Path, metric: str) -> tuple[int, Mapping[int, float]]:
    """Return the epochs of a run that are in a checkpoint, and the objective after each; that of an EMA, if any."""
    saved = CheckpointManager(folder).list()
    epochs = position_of(saved[-1])[0] if saved else 0
    return epochs, _read_curve(folder, metric, epochs) if epochs else {}


@functools.lru_cache(maxsize=4 * MAX_TRIALS)
def _read_curve(folder: Path, metric: str, epochs: int) -> Mapping[int, float]:
    found = read_history(folder).evaluations
    rows = [row for kind in reversed(KINDS) for row in found.get("eval" if kind == RAW else f"eval_{kind}", [])]
    known = {row["epoch"]: row.get(metric) for row in rows if row["epoch"] <= epochs}
    return {epoch: float(value) for epoch, value in known.items() if isinstance(value, (int, float))}


def read_failure(folder: Path) -> str:
    """Return the last line of the output of a failed run; an empty text: it has not failed."""
    if not (folder / FAILED_FILE).exists():
        return ""
    output = [line for line in read_lines(folder / CONSOLE_FILE, []) if line.strip()]
    return printable((output or ["no output"])[-1].strip().removeprefix("- "))


def short_names(plan: Plan) -> list[str]:
    """Return the names of the swept options without their sections, as far as they stay distinct."""
    last = [key.rpartition(".")[2] for key in plan.space]
    return [key if last.count(name) > 1 else name for key, name in zip(plan.space, last, strict=True)]


def summarize(rows: Sequence[Row]) -> str:
    """Return the best trial, the number of trials of each status, and the epochs of the search, as a line."""
    counts = Counter(row.status for row in rows)
    statuses = [f"{counts[name]} {name}" for name in (*STATUSES.values(), "failed") if counts[name]]
    epochs = f"{sum(row.epochs for row in rows)} of {counted(sum(row.planned for row in rows), 'epoch')}"
    best = f"best: trial {rows[0].trial}; " if rows[0].objective is not None else ""
    return f"{best}{counted(len(rows), 'trial')}: {', '.join(statuses)}; {epochs}"


def format_rows(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table, the heading first."""
    lines = [["trial", "status", "epochs", plan.metric, "seeds", *short_names(plan)]]
    for row in rows:
        objective = "" if row.objective is None else f"{row.objective:.4g}"
        cells = [row.trial, row.status, f"{row.epochs}/{row.planned}", objective, len(row.seeds) or ""]
        values = [row.values_of.get(key, "") for key in plan.space]
        lines.append([*map(str, cells), *values, *row.failures.values()])
    return align_columns(lines, ">" * len(lines[0]))


def build_sweep_page(plan: Plan, rows: Sequence[Row], importance: Mapping[str, float]) -> str:
    """Return OUT_DIR/sweep.html, a page in the style of a report."""
    summary = [html.paragraph(f"No trial has a result. {summarize(rows)}.")]
    if rows[0].objective is not None:
        summary = _summary(plan, rows)
    if importance:
        shares = [[name, share] for name, share in importance.items()]
        columns = [Column("option"), Column("share", ".0%", bar=True)]
        summary += [html.heading("Importance of the options"), html.table(columns, shares)]
    subtitle = f"{counted(len(rows), 'trial')} of {counted(len(plan.space), 'option')}, compared by {plan.metric}"
    sections = [PageSection("Summary", summary), _trials(plan, rows)]
    return build_page(f"Sweep {plan.out_dir.resolve().name}", subtitle, sections, f"distribuuuu {__version__}")


def _summary(plan: Plan, rows: Sequence[Row]) -> list[str]:
    best = rows[0]
    spent, total = sum(row.epochs for row in rows), sum(row.planned for row in rows)
    entries = [
        (f"best {plan.metric}", f"{best.objective:.2f}", counted(len(best.seeds), "seed")),
        ("trials", f"{len(rows):,}", f"{sum(bool(row.seeds) for row in rows):,} trained to the last epoch"),
        ("search", counted(spent, "epoch"), f"{spent / total:.0%} of {total:,}, to train every trial to the end"),
    ]
    selected = "The best trial was selected by these values, which are therefore optimistic."
    command = f"distribuuuu train --cfg {plan.out_dir / BEST_FILE} OUT_DIR DIR"
    config = html.heading(f"Best config: trial {best.trial}"), html.pairs(best.values_of)
    chart = html.grid([_chart(plan, rows)])
    return [html.tiles(entries), chart, *config, html.paragraph(selected, "note"), html.preformatted(command)]


def _chart(plan: Plan, rows: Sequence[Row]) -> str:
    """Return a chart of the results of each trial by epoch; a NaN separates the curves of a group."""
    groups: dict[str, list[tuple[float, float, str]]] = {"not continued": [], "last epoch reached": [], "best": []}
    step = -(-max(row.planned for row in rows) // _MAX_POINTS)
    for row in rows:
        options = zip(short_names(plan), row.values_of.values(), strict=False)
        name = f"trial {row.trial}, {', '.join(f'{key} {value}' for key, value in options)}"
        group = groups["best" if row is rows[0] else "last epoch reached" if row.seeds else "not continued"]
        points = sorted(row.curve.items())[::-step][::-1]
        group += [*((epoch, value, f"{name}: {value:.4g}") for epoch, value in points), (math.nan, math.nan, "")]
    curves = [Series(name, [x for x, _, _ in group], [y for _, y, _ in group], has_dots=True,
                     texts=[text for *_, text in group]) for name, group in groups.items()]  # fmt: skip
    marks = [Mark(epoch, f"rung: epoch {epoch}") for epoch in plan.rungs]
    return line_chart("Results by epoch", curves, "epoch", plan.metric, marks=marks)


def _trials(plan: Plan, rows: Sequence[Row]) -> PageSection:
    columns = [Column("trial", "d"), Column("status"), Column("epochs", "d"), Column(plan.metric, ".2f"),
               Column("seeds", "d"), *map(Column, short_names(plan))]  # fmt: skip
    cells = [[row.trial, row.status, row.epochs, row.objective, len(row.seeds),
              *(row.values_of.get(key, "") for key in plan.space)] for row in rows]  # fmt: skip
    failures = [[row.trial, seed, error, str(plan.folder(row.trial, seed) / CONSOLE_FILE)]
                for row in rows for seed, error in row.failures.items()]  # fmt: skip
    failed = [Column("trial", "d"), Column("seed", "d"), Column("error"), Column("output")]
    shown = [html.heading("Failed runs"), html.table(failed, failures)] if failures else []
    return PageSection("Trials", [html.table(columns, cells), *shown])
