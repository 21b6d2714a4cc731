"""The command table: results of runs, mean, standard deviation and 95 % interval over the seeds of each config."""

import argparse
import re
import statistics
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distribuuuu.checkpoint.weights_files import RAW, by_precedence, common_kind
from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.commands.output import WIDTH, align_columns, print_report
from distribuuuu.commands.stats import run_groups
from distribuuuu.commands.stats.intervals import mean_interval, wilson_interval
from distribuuuu.commands.stats.run_groups import Result, describe_data, group_runs, is_fold, read_runs, row_name
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.locate import find_shipped
from distribuuuu.config.run_files import local_run
from distribuuuu.files.untrusted import printable

_DESCRIPTION = """Make a table of runs, in Markdown unless it is for a terminal. Each config
has one row: the mean and standard deviation over its seeds and folds.
Unfinished runs are omitted.

  %(prog)s exp
  %(prog)s 'exp/*/resnet*' --epoch best
"""
# Text of an empty cell.
EMPTY = "–"
# Columns after the name.
PLAN_COLUMNS = ("params (M)", "px", "epochs", "global batch")
_COST_COLUMNS = ("hours", "images/s", "peak memory", "hardware", "commit")
# Columns of metrics whose title is not their display name.
METRIC_COLUMNS = {"top1": "top-1 here", "topk": "top-5 here", "map": "mAP here"}


def table(prog: str, args: list[str]) -> int:
    """Print a table; return the exit status, or raise ConfigError with what could not be read."""
    flags = build_parser(prog).parse_args(args)
    problems: list[str] = []
    groups, notes = group_runs(read_runs([local_run(run) for run in flags.runs], problems))
    rows = [make_row(group, flags.epoch) for group in groups]
    for note in notes:
        print(printable(note), file=sys.stderr)
    if rows:
        is_text = flags.format == "text" or not flags.format and sys.stdout.isatty()
        print_report((format_text if is_text else format_table)(rows, flags.epoch).rstrip("\n"))
    elif not problems:
        problems.append("no runs to show; fix: name folders of finished runs")
    if problems:
        raise ConfigError(problems)
    return 0


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = CommandParser(prog, description=_DESCRIPTION)
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="*", help="a run's folder, a folder of them, a .json file, a glob")
    add("--epoch", choices=("last", "best"), default="last", help="the evaluation to show; the best one was selected "
        "on the same images")  # fmt: skip
    add("--format", choices=("text", "markdown"), help="text for a terminal, the default there, with the main "
        "metric; markdown: all columns")  # fmt: skip
    return parser


@dataclass(frozen=True)
class Row:
    """A row of a table. The details tell rows of one name apart; a column that `cells` lacks is empty."""

    name: str
    order: tuple
    details: str
    cells: dict[str, str]
    weights: str = RAW


def make_row(group: Sequence[Result], epoch: str, changes: dict[str, Any] | None = None) -> Row:
    """Return the row of runs that differ in the seed only.

    Args:
        epoch: the evaluation to show: "last" or "best".
        changes: the options in the name of the row; None: all that were changed.
    """
    records = [run.record for run in group]
    first, training = records[0], [record["training"] for record in records]
    plan = training[0]
    kind = common_kind([record["accuracy"] for record in records])
    evaluations = [record["accuracy"][kind][epoch] for record in records]
    folds = len({run.record["data"]["folder"] for run in group if is_fold(run.record)})
    counts = [f"n = {len(group)}", f"{folds} folds" if folds > 1 else "", kind.upper() if kind != RAW else ""]
    count = f"({', '.join(filter(None, counts))})"
    commits = [record["commit"] or EMPTY for record in records]
    peaks = [record["peak_memory"]["mib"] for record in records if record["peak_memory"]["mib"] is not None]
    return Row(
        name=row_name(first, first["overrides"] if changes is None else changes),
        order=row_order(first["config"], first["model"]["params_m"], plan["global_batch"]),
        details=f"config {first['config_hash'][: run_groups.DIGITS_OF_HASH]}; {describe_data(first)}",
        cells={
            "params (M)": f"{first['model']['params_m']:.3f}",
            "px": image_sizes(plan["px"], first["evaluation"]),
            "epochs": _count_epochs(first),
            "global batch": str(plan["global_batch"]),
            **_measured_cells(first, evaluations, count),
            "hours": _mean([part["hours"] for part in training], ".3g"),
            "images/s": _mean([part["images_per_s"] for part in training], ",.0f"),
            "peak memory": f"{max(peaks):,.0f} MiB" if peaks else EMPTY,
            "hardware": "; ".join(dict.fromkeys(record["hardware"] for record in records)),
            "commit": re.sub("([0-9a-f]{7})[0-9a-f]+", r"\1", "; ".join(dict.fromkeys(commits))),
        },
        weights=kind,
    )


def _count_epochs(record: dict) -> str:
    """Return the planned epochs; OPTIM.LAST_EPOCH of the shipped config shortens the last one."""
    files, planned = find_shipped(record["config"] or ""), record["training"]["epochs_planned"]
    optim = load_cfg(files[0]).OPTIM if len(files) == 1 else None
    last = optim.LAST_EPOCH if optim and optim.MAX_EPOCH == planned else 1.0
    return f"{round(planned - 1 + last, 1):g}"


