"""The command table: results of runs, mean, standard deviation and 95 % interval over the seeds of each config."""

import argparse
import re
import statistics
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribuuuu.checkpoint.weights_files import RAW, by_precedence, common_kind
from distribuuuu.commands.flag_hints import CommandParser
from distribuuuu.commands.output import WIDTH, align_columns, print_report
from distribuuuu.commands.stats.run_groups import (
    DIGITS_OF_HASH,
    Result,
    collecting,
    describe_data,
    find_files,
    group_runs,
    is_fold,
    read_runs,
    row_name,
)
from distribuuuu.commands.stats.significance import mean_interval, wilson_interval
from distribuuuu.config import Config, ConfigError, load_cfg, yaml_file
from distribuuuu.config.locate import ListedConfig, find_config, find_shipped, shipped_file
from distribuuuu.config.registry import dataset_class
from distribuuuu.config.run_files import local_run
from distribuuuu.files.untrusted import printable
from distribuuuu.records.read_results import list_metrics
from distribuuuu.records.results import config_name, describe_evaluation, hash_config

_DESCRIPTION = """Make a table of runs, in Markdown unless it is for a terminal. Each config
has one row: the mean and standard deviation over its seeds and folds, beside
published results. Unfinished runs are omitted.

  %(prog)s exp
  %(prog)s 'exp/*/resnet*' --epoch best
"""
REPORTED = shipped_file("benchmarks/reported.yaml")
# Text of an empty cell.
EMPTY = "–"
# Options that set the global batch; runs with the reported global batch may set them differently.
_BATCH_KEYS = ("TRAIN.BATCH_SIZE", "TRAIN.GLOBAL_BATCH_SIZE")
# Columns after the name.
_PLAN_COLUMNS = ("params (M)", "px", "epochs", "global batch", "top-1 reported", "top-5 reported", "reported by")
_COST_COLUMNS = ("hours", "images/s", "peak memory", "hardware", "commit")
# Columns of metrics whose title is not their display name.
_METRIC_COLUMNS = {"top1": "top-1 here", "topk": "top-5 here", "map": "mAP here"}


def table(prog: str, args: list[str]) -> int:
    """Print a table; return the exit status.

    Raises:
        ConfigError: with what could not be read; the rest has been printed.
    """
    flags = build_parser(prog).parse_args(args)
    problems: list[str] = []
    groups, notes = group_runs(read_runs([local_run(run) for run in flags.runs], problems))
    reported = yaml_file.load(REPORTED.read_text(encoding="utf-8"))
    rows = [make_row(group, flags.epoch, reported) for group in groups]
    measured = {row.config for row in rows}
    configs = read_configs(flags.configs, problems)
    rows += [make_config_row(cfg, reported) for cfg in configs if config_name(cfg) not in measured]
    for note in notes:
        print(printable(note), file=sys.stderr)
    if rows:
        is_text = flags.format == "text" or not flags.format and sys.stdout.isatty()
        print_report((format_text if is_text else format_table)(rows, flags.epoch).rstrip("\n"))
    elif not problems:
        problems.append("no runs to show; fix: name folders of finished runs, or --configs")
    if problems:
        raise ConfigError(problems)
    return 0


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = CommandParser(prog, description=_DESCRIPTION)
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="*", help="a run's folder, a folder of them, a .json file, a glob")
    add("--configs", metavar="YAML", nargs="+", default=[], help="also show these configs, measured or not: files or "
        "folders of them")  # fmt: skip
    add("--epoch", choices=("last", "best"), default="last", help="the evaluation to show; the best one was selected "
        "on the same images")  # fmt: skip
    add("--format", choices=("text", "markdown"), help="text for a terminal, the default there, without the columns of "
        "cost; markdown: all columns")  # fmt: skip
    return parser


