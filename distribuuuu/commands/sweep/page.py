"""OUT_DIR/sweep.html: the results of a sweep, as a page in the style of a report."""

import math
from collections.abc import Sequence

from distribuuuu import __version__
from distribuuuu.commands.html.charts import Mark, Series, line_chart
from distribuuuu.commands.html.page import Column, PageSection, build_page, html
from distribuuuu.commands.sweep.trials import (
    BEST_FILE,
    CONSOLE_FILE,
    States,
    Sweep,
    TrialRow,
    build_rows,
    short_names,
    summarize,
)
from distribuuuu.config.errors import counted

PAGE_FILE = "sweep.html"
# Points of a curve at most.
_MAX_POINTS = 40


def build_sweep_page(sweep: Sweep, states: States) -> str:
    """Return the page as an HTML document."""
    rows = build_rows(sweep, states)
    summary = [html.paragraph(f"No trial has a result. {summarize(sweep, rows)}.")]
    if rows[0].objective is not None:
        summary = _summary(sweep, rows, states)
    subtitle = f"{counted(len(rows), 'trial')} of {counted(len(sweep.trials[0].values), 'option')}"
    title, footer = f"Sweep {sweep.out_dir.resolve().name}", f"distribuuuu {__version__}"
    sections = [PageSection("Summary", summary), _trials(sweep, rows)]
    return build_page(title, f"{subtitle}, compared by {sweep.metric}", sections, footer)


def _summary(sweep: Sweep, rows: Sequence[TrialRow], states: States) -> list[str]:
    best = rows[0]
    spent, total = sum(row.epochs for row in rows), sum(trial.epochs for trial in sweep.trials)
    entries = [
        (f"best {sweep.metric}", f"{best.objective:.2f}", counted(len(best.seeds), "seed")),
        ("trials", f"{len(rows):,}", f"{sum(bool(row.seeds) for row in rows):,} trained to the last epoch"),
        ("search", counted(spent, "epoch"), f"{spent / total:.0%} of {total:,}, to train every trial to the end"),
    ]
    selected = "The best trial was selected by these values, which are therefore optimistic."
    command = f"distribuuuu train --cfg {sweep.out_dir / BEST_FILE} OUT_DIR DIR"
    config = html.heading(f"Best config: trial {best.trial}"), html.pairs(sweep.trials[best.trial].values)
    chart = html.grid([_chart(sweep, rows, states)])
    return [html.tiles(entries), chart, *config, html.paragraph(selected, "note"), html.preformatted(command)]


def _chart(sweep: Sweep, rows: Sequence[TrialRow], states: States) -> str:
    """Return a chart of the results of each trial by epoch; a NaN separates the curves of a group."""
    groups: dict[str, list[tuple[float, float, str]]] = {"not continued": [], "last epoch reached": [], "best": []}
    step = -(-max(trial.epochs for trial in sweep.trials) // _MAX_POINTS)
    for row in rows:
        options = zip(short_names(sweep), sweep.trials[row.trial].values.values(), strict=True)
        name = f"trial {row.trial}, {', '.join(f'{key} {value}' for key, value in options)}"
        group = groups["best" if row is rows[0] else "last epoch reached" if row.seeds else "not continued"]
        points = sorted(states[row.trial, sweep.seeds[0]].values.items())[::-step][::-1]
        group += [*((epoch, value, f"{name}: {value:.4g}") for epoch, value in points), (math.nan, math.nan, "")]
    curves = [Series(name, [x for x, _, _ in group], [y for _, y, _ in group], has_dots=True,
                     texts=[text for *_, text in group]) for name, group in groups.items()]  # fmt: skip
    marks = [Mark(epoch, f"rung: epoch {epoch}") for epoch in sweep.rungs]
    return line_chart("Results by epoch", curves, "epoch", sweep.metric, marks=marks)


def _trials(sweep: Sweep, rows: Sequence[TrialRow]) -> PageSection:
    columns = [Column("trial", "d"), Column("status"), Column("epochs", "d"), Column(sweep.metric, ".2f"),
               Column("seeds", "d"), *map(Column, short_names(sweep))]  # fmt: skip
    cells = [[row.trial, row.status, row.epochs, row.objective, len(row.seeds),
              *sweep.trials[row.trial].values.values()] for row in rows]  # fmt: skip
    failures = [[row.trial, seed, error, str(sweep.folder(row.trial, seed) / CONSOLE_FILE)]
                for row in rows for seed, error in row.failures.items()]  # fmt: skip
    failed = [Column("trial", "d"), Column("seed", "d"), Column("error"), Column("output")]
    shown = [html.heading("Failed runs"), html.table(failed, failures)] if failures else []
    return PageSection("Trials", [html.table(columns, cells), *shown])