def _measured_cells(record: dict, evaluations: Sequence[dict], count: str) -> dict[str, str]:
    """Return the cell of each metric; the first one includes the interval and the number of runs, `count`."""
    cells: dict[str, str] = {}
    k = record["evaluation"].get("k")
    for name, label in record["evaluation"]["metrics"].items():
        known = [result[name] for result in evaluations if result[name] is not None]
        suffix = f" (top-{k})" if name == "topk" and k != 5 else ""
        cell = f"{statistics.fmean(known):.2f}" if known else EMPTY
        cell += f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else ""
        if not cells:
            cell += _interval(known, record["evaluation"]["count"] if name in ("top1", "topk") else 0)
            suffix += f" {count}"
        cells[METRIC_COLUMNS.get(name, f"{label} here")] = cell + suffix
    return cells


def _interval(known: Sequence[float], num_images: int) -> str:
    """Return the 95 % interval of the mean over seeds, or of the accuracy of one run on so many images, with a space.

    Empty if it is unknown, as that of one run by a metric that is no share of the images (`num_images` 0).
    """
    if len(known) > 1:
        low, high = mean_interval(known)
    elif known and num_images and 0 <= known[0] <= 100:
        low, high = (100 * end for end in wilson_interval(known[0] / 100 * num_images, num_images))
    else:
        return ""
    return f" [{low:.2f}, {min(high, 100) if num_images else high:.2f}]"


def _mean(values: Sequence[float | None], digits: str) -> str:
    known = [value for value in values if value is not None]
    return format(statistics.fmean(known), digits) if known else EMPTY


def image_sizes(train: Any, evaluation: dict) -> str:
    """Return the size of training images, then the resize and crop sizes of evaluation, in pixels."""
    extra = "" if evaluation["interpolation"] == "bilinear" else f" {evaluation['interpolation']}"
    extra += " + mirrored" if evaluation.get("flip") else ""
    sizes = train, evaluation["resize"], evaluation["crop"]
    shown = [" x ".join(map(str, size)) if isinstance(size, (list, tuple)) else str(size) for size in sizes]
    extra += f" {evaluation['crop_mode']}" if "crop_mode" in evaluation else ""
    return printable(f"{shown[0]} → {shown[1]}/{shown[2]}{extra}")


def row_order(config: str | None, params_m: float, global_batch: int) -> tuple:
    """Return the key by which rows are sorted."""
    return ((config or "").rpartition("/")[0], params_m, global_batch, config or "")


def format_table(rows: Sequence[Row], epoch: str, plan: Sequence[str] = PLAN_COLUMNS, source: str = "") -> str:
    """Return a Markdown table of the rows, without empty columns, and a legend below it, after a text on `source`.

    `plan` are the columns before the metrics.
    """
    lines, legend = _arrange(rows, epoch, plan)
    legend = f"{source} {legend}".strip()
    lines.insert(1, ["---"] * len(lines[0]))
    cells = ([printable(" ".join(cell.replace("|", "\\|").split())) for cell in line] for line in lines)
    table = "".join(f"| {' | '.join(line)} |\n" for line in cells)
    return table + (f"\n{legend}\n" if legend else "")


def format_text(rows: Sequence[Row], epoch: str) -> str:
    """Return the table for a terminal: the main metric of each row, long names on several lines, and a legend."""
    lines, legend = _arrange(rows, epoch, PLAN_COLUMNS)
    shown = [at for at, name in enumerate(lines[0]) if name == "epochs" or any("(n = " in line[at] for line in lines)]
    numbers = align_columns([[printable(line[at]) for at in shown] for line in lines], "<" * len(shown))
    names = [printable(line[0]) for line in lines]
    width = min(max(map(len, names)), max(20, WIDTH - 2 - max(map(len, numbers))))
    table = []
    for name, cells in zip(names, numbers, strict=True):
        first, *more = textwrap.wrap(name, width, subsequent_indent="  ", break_on_hyphens=False) or [""]
        table += [f"{first:<{width}}  {cells}", *more]
    legend = f"{legend} All columns: --format markdown.".strip()
    return "\n".join([*table, "", textwrap.fill(legend, WIDTH)]) + "\n"


def _arrange(rows: Sequence[Row], epoch: str, plan: Sequence[str]) -> tuple[list[list[str]], str]:
    """Return the lines of a table without empty columns, the header first, and its legend."""
    rows = sorted(rows, key=lambda row: (row.order, row.name, row.details))
    names = [row.name for row in rows]
    known = (*plan, *METRIC_COLUMNS.values())
    others = sorted({name for row in rows for name in row.cells} - {*known, *_COST_COLUMNS})
    every = (*known, *others, *_COST_COLUMNS)
    columns = [name for name in every if any(row.cells.get(name, EMPTY) != EMPTY for row in rows)]
    lines = [["config", *columns]]
    for row in rows:
        name = row.name if names.count(row.name) == 1 else f"{row.name} ({row.details})"
        lines.append([name, *(row.cells.get(column, EMPTY) for column in columns)])
    legend = []
    if any("hours" in row.cells for row in rows):
        legend += [f"Here: of the {epoch} epoch, the mean ± the sample standard deviation over n runs."]
        legend += ["In brackets: the 95 % interval, over runs by Student's t, with n = 1 Wilson's over images."]
    averages = {row.weights for row in rows} - {RAW}
    legend += [f"{kind.upper()}: of the averaged weights." for kind in by_precedence(averages)]
    return lines, " ".join(legend)
