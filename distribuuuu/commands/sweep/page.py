"""OUT_DIR/sweep.html: the results of a sweep, as a page in the style of a report."""

import contextlib
import math
from collections.abc import Mapping, Sequence

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
    if rows[0].objective is None:
        sections = [PageSection("Summary", [html.paragraph(f"No trial has a result. {summarize(sweep, rows)}.")])]
    else:
        sections = [_summary(sweep, rows, states), _options(sweep, rows)]
    subtitle = f"{counted(len(rows), 'trial')} of {counted(len(sweep.trials[0].values), 'option')}"
    shown = [section for section in (*sections, _trials(sweep, rows)) if section.parts]
    title, footer = f"Sweep {sweep.out_dir.resolve().name}", f"distribuuuu {__version__}"
    return build_page(title, f"{subtitle}, compared by {sweep.metric}", shown, footer)


def _chart(title: str, sweep: Sweep, rows: Sequence[TrialRow], points: Mapping[int, Sequence[tuple[float, float]]],
           x_label: str, **options) -> str:  # fmt: skip
    """Return a chart of the points (x, y) of each trial, joined if there are several of one; NaNs are left out."""
    groups: dict[str, list[tuple[float, float, str]]] = {"not continued": [], "last epoch reached": [], "best": []}
    for row in rows:
        values = sweep.trials[row.trial].values.values()
        name = ", ".join(f"{key} {value}" for key, value in zip(short_names(sweep), values, strict=True))
        group = groups["best" if row is rows[0] else "last epoch reached" if row.seeds else "not continued"]
        group += [(x, y, f"trial {row.trial}, {name}: {y:.4g}") for x, y in points.get(row.trial, ())]
        group += [(group[-1][0], math.nan, "")] if group else []
    is_joined = any(len(places) > 1 for places in points.values())
    curves = [Series(name, [x for x, _, _ in group], [y for _, y, _ in group], has_dots=True, is_joined=is_joined,
                     texts=[text for *_, text in group]) for name, group in groups.items()]  # fmt: skip
    return line_chart(title, curves, x_label, sweep.metric, **options)


def _summary(sweep: Sweep, rows: Sequence[TrialRow], states: States) -> PageSection:
    best = rows[0]
    spent, total = sum(row.epochs for row in rows), sum(trial.epochs for trial in sweep.trials)
    entries = [
        (f"best {sweep.metric}", f"{best.objective:.2f}", counted(len(best.seeds), "seed")),
        ("trials", f"{len(rows):,}", f"{sum(bool(row.seeds) for row in rows):,} trained to the last epoch"),
        ("search", counted(spent, "epoch"), f"{spent / total:.0%} of {total:,}, to train every trial to the end"),
    ]
    step = -(-max(trial.epochs for trial in sweep.trials) // _MAX_POINTS)
    curves = {row.trial: sorted(states[row.trial, sweep.seeds[0]].values.items())[::-step][::-1] for row in rows}
    marks = [Mark(epoch, f"rung: epoch {epoch}") for epoch in sweep.rungs]
    chart = _chart("Results by epoch", sweep, rows, curves, "epoch", marks=marks)
    selected = "The best trial was selected by these values, which are therefore optimistic."
    command = f"distribuuuu train --cfg {sweep.out_dir / BEST_FILE} OUT_DIR DIR"
    config = html.heading(f"Best config: trial {best.trial}"), html.pairs(sweep.trials[best.trial].values)
    parts = [html.tiles(entries), html.grid([chart]), *config, html.paragraph(selected, "note")]
    return PageSection("Summary", [*parts, html.preformatted(command)])


def _options(sweep: Sweep, rows: Sequence[TrialRow]) -> PageSection:
    """Return the section of the effect of each number among the options on the results after the same epochs."""
    charts = []
    points = {row.trial: value for row in rows if (value := row.values[0]) is not None and math.isfinite(value)}
    for key, text in sweep.inputs["space"].items():
        with contextlib.suppress(ValueError):  # words
            x = [float(trial.values[key]) for trial in sweep.trials]
            is_log = text.startswith("log:") or (":" not in text and 0 < 8 * min(x) <= max(x) < math.inf)
            places = {trial: [(x[trial], value)] for trial, value in points.items() if math.isfinite(x[trial])}
            charts.append(_chart(key, sweep, rows, places, key, is_log=is_log))
    after = f"{sweep.metric} after {f'epoch {sweep.rungs[0]}' if sweep.rungs else 'the last epoch'}."
    return PageSection("Options", [html.paragraph(after, "note"), html.grid(charts)] if points and charts else [])


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