def read_configs(patterns: Sequence[str], problems: list[str]) -> list[Config]:
    """Return the configs in files and folders, or of shipped names; append what cannot be read to `problems`."""
    configs = []
    for pattern in patterns:
        shipped = shipped_file("configs") / pattern
        found = str(shipped) if shipped.is_dir() and not Path(pattern).exists() else find_config(pattern)
        with collecting(problems):
            configs += [load_cfg(ListedConfig(path)) for path in find_files(found, ("*.yaml",))]
    return configs


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        name: the first cell.
        config: name of the config; None: options were changed.
        order: sort key.
        details: what tells rows of one name apart.
        cells: text of each column; a missing column is empty.
        weights: the kind of weights of the accuracy.
    """

    name: str
    config: str | None
    order: tuple
    details: str
    cells: dict[str, str]
    weights: str = RAW


def _list_changes(record: dict, published: dict) -> dict:
    """Return the changed options.

    Those of the batch count only if the global batch is not the reported one; those of the data do not count where they
    are known to name the same images.
    """
    global_batch, same = record["training"]["global_batch"], published.get("same_images", {})
    changes = {key: value for key, value in record["overrides"].items() if key not in same or same[key] != value}
    if "global_batch" not in published:
        return changes
    changes = {key: value for key, value in changes.items() if key not in _BATCH_KEYS}
    return changes if published["global_batch"] == global_batch else {**changes, "global batch": global_batch}


def make_row(group: Sequence[Result], epoch: str, reported: dict[str, dict]) -> Row:
    """Return the row of runs that differ in the seed only.

    Args:
        group: one or more runs.
        epoch: the evaluation to show: "last" or "best".
        reported: published results by config: params, global_batch, top1, top5, source, and the options of
            `same_images`.
    """
    records = [run.record for run in group]
    first, training = records[0], [record["training"] for record in records]
    plan = training[0]
    published = reported.get(first["config"], {})
    changes = _list_changes(first, published)
    published = {} if changes else published
    kind = common_kind([record["accuracy"] for record in records])
    evaluations = [record["accuracy"][kind][epoch] for record in records]
    folds = len({run.record["data"]["folder"] for run in group if is_fold(run.record)})
    counts = [f"n = {len(group)}", f"{folds} folds" if folds > 1 else "", kind.upper() if kind != RAW else ""]
    count = f"({', '.join(filter(None, counts))})"
    commits = [record["commit"] or EMPTY for record in records]
    peaks = [record["peak_memory"]["mib"] for record in records if record["peak_memory"]["mib"] is not None]
    return Row(
        name=row_name(first, changes),
        config=None if changes else first["config"],
        order=_order(first["config"], first["model"]["params_m"], plan["global_batch"]),
        details=f"config {first['config_hash'][:DIGITS_OF_HASH]}; {describe_data(first)}",
        cells={
            "params (M)": f"{first['model']['params_m']:.3f}",
            "px": _image_sizes(plan["px"], first["evaluation"]),
            "epochs": _count_epochs(first),
            "global batch": str(plan["global_batch"]),
            **_reported_cells(published),
            **_measured_cells(first, evaluations, count),
            "hours": _mean([part["hours"] for part in training], ".3g"),
            "images/s": _mean([part["images_per_s"] for part in training], ",.0f"),
            "peak memory": f"{max(peaks):,.0f} MiB" if peaks else EMPTY,
            "hardware": "; ".join(dict.fromkeys(record["hardware"] for record in records)),
            "commit": re.sub("([0-9a-f]{7})[0-9a-f]+", r"\1", "; ".join(dict.fromkeys(commits))),
        },
        weights=kind,
    )


def make_config_row(cfg: Config, reported: dict[str, dict]) -> Row:
    """Return the row of a config without runs; `reported` as for `make_row`."""
    name, optim, train = config_name(cfg), cfg.OPTIM, cfg.TRAIN
    published = reported.get(name, {}) if name else {}
    global_batch = train.GLOBAL_BATCH_SIZE or int(float(published.get("global_batch", 0)))
    params = str(published.get("params", EMPTY))
    cells = {
        "params (M)": params,
        "px": _image_sizes(train.IM_SIZE, describe_evaluation(cfg)),
        "epochs": f"{round(optim.MAX_EPOCH - 1 + optim.LAST_EPOCH, 1):g}",
        "global batch": str(global_batch or f"{train.BATCH_SIZE} a process"),
        **_reported_cells(published),
        _METRIC_COLUMNS["map" if dataset_class(cfg).targets == "labels" else "top1"]: "not measured",
    }
    order = _order(name, float("inf") if params == EMPTY else float(params), global_batch)
    return Row(name or cfg.MODEL.ARCH, name, order, f"config {hash_config(cfg)[:DIGITS_OF_HASH]}", cells)


def _count_epochs(record: dict) -> str:
    """Return the planned epochs; OPTIM.LAST_EPOCH of the shipped config shortens the last one."""
    files, planned = find_shipped(record["config"] or ""), record["training"]["epochs_planned"]
    optim = load_cfg(files[0]).OPTIM if len(files) == 1 else None
    last = optim.LAST_EPOCH if optim and optim.MAX_EPOCH == planned else 1.0
    return f"{round(planned - 1 + last, 1):g}"


def _reported_cells(published: dict) -> dict[str, str]:
    names = {"top-1 reported": "top1", "top-5 reported": "top5", "reported by": "source"}
    return {column: str(published.get(name, EMPTY)) for column, name in names.items()}


def _measured_cells(record: dict, evaluations: Sequence[dict], count: str) -> dict[str, str]:
    """Return the cell of each metric; the first one includes the interval and the number of runs, `count`."""
    cells: dict[str, str] = {}
    k = record["evaluation"].get("k")
    for name, label in list_metrics(record).items():
        known = [result[name] for result in evaluations if result[name] is not None]
        suffix = f" (top-{k})" if name == "topk" and k != 5 else ""
        cell = f"{statistics.fmean(known):.2f}" if known else EMPTY
        cell += f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else ""
        if not cells:
            cell += _interval(known, record["evaluation"]["count"] if name in ("top1", "topk") else 0)
            suffix += f" {count}"
        cells[_METRIC_COLUMNS.get(name, f"{label} here")] = cell + suffix
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
    return f" [{low:.2f}, {min(high, 100):.2f}]"


def _mean(values: Sequence[float | None], digits: str) -> str:
    known = [value for value in values if value is not None]
    return format(statistics.fmean(known), digits) if known else EMPTY


def _image_sizes(train: Any, evaluation: dict) -> str:
    """Return the size of training images, then the resize and crop sizes of evaluation, in pixels."""
    extra = "" if evaluation["interpolation"] == "bilinear" else f" {evaluation['interpolation']}"
    extra += " + mirrored" if evaluation.get("flip") else ""
    sizes = train, evaluation["resize"], evaluation["crop"]
    shown = [" x ".join(map(str, size)) if isinstance(size, (list, tuple)) else str(size) for size in sizes]
    extra += f" {evaluation['crop_mode']}" if "crop_mode" in evaluation else ""
    return printable(f"{shown[0]} → {shown[1]}/{shown[2]}{extra}")


def _order(config: str | None, params_m: float, global_batch: int) -> tuple:
    return ((config or "").rpartition("/")[0], params_m, global_batch, config or "")


def format_table(rows: Sequence[Row], epoch: str) -> str:
    """Return a Markdown table of the rows, without empty columns, and a legend below it."""
    lines, legend = _arrange(rows, epoch)
    lines.insert(1, ["---"] * len(lines[0]))
    cells = ([printable(" ".join(cell.replace("|", "\\|").split())) for cell in line] for line in lines)
    table = "".join(f"| {' | '.join(line)} |\n" for line in cells)
    return table + (f"\n{legend}\n" if legend else "")


def format_text(rows: Sequence[Row], epoch: str) -> str:
    """Return the table for a terminal: what was measured, and a legend."""
    lines, legend = _arrange(rows, epoch)
    shown = [at for at, name in enumerate(lines[0]) if at == 0 or name.endswith(" here") or name in ("epochs", "hours")]
    table = align_columns([[printable(line[at]) for at in shown] for line in lines], "<" * len(shown))
    legend = f"{legend} All columns: --format markdown.".strip()
    return "\n".join([*table, "", textwrap.fill(legend, WIDTH)]) + "\n"


def _arrange(rows: Sequence[Row], epoch: str) -> tuple[list[list[str]], str]:
    """Return the lines of a table without empty columns, the header first, and its legend."""
    rows = sorted(rows, key=lambda row: (row.order, row.name, row.details))
    names = [row.name for row in rows]
    known = (*_PLAN_COLUMNS, *_METRIC_COLUMNS.values())
    others = sorted({name for row in rows for name in row.cells} - {*known, *_COST_COLUMNS})
    columns = [
        name for name in (*known, *others, *_COST_COLUMNS) if any(row.cells.get(name, EMPTY) != EMPTY for row in rows)
    ]
    sources = {row.cells["reported by"] for row in rows} - {EMPTY}
    if len(sources) == 1:  # the legend names it
        columns.remove("reported by")
    lines = [["config", *columns]]
    for row in rows:
        name = row.name if names.count(row.name) == 1 else f"{row.name} ({row.details})"
        lines.append([name, *(row.cells.get(column, EMPTY) for column in columns)])
    legend = [f"Reported by {sources.pop()}."] if len(sources) == 1 else []
    if any("hours" in row.cells for row in rows):
        legend += [f"Here: of the {epoch} epoch, the mean ± the sample standard deviation over n runs."]
        legend += ["In brackets: the 95 % interval, over runs by Student's t, with n = 1 Wilson's over images."]
    averages = {row.weights for row in rows} - {RAW}
    legend += [f"{kind.upper()}: of the averaged weights." for kind in by_precedence(averages)]
    return lines, " ".join(legend)
