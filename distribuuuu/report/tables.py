"""Tables of results in Markdown: from what runs left, the mean and the deviation over the seeds of each config."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribuuuu.config import Config
from distribuuuu.config.errors import counted
from distribuuuu.config.registry import dataset_class
from distribuuuu.report.results import describe_evaluation, hash_config, name_config
from distribuuuu.report.schema import list_metrics

# What stands where there is nothing to say.
EMPTY = "–"
# On another number of processes they bring about the global batch that was reported.
_BATCH_KEYS = ("TRAIN.BATCH_SIZE", "TRAIN.GLOBAL_BATCH_SIZE")
# The first column is named after what the rows are named by.
_PLAN_COLUMNS = ("params (M)", "px", "epochs", "global batch", "top-1 reported", "top-5 reported", "reported by")
_COST_COLUMNS = ("hours", "images/s", "peak memory", "hardware", "commit")
# Columns of metrics under other names than their own.
_METRIC_COLUMNS = {"top1": "top-1 here", "topk": "top-5 here", "map": "mAP here"}
_DIGITS_OF_HASH = 8


@dataclass(frozen=True)
class Run:
    """A training run: the file it was read from, and what is in it (results.py)."""

    path: Path
    record: dict

    @property
    def label(self) -> str:
        """The seed and the file, in words."""
        return f"seed {self.record['seed']}, {self.path}"


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        name: the first cell.
        config: the config that it shows as it is; None: one that was changed.
        order: what rows are sorted by.
        config_hash: tells rows of the same name from each other.
        cells: column -> text; a column that is not there is empty.
        has_ema: the accuracy is that of averaged weights.
    """

    name: str
    config: str | None
    order: tuple
    config_hash: str
    cells: dict[str, str]
    has_ema: bool = False


# ----------------------------------------------------------------------------------------- runs


def group_runs(runs: Sequence[Run]) -> tuple[list[list[Run]], list[str]]:
    """Return the finished runs, those that differ in nothing but the seed together, and what is to be told.

    Runs belong together that have the same config hash, global batch and numbers of images. A seed counts once.
    """
    groups: dict[tuple, list[Run]] = {}
    notes = []
    for run in runs:
        record, training, data = run.record, run.record["training"], run.record["data"]
        if not record["finished"]:
            done, planned = training["epochs_done"], training["epochs_planned"]
            notes.append(f"{run.path}: left out: {done} of {counted(planned, 'epoch')} done")
            continue
        key = (record["config_hash"], training["global_batch"], data["num_train"], data["num_val"])
        group = groups.setdefault(key, [])
        twin = next((other for other in group if other.record["seed"] == record["seed"]), None)
        if twin:
            notes.append(f"{run.path}: left out: seed {record['seed']} is in {twin.path} already")
        else:
            group.append(run)
    for group in groups.values():
        notes += _find_differences(group)
    return list(groups.values()), notes


def _find_differences(group: list[Run]) -> Iterator[str]:
    """Yield what the runs of a group do not have in common, though their numbers are averaged."""
    name = name_run(group[0].record, group[0].record["overrides"])
    getters: dict[str, Callable[[dict], Any]] = {"commit": lambda record: record["commit"]}
    for part in sorted({part for run in group for part in run.record["versions"]}):
        getters[f"version of {part}"] = lambda record, part=part: record["versions"].get(part)
    for what, get in getters.items():
        first = {}
        for run in group:
            first.setdefault(str(get(run.record)), run)  # a damaged file may hold what cannot be a key
        if len(first) > 1:
            shown = "; ".join(f"{value} ({run.label})" for value, run in first.items())
            yield f"{name}: its runs differ in the {what}: {shown}"


# ----------------------------------------------------------------------------------------- rows


def name_run(record: dict, changes: dict) -> str:
    """Return the config of a run, or the architecture if it had none, and what was changed in it."""
    changed = (f"{key} {value}" for key, value in changes.items())
    return ", ".join([record["config"] or record["model"]["arch"], *changed])


def _changes(record: dict, published: dict) -> dict:
    """Return what makes a run another one than that of its config, with the global batch that was reported."""
    global_batch = record["training"]["global_batch"]
    if "global_batch" not in published:
        return record["overrides"]
    changes = {key: value for key, value in record["overrides"].items() if key not in _BATCH_KEYS}
    return changes if published["global_batch"] == global_batch else {**changes, "global batch": global_batch}


def make_row(group: Sequence[Run], by: str, epoch: str, reported: dict[str, dict]) -> Row:
    """Return the row of runs that differ in the seed alone.

    Args:
        group: the runs, one or more.
        by: the name of the row: "config" or "arch".
        epoch: the evaluation that counts: the "last" or the "best" one.
        reported: what others reported, by config: params, global_batch, top1, top5, source.
    """
    records = [run.record for run in group]
    first, training = records[0], [record["training"] for record in records]
    plan, seen = training[0], first["evaluation"]
    published = reported.get(first["config"], {})
    changes = _changes(first, published)
    published = {} if changes else published
    kind = "ema" if all("ema" in record["accuracy"] for record in records) else "raw"
    evaluations = [record["accuracy"][kind][epoch] for record in records]
    count = f"(n = {len(group)}{', EMA' * (kind == 'ema')})"
    peaks = [record["peak_memory"]["mib"] for record in records if record["peak_memory"]["mib"] is not None]
    cells = {
        "params (M)": f"{first['model']['params_m']:.3f}",
        "px": _pixels(plan["px"], seen),
        "epochs": str(plan["epochs_planned"]),
        "global batch": str(plan["global_batch"]),
        **_reported_cells(published),
        **_measured_cells(first, evaluations, count),
        "hours": _mean([part["hours"] for part in training], ".3g"),
        "images/s": _mean([part["images_per_s"] for part in training], ",.0f"),
        "peak memory": f"{max(peaks):,.0f} MiB" if peaks else EMPTY,
        "hardware": "; ".join(dict.fromkeys(record["hardware"] for record in records)),
        "commit": "; ".join(dict.fromkeys(_short(record["commit"]) for record in records)),
    }
    return Row(
        name=name_run(first, changes) if by == "config" else first["model"]["arch"],
        config=None if changes else first["config"],
        order=_order(first["config"], first["model"]["params_m"], plan["global_batch"]),
        config_hash=first["config_hash"],
        cells=cells,
        has_ema=kind == "ema",
    )


