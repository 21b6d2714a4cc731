"""The course of a training run, from metrics.jsonl and results.json."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from distribuuuu.commands.html.charts import Mark, Series, line_chart, stacked_bar
from distribuuuu.commands.html.page import html
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.files.untrusted import read_regular
from distribuuuu.records.log_table import format_duration
from distribuuuu.records.metric_writers import parse_record
from distribuuuu.records.read_results import FILE_NAME, read_results

# Bytes of metrics.jsonl and config.yaml, each, and the value of a point of a curve, at most.
MAX_TEXT, _MAX_VALUE = 1 << 28, 1e100
# Numbers of a record that are not metrics of the model; null: unknown.
_NUMBERS = ("count", "loss", "lr", "images_per_s", "wait", "eta_s", "seconds")
_NOT_METRICS = ("kind", "epoch", "step", "stage", "resumed", "rollback", "time", *_NUMBERS)


@dataclass
class History:
    """The records of a run.

    Attributes:
        train: the rows of the training steps.
        evaluations: the evaluations of each kind of weights, "eval" and "eval_ema".
        restarts, rollbacks: positions (epoch from 1, step) where a start resumed, and where a rollback began.
        results: content of results.json; empty if there is none.
        notes: which records are left out, and why.
    """

    train: list[dict[str, Any]] = field(default_factory=list)
    evaluations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    restarts: list[list[int]] = field(default_factory=list)
    rollbacks: list[list[int]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Steps per epoch; 1 without a record."""
        return max((record["step"] for record in self.train), default=1) or 1

    def position(self, epoch: int, step: int) -> float:
        """Return the number of epochs at a position, e.g. 2.5."""
        return epoch - 1 + step / self.num_steps


def read_history(out_dir: Path) -> History:
    """Return the records of a run; what is missing is left out, and what is damaged with a note."""
    history = History()
    history.results = read_facts(out_dir / FILE_NAME, "training", history.notes)
    lines = read_lines(out_dir / "metrics.jsonl", history.notes)
    records = [record for line in lines if (record := parse_figures(line))]
    if lost := len(lines) - len(records):
        history.notes.append(f"{out_dir / 'metrics.jsonl'}: {counted(lost, 'line')} left out: not a valid record")
    for record in records:
        kind = record["kind"]
        (history.train if kind == "train" else history.evaluations.setdefault(kind, [])).append(record)
        for name, places in (("resumed", history.restarts), ("rollback", history.rollbacks)):
            if (place := record.get(name)) and place not in places:
                places.append(place)
    return history


def parse_figures(line: str) -> dict[str, Any] | None:
    """Return a record of metrics.jsonl whose values have the types that a run writes; None: it is not such a line."""
    record = parse_record(line)
    if record is None or record["kind"] != "train" and not record["kind"].startswith("eval"):
        return None
    are_numbers = all(type(record.get(key)) in (int, float, NoneType) for key in _NUMBERS)
    places = [record.get(name, [1, 0]) for name in ("resumed", "rollback")]
    are_places = all(isinstance(place, list) and [type(part) for part in place] == [int, int] for place in places)
    return record if are_numbers and are_places else None


def read_lines(path: Path, notes: list[str]) -> list[str]:
    """Return the lines of a text file; none if there is none, or with a note if it cannot be read."""
    try:
        return read_regular(path, MAX_TEXT).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{path} is left out: {error.strerror or error}")
        return []


def read_facts(path: Path, kind: str, notes: list[str]) -> dict[str, Any]:
    """Return the content of a results file, see `read_results`; empty if there is none, or with a note if damaged."""
    if not os.path.lexists(path):
        return {}
    try:
        return read_results(path, kind)
    except ConfigError as error:
        notes.append(f"left out: {error}")
        return {}


def curve(history: History, records: Sequence[dict[str, Any]], key: str, name: str, **style: Any) -> Series:
    """Return a figure of records over the epochs; other types are left out, and values too large to draw are gaps."""
    chosen = [record for record in records if type(record.get(key)) in (int, float)]
    x = [history.position(record["epoch"], record["step"]) for record in chosen]
    y = [float(record[key]) if abs(record[key]) < _MAX_VALUE else math.nan for record in chosen]
    return Series(name, x, y, **style)


