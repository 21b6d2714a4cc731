"""OUT_DIR/sweep.html: the results of a sweep, as a page in the style of a report."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from distribuuuu import __version__
from distribuuuu.commands.html.charts import Mark, Series, line_chart, stacked_bar
from distribuuuu.commands.html.history import read_facts
from distribuuuu.commands.html.page import Column, PageSection, build_page, html
from distribuuuu.commands.stats.significance import differs_significantly, mean_interval
from distribuuuu.commands.sweep.live_table import short_names, summarize
from distribuuuu.commands.sweep.trials import BEST_FILE, CONSOLE_FILE, States, Sweep, TrialRow, build_rows
from distribuuuu.config.errors import counted
from distribuuuu.records.log_table import format_duration
from distribuuuu.records.read_results import FILE_NAME

PAGE_FILE = "sweep.html"
# Groups of trials in the order of their colors; points of a curve at most.
_PAUSED, _FULL, _BEST, _MAX_POINTS = "not continued", "last epoch reached", "best", 40
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def build_sweep_page(sweep: Sweep, states: States) -> str:
    """Return the page as an HTML document."""
    rows = build_rows(sweep, states)
    sections = [_summary(sweep, rows, states), _options(sweep, rows), _seeds(sweep, rows), _trials(sweep, rows)]
    subtitle = f"{counted(len(rows), 'trial')} of {counted(len(sweep.trials[0].values), 'option')}"
    title, shown = f"Sweep {sweep.out_dir.resolve().name}", [section for section in sections if section.parts]
    return build_page(title, f"{subtitle}, compared by {sweep.metric}", shown, f"distribuuuu {__version__}")


def _chart(title: str, sweep: Sweep, rows: Sequence[TrialRow], points: Mapping[int, Sequence[tuple[float, float]]],
           x_label: str, **options) -> str:  # fmt: skip
    """Return a chart of the points (x, y) of each trial, joined if there are several of one; NaNs are left out.

    Trials that are far worse than half of the others are drawn at its edge, so that the differences between these show.
    """
    scores = sorted(sweep.score(y) for places in points.values() for _, y in places if math.isfinite(y)) or [0.0]
    spread = scores[-1] - statistics.median(scores) or math.inf
    ends = scores[-1], max(scores[0], scores[-1] - 4 * spread)
    margin = 0.06 * (ends[0] - ends[1]) or 0.5
    low, high = sorted(sweep.score(end) for end in (ends[0] + margin, ends[1] - margin))
    groups: dict[str, list[tuple[float, float, str]]] = {_PAUSED: [], _FULL: [], _BEST: []}
    for row in rows:
        values = sweep.trials[row.trial].values.values()
        name = ", ".join(f"{key} {value}" for key, value in zip(short_names(sweep), values, strict=True))
        group = groups[_BEST if row is rows[0] else _FULL if row.seeds else _PAUSED]
        group += [(x, y, f"trial {row.trial}, {name}: {y:.4g}") for x, y in points.get(row.trial, ())]
        group += [(group[-1][0], math.nan, "")] if group else []
    is_joined = any(len(places) > 1 for places in points.values())
    curves = [Series(name, [x for x, _, _ in group], [y for _, y, _ in group], has_dots=True, is_joined=is_joined,
                     texts=[text for *_, text in group]) for name, group in groups.items()]  # fmt: skip
    return line_chart(title, curves, x_label, sweep.metric, y_range=(low, high), **options)


def _summary(sweep: Sweep, rows: Sequence[TrialRow], states: States) -> PageSection:
    best = rows[0]
    if best.objective is None:
        return PageSection("Summary", [html.paragraph(f"No trial has a result. {summarize(sweep, rows)}.", "notice")])
    seeds = list(best.seeds.values())
    spent, total = sum(row.epochs for row in rows), sum(trial.epochs for trial in sweep.trials)
    files = (sweep.folder(*run) / FILE_NAME for run, state in states.items() if state.epochs)
    hours = sum(facts["training"]["hours"] for file in files if (facts := read_facts(file, "training", [])))
    interval = (
        "95 % interval {:.2f} to {:.2f}, ".format(*mean_interval(seeds))
        if len(seeds) > 1 and math.isfinite(sum(seeds))
        else ""
    )
    entries = [
        (f"best {sweep.metric}", f"{best.objective:.2f}", f"{interval}{counted(len(seeds), 'seed')}"),
        ("trials", f"{len(rows):,}", f"{sum(bool(row.seeds) for row in rows):,} trained to the last epoch"),
        ("search", counted(spent, "epoch"), f"{spent / total:.0%} of {total:,}, to train every trial to the end"),
        ("with further seeds", counted(sum(state.epochs for state in states.values()), "epoch"),
         f"{format_duration(3600 * hours)} of training" if hours else ""),
    ]  # fmt: skip
    step = -(-max(trial.epochs for trial in sweep.trials) // _MAX_POINTS)
    curves = {row.trial: sorted(states[row.trial, sweep.seeds[0]].values.items())[::-step][::-1] for row in rows}
    last = {row.trial: [(row.trial, row.objective)] for row in rows if row.objective is not None}
    marks = [Mark(epoch, f"rung: epoch {epoch}") for epoch in sweep.rungs]
    note = "Dashed: rungs, after which successive halving selects." if marks else ""
    charts = [_chart("Result of each trial", sweep, rows, last, "trial"),
              _chart("Results by epoch", sweep, rows, curves, "epoch", marks=marks, note=note)]  # fmt: skip
    cost = []
    for epochs in sorted({row.epochs for row in rows if row.epochs}):
        num = sum(row.epochs == epochs for row in rows)
        cost.append((f"{counted(num, 'trial')} to epoch {epochs}:", num * epochs, counted(num * epochs, "epoch")))
    cost += [("not spent:", total - spent, counted(total - spent, "epoch"))] if total > spent else []
    selected = "The best trial was selected by these values, which are therefore optimistic."
    command = f"distribuuuu train --cfg {sweep.out_dir / BEST_FILE} OUT_DIR DIR"
    config = html.heading(f"Best config: trial {best.trial}"), html.pairs(sweep.trials[best.trial].values)
    parts = [html.tiles(entries), html.grid(charts), stacked_bar("Cost of the search", cost), *config]
    return PageSection("Summary", [*parts, html.paragraph(selected, "note"), html.preformatted(command)])


def _options(sweep: Sweep, rows: Sequence[TrialRow]) -> PageSection:
    """Return the section of the effect of each option on the results after the same number of epochs."""
    charts = []
    points = {row.trial: value for row in rows if (value := row.values[0]) is not None and math.isfinite(value)}
    for key, text in sweep.inputs["space"].items():
        values = [trial.values[key] for trial in sweep.trials]
        names = [] if all(map(_NUMBER.fullmatch, values)) else list(dict.fromkeys(values))
        x = [float(names.index(value)) if names else float(value) for value in values]
        is_log = text.startswith("log:") or (":" not in text and not names and 0 < 8 * min(x) <= max(x))
        places = {trial: [(x[trial], value)] for trial, value in points.items()}
        charts.append(_chart(key, sweep, rows, places, key, is_log=is_log, x_names=names))
    after = f"{sweep.metric} after {f'epoch {sweep.rungs[0]}' if sweep.rungs else 'the last epoch'}."
    shown = html.grid(charts, "narrow", max_width=360 * len(charts))
    return PageSection("Options", [html.paragraph(after, "note"), shown] if points else [])


def _seeds(sweep: Sweep, rows: Sequence[TrialRow]) -> PageSection:
    """Return the section of the trials that were repeated with other seeds."""
    groups = [(row.trial, list(row.seeds.values())) for row in rows if len(row.seeds) > 1]
    groups = [(trial, values) for trial, values in groups if math.isfinite(sum(values))]
    if not groups:
        return PageSection("Seeds", [])
    cells: list[list] = []
    intervals = []
    for trial, values in groups:
        intervals.append(mean_interval(values))
        differs = "yes" if differs_significantly(groups[0][1], values) else "no"
        cells.append([trial, len(values), statistics.fmean(values), *intervals[-1], differs if cells else "–"])
    x = [float(place) for place in range(len(groups)) for _ in range(3)]
    ends = [y for low, high in intervals for y in (low, high, math.nan)]
    dots = [(float(place), value) for place, (_, values) in enumerate(groups) for value in values]
    curves = [Series("95 % interval of the mean", x, ends),
              Series("seed", [x for x, _ in dots], [y for _, y in dots], has_dots=True, is_joined=False)]  # fmt: skip
    names = [str(trial) for trial, _ in groups]
    chart = line_chart("Trials with several seeds", curves, "trial", sweep.metric, x_names=names)
    columns = [Column("trial", "d"), Column("n", "d"), *(Column(name, ".2f") for name in ("mean", "low", "high")),
               Column("differs")]  # fmt: skip
    note = "Low and high: 95 % interval. Differs: from the first trial, at the level of 5 %. Both by Student's t."
    shown = html.table(columns, cells, sortable=False) + html.paragraph(note, "note")
    return PageSection("Seeds", [html.grid([chart, Markup("<div>{}</div>").format(shown)], "top")])


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