def make_config_row(cfg: Config, by: str, reported: dict[str, dict]) -> Row:
    """Return the row of a config that no run was made of; `by` and `reported` as for `make_row`."""
    name, optim, train = name_config(cfg), cfg.OPTIM, cfg.TRAIN
    published = reported.get(name, {})
    global_batch = train.GLOBAL_BATCH_SIZE or int(float(published.get("global_batch", 0)))
    params, seen = str(published.get("params", EMPTY)), describe_evaluation(cfg)
    cells = {
        "params (M)": params,
        "px": _pixels(train.IM_SIZE, seen),
        "epochs": str(optim.MAX_EPOCH),
        "global batch": str(global_batch or f"{train.BATCH_SIZE} a process"),
        **_reported_cells(published),
        _METRIC_COLUMNS["map" if dataset_class(cfg).multilabel else "top1"]: "not measured",
    }
    order = _order(name, float("inf") if params == EMPTY else float(params), global_batch)
    label = name if by == "config" and name else cfg.MODEL.ARCH
    return Row(label, name, order, hash_config(cfg), cells)


def _reported_cells(published: dict) -> dict[str, str]:
    names = {"top-1 reported": "top1", "top-5 reported": "top5", "reported by": "source"}
    return {column: str(published.get(name, EMPTY)) for column, name in names.items()}


def _measured_cells(record: dict, evaluations: Sequence[dict], count: str) -> dict[str, str]:
    """Return a cell for each metric; the first one says of how many runs it is the mean."""
    cells, k = {}, record["evaluation"].get("k")
    for name, label in list_metrics(record).items():
        cell = _spread([result[name] for result in evaluations])
        suffix = f" (top-{k})" if name == "topk" and k != 5 else ""
        cells[_METRIC_COLUMNS.get(name, f"{label} here")] = cell + suffix + ("" if cells else f" {count}")
    return cells


def _pixels(train: int, seen: dict) -> str:
    """Return the side of a training image, then what evaluation resizes and crops to."""
    how = "" if seen["interpolation"] == "bilinear" else f" {seen['interpolation']}"
    how += " + mirrored" if seen.get("flip") else ""
    return f"{train} → {seen['resize']}/{seen['crop']}{how}"


def _order(config: str | None, params_m: float, global_batch: int) -> tuple:
    return ((config or "").rpartition("/")[0], params_m, global_batch, config or "")


def _short(commit: str | None) -> str:
    """Return 'a1b2c3d+changes' of a whole commit."""
    digits, plus, changes = (commit or EMPTY).partition("+")
    return digits[:7] + plus + changes


def _spread(values: Sequence[float | None]) -> str:
    """Return the mean, with the sample standard deviation if there are several."""
    known = [value for value in values if value is not None]
    if not known:
        return EMPTY
    mean = f"{statistics.fmean(known):.2f}"
    return f"{mean} ± {statistics.stdev(known):.2f}" if len(known) > 1 else mean


def _mean(values: Sequence[float | None], digits: str) -> str:
    known = [value for value in values if value is not None]
    return format(statistics.fmean(known), digits) if known else EMPTY


# ------------------------------------------------------------------------------------- Markdown


def format_table(rows: Sequence[Row], by: str, epoch: str) -> str:
    """Return the rows as a Markdown table, the empty columns left out, and under it what its numbers are."""
    rows = sorted(rows, key=lambda row: (row.order, row.name, row.config_hash))
    names = [row.name for row in rows]
    twins = {name for name in names if names.count(name) > 1}
    known = (*_PLAN_COLUMNS, *_METRIC_COLUMNS.values())
    others = sorted({name for row in rows for name in row.cells} - {*known, *_COST_COLUMNS})
    columns = [
        name for name in (*known, *others, *_COST_COLUMNS) if any(row.cells.get(name, EMPTY) != EMPTY for row in rows)
    ]
    sources = {row.cells["reported by"] for row in rows} - {EMPTY}
    if len(sources) == 1:  # said once, below
        columns.remove("reported by")
    lines = [[by, *columns], ["---"] * (len(columns) + 1)]
    for row in rows:
        name = f"{row.name} (config {row.config_hash[:_DIGITS_OF_HASH]})" if row.name in twins else row.name
        lines.append([name, *(row.cells.get(column, EMPTY) for column in columns)])
    table = "".join(f"| {' | '.join(_escape(cell) for cell in line)} |\n" for line in lines)
    legend = [f"Reported by {sources.pop()}."] if len(sources) == 1 else []
    if any("hours" in row.cells for row in rows):
        legend += [f"Here: of the {epoch} epoch, the mean ± the sample standard deviation over n seeds."]
    if any(row.has_ema for row in rows):
        legend += ["EMA: of the averaged weights."]
    return table + (f"\n{' '.join(legend)}\n" if legend else "")


def _escape(cell: str) -> str:
    return " ".join(cell.replace("|", "\\|").split())
