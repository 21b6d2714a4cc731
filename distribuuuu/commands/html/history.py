"""The course of a training run, from metrics.jsonl and results.json."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from distribuuuu.commands.html.charts import Series, line_chart
from distribuuuu.commands.html.page import html
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.config.run_files import RESULTS
from distribuuuu.files.untrusted import read_regular
from distribuuuu.records.metric_writers import parse_record
from distribuuuu.records.read_results import read_results

# Bytes of metrics.jsonl and config.yaml, each, and the value of a point of a curve, at most.
MAX_TEXT, _MAX_VALUE = 1 << 28, 1e100
# Entries of a record that are not metrics of the model.
_NOT_METRICS = ("kind", "epoch", "step", "stage", "resumed", "rollback", "time", "count", "loss", "lr", "images_per_s",
                "wait", "eta_s", "seconds")  # fmt: skip


@dataclass
class History:
    """The records of a run.

    Of evaluations, by kind of weights: "eval" and "eval_ema". The notes say which records are left out, and why.
    """

    train: list[dict[str, Any]] = field(default_factory=list)
    evaluations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def num_steps(self) -> int:
        """Steps per epoch; 1 without a record."""
        return max((record["step"] for record in self.train), default=1) or 1

    def position(self, epoch: int, step: int) -> float:
        """Return the number of epochs at a position, e.g. 2.5."""
        return epoch - 1 + step / self.num_steps


def read_history(out_dir: Path) -> History:
    """Return the records of a run; what is missing is left out, and what is damaged with a note."""
    history = History()
    history.results = read_facts(out_dir / RESULTS, "training", history.notes)
    lines = read_lines(out_dir / "metrics.jsonl", history.notes)
    records = [record for line in lines if (record := parse_record(line))]
    if lost := len(lines) - len(records):
        history.notes.append(f"{out_dir / 'metrics.jsonl'}: {counted(lost, 'line')} left out: not a valid record")
    for record in records:
        if record["kind"] == "train":
            history.train.append(record)
        elif record["kind"].startswith("eval"):
            history.evaluations.setdefault(record["kind"], []).append(record)
    return history


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


def _value(record: Mapping[str, Any], key: str) -> float:
    """Return a number of a record; NaN if it is missing, of another type, or too large to be drawn."""
    value = record.get(key)
    return float(value) if isinstance(value, (int, float)) and abs(value) < _MAX_VALUE else math.nan


def draw_curves(history: History) -> str:
    """Return charts of the loss, the metrics, the learning rate and the throughput; an empty text without records."""
    kinds = {"train": history.train, **history.evaluations}

    def draw(title: str, key: str) -> str:
        curves = []
        for kind, records in kinds.items():
            name = "training" if kind == "train" else "validation" + kind.removeprefix("eval").replace("_", ", ")
            chosen = [record for record in records if key in record]
            curves.append(Series(name, [history.position(record["epoch"], record["step"]) for record in chosen],
                                 [_value(record, key) for record in chosen],
                                 has_dots=kind != "train" and len(records) <= 40))  # fmt: skip
        return line_chart(title, [curve for curve in curves if curve.x], "epoch")

    listed = history.results.get("evaluation", {}).get("metrics")
    titles = {"loss": "Loss"}
    # The metrics in the last evaluations, which are percentages, and other means.
    for name in (name for records in history.evaluations.values() for name in records[-1]):
        if name not in _NOT_METRICS and not name.startswith("best_"):
            titles[name] = f"{name} in percent" if listed is None or name in listed.values() else name
    titles |= {"lr": "Learning rate", "images_per_s": "Throughput in images/s"}
    charts = [text for key, title in titles.items() if (text := draw(title, key))]
    return html.grid(charts) if charts else ""
