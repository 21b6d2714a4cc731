"""Results of a sweep: the rows of its trials, read from the files of their runs, as a table, a page and files."""

import functools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distribuuuu import __version__
from distribuuuu.checkpoint.manager import CheckpointManager, position_of
from distribuuuu.checkpoint.weights_files import KINDS, RAW
from distribuuuu.commands.html.charts import Mark, Series, line_chart
from distribuuuu.commands.html.history import read_history, read_lines
from distribuuuu.commands.html.page import Column, PageSection, build_page, html
from distribuuuu.commands.output import align_columns
from distribuuuu.commands.sweep.plan import MAX_TRIALS, Plan, to_texts, to_words
from distribuuuu.config import load_cfg
from distribuuuu.config.config_node import changed
from distribuuuu.config.errors import counted
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.untrusted import printable
from distribuuuu.records.results import replace_nonfinite

CONSOLE_FILE, FAILED_FILE = "console.log", "failed.txt"
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


def summarize(rows: Sequence[Row]) -> str:
    """Return the best trial, the number of trials of each status, and the epochs of the search, as a line."""
    counts = Counter(row.status for row in rows)
    statuses = [f"{counts[name]} {name}" for name in (*STATUSES.values(), "failed") if counts[name]]
    epochs = f"{sum(row.epochs for row in rows)} of {counted(sum(row.planned for row in rows), 'epoch')}"
    best = f"best: trial {rows[0].trial}; " if rows[0].objective is not None else ""
    return f"{best}{counted(len(rows), 'trial')}: {', '.join(statuses)}; {epochs}"


def format_rows(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table, the heading first."""
    lines = [["trial", "status", "epochs", plan.metric, "seeds", *plan.space]]
    for row in rows:
        objective = "" if row.objective is None else f"{row.objective:.4g}"
        cells = [row.trial, row.status, f"{row.epochs}/{row.planned}", objective, len(row.seeds) or ""]
        values = [row.values_of.get(key, "") for key in plan.space]
        lines.append([*map(str, cells), *values, *row.failures.values()])
    return align_columns(lines, ">" * len(lines[0]))


def write_results(plan: Plan, rows: Sequence[Row], importance: Mapping[str, float]) -> list[Path]:
    """Write the table of a finished sweep, its page and the config of its best run; return the paths."""
    record = {"schema": 2, "metric": plan.metric, "higher_is_better": plan.higher_is_better, "rungs": plan.rungs,
              "seeds": [*plan.seeds], "rows": replace_nonfinite([asdict(row) for row in rows])}  # fmt: skip
    texts = {"sweep.html": build_sweep_page(plan, rows, importance),
             "sweep_results.json": json.dumps(record, indent=2) + "\n"}  # fmt: skip
    if (best := rows[0]).seeds:
        cfg = load_cfg(plan.flags.cfg, [*plan.options, *to_words(best.values_of)])
        header = f"# Trial {best.trial} of a sweep: {plan.metric} {best.objective:.3f} on its evaluation images.\n"
        texts["best.yaml"] = header + changed(cfg, {"OUT_DIR": str(plan.out_dir / "best")}).dump()
    for name, text in texts.items():
        with replacing(plan.out_dir / name, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    return [plan.out_dir / name for name in texts]


def build_sweep_page(plan: Plan, rows: Sequence[Row], importance: Mapping[str, float]) -> str:
    """Return OUT_DIR/sweep.html, a page in the style of a report."""
    best, note = rows[0], "The best trial was selected by these values, which are therefore optimistic."
    summary = [html.paragraph(f"{summarize(rows)}."), html.grid([_chart(plan, rows)])]
    if best.objective is not None:
        tiles = [(f"best {plan.metric}", f"{best.objective:.2f}", counted(len(best.seeds), "seed"))]
        command = f"distribuuuu train --cfg {plan.out_dir / 'best.yaml'} OUT_DIR DIR"
        summary = [html.tiles(tiles), *summary, html.heading(f"Best config: trial {best.trial}"),
                   html.pairs(best.values_of), html.paragraph(note, "note"), html.preformatted(command)]  # fmt: skip
    if importance:
        columns = [Column("option"), Column("share", ".0%", bar=True)]
        summary += [html.heading("Importance of the options"), html.table(columns, [*importance.items()])]
    columns = [Column("trial", "d"), Column("status"), Column("epochs", "d"), Column(plan.metric, ".2f"),
               Column("seeds", "d"), *map(Column, plan.space)]  # fmt: skip
    cells = [[row.trial, row.status, row.epochs, row.objective, len(row.seeds),
              *(row.values_of.get(key, "") for key in plan.space)] for row in rows]  # fmt: skip
    trials = [html.table(columns, cells)]
    if failures := [[row.trial, seed, error, str(plan.folder(row.trial, seed) / CONSOLE_FILE)]
                    for row in rows for seed, error in row.failures.items()]:  # fmt: skip
        columns = [Column("trial", "d"), Column("seed", "d"), Column("error"), Column("output")]
        trials += [html.heading("Failed runs"), html.table(columns, failures)]
    subtitle = f"{counted(len(rows), 'trial')} of {counted(len(plan.space), 'option')}, compared by {plan.metric}"
    sections = [PageSection("Summary", summary), PageSection("Trials", trials)]
    return build_page(f"Sweep {plan.out_dir.resolve().name}", subtitle, sections, f"distribuuuu {__version__}")


def _chart(plan: Plan, rows: Sequence[Row]) -> str:
    """Return a chart of the results of each trial by epoch; a NaN separates the curves of a group."""
    groups: dict[str, list[tuple[float, float, str]]] = {"not continued": [], "last epoch reached": [], "best": []}
    step = -(-max(row.planned for row in rows) // _MAX_POINTS)
    for row in rows:
        name = f"trial {row.trial}, {', '.join(f'{key} {value}' for key, value in row.values_of.items())}"
        points = [(epoch, value, f"{name}: {value:.4g}") for epoch, value in sorted(row.curve.items())[::-step][::-1]]
        group = "best" if row is rows[0] else "last epoch reached" if row.seeds else "not continued"
        groups[group] += [*points, (math.nan, math.nan, "")]
    curves = [Series(name, [x for x, _, _ in group], [y for _, y, _ in group], has_dots=True,
                     texts=[text for *_, text in group]) for name, group in groups.items()]  # fmt: skip
    marks = [Mark(epoch, f"rung: epoch {epoch}") for epoch in plan.rungs]
    return line_chart("Results by epoch", curves, "epoch", plan.metric, marks=marks)