def list_curves(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the metrics in the last record."""
    last = records[-1] if records else {}
    return [name for name in last if name not in _NOT_METRICS and not name.startswith("best_")]


def title_of(history: History, name: str) -> str:
    """Return the title of the chart of a metric, which is a percentage, or of another mean."""
    listed = history.results.get("evaluation", {}).get("metrics")
    return f"{name} in percent" if listed is None or name in listed.values() else name


def draw_curves(history: History) -> str:
    """Return charts of the loss, the metrics, the learning rate and the throughput; an empty text without records."""
    marks = [Mark(history.position(*place), f"restart at epoch {place[0]}, step {place[1]}")
             for place in history.restarts]  # fmt: skip
    marks += [Mark(history.position(*place), f"rollback at epoch {place[0]}, step {place[1]}")
              for place in history.rollbacks]  # fmt: skip
    has_dots = all(len(records) <= 40 for records in history.evaluations.values())
    labels = {kind: "validation" + kind.removeprefix("eval").replace("_", ", ") for kind in history.evaluations}

    def chart(title: str, key: str) -> str:
        series = [curve(history, history.train, key, "training")]
        series += [curve(history, records, key, labels[kind], has_dots=has_dots)
                   for kind, records in history.evaluations.items()]  # fmt: skip
        return line_chart(title, [one for one in series if one.x], "epoch", marks=marks)

    metrics = list_curves(next(iter(history.evaluations.values()), []))
    charts = [chart("Loss", "loss"), *(chart(title_of(history, name), name) for name in metrics)]
    charts.append(line_chart("Learning rate", [curve(history, history.train, "lr", "")], "epoch", marks=marks))
    speed = curve(history, history.train, "images_per_s", "")
    charts.append(line_chart("Throughput in images/s", [speed], "epoch", marks=marks))
    drawn = [text for text in charts if text]
    return html.grid(drawn, "narrow") if drawn else ""


def measure_time(history: History) -> dict[str, float]:
    """Return the seconds of training steps, waiting for data, validation, and everything else, over all starts."""
    rows = [(_seconds(record, "count") / speed, _seconds(record, "wait"))
            for record in history.train if (speed := _seconds(record, "images_per_s"))]  # fmt: skip
    waiting = sum(seconds * wait for seconds, wait in rows)
    training = sum(seconds for seconds, _ in rows) - waiting
    by_epoch = {record["epoch"]: _seconds(record, "seconds")
                for records in history.evaluations.values() for record in records}  # fmt: skip
    validation = sum(by_epoch.values())
    total = 3600 * history.results["training"]["hours"] if history.results else 0.0
    parts = {"training steps": training, "waiting for data": waiting, "validation": validation,
             "start-up, checkpoints, repeated steps": max(0.0, total - training - waiting - validation)}  # fmt: skip
    return parts if total or training else {}


def _seconds(record: dict[str, Any], key: str) -> float:
    """Return a number of a record that is at least 1e-9 and less than 2**64; else 0."""
    value = record.get(key) or 0.0
    return float(value) if 1e-9 <= value < 2**64 else 0.0


def draw_time(history: History) -> str:
    """Return a bar of the seconds of `measure_time`; an empty text without records."""
    parts = [(name, seconds, format_duration(seconds)) for name, seconds in measure_time(history).items()]
    return stacked_bar("Where the time went", parts) if parts else ""


def describe_marks(history: History) -> str:
    """Return a sentence on the restarts and rollbacks; an empty text if there were none."""
    parts = []
    for name, places in (("restart", history.restarts), ("rollback", history.rollbacks)):
        if places:
            where = ", ".join(f"epoch {epoch}, step {step}" for epoch, step in places[:8])
            more = f" and {len(places) - 8} more" if len(places) > 8 else ""
            parts.append(f"{counted(len(places), name)} ({where}{more})")
    return f"Dashed lines: {'; '.join(parts)}." if parts else ""
