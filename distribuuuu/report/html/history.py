"""The course of a training run, from metrics.jsonl, train.log and results.json."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distribuuuu.report.html.charts import Mark, Series, line_chart, stacked_bar
from distribuuuu.report.html.page import grid
from distribuuuu.report.log_table import format_duration

_START = re.compile(r"distribuuuu \S+, torch ")
_RESTART = re.compile(r"resumed from .*: epoch (\d+), step (\d+)$")
_ROLLBACK = re.compile(r"in epoch (\d+), by step (\d+): rollback \d+ of \d+")
# Keys of a record that are not metrics of the model.
_NOT_METRICS = ("kind", "epoch", "step", "time", "count", "loss", "lr", "images_per_s", "wait", "eta_s", "seconds")


@dataclass
class History:
    """The records of a run.

    Attributes:
        train: the rows of the training steps.
        evaluations: the evaluations of each kind of weights, "eval" and "eval_ema".
        restarts, rollbacks: positions (epoch from 1, step) where a start resumed, and where a rollback began.
        results: content of results.json; empty if there is none.
    """

    train: list[dict[str, Any]] = field(default_factory=list)
    evaluations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    restarts: list[tuple[int, int]] = field(default_factory=list)
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Steps per epoch; 1 without a record."""
        return max((record["step"] for record in self.train), default=1) or 1

    def position(self, epoch: int, step: int) -> float:
        """Return the number of epochs at a position, e.g. 2.5."""
        return epoch - 1 + step / self.num_steps


def read_history(out_dir: Path) -> History:
    """Return the records of a run; what is missing or damaged is left out."""
    history = History(results=read_json(out_dir / "results.json"))
    for line in read_lines(out_dir / "metrics.jsonl"):
        try:
            record = json.loads(line)
            kind, _ = record["kind"], (record["epoch"] + 0, record["step"] + 0)
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
        (history.train if kind == "train" else history.evaluations.setdefault(str(kind), [])).append(record)
    is_resumed = False
    for line in read_lines(out_dir / "train.log"):
        if _START.search(line):
            is_resumed = False
        elif match := _RESTART.search(line):
            history.restarts.append((int(match[1]), int(match[2])))
            is_resumed = True
        elif match := _ROLLBACK.search(line):
            history.rollbacks.append((int(match[1]), int(match[2])))
        elif " learning rate: " in line and not is_resumed:  # the set-up of a new run in the same folder is complete
            history.restarts.clear()
            history.rollbacks.clear()
    return history


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; an empty dictionary if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def curve(history: History, records: Sequence[dict[str, Any]], key: str, name: str, **style: Any) -> Series:
    """Return a figure of records over the epochs; records without it, or with another type, are left out."""
    chosen = [record for record in records if isinstance(record.get(key), (int, float))]
    x = [history.position(record["epoch"], record["step"]) for record in chosen]
    return Series(name, x, [float(record[key]) for record in chosen], **style)


def list_metrics(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the metrics in the last record."""
    last = records[-1] if records else {}
    return [name for name in last if name not in _NOT_METRICS and not name.startswith("best_")]


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

    metrics = list_metrics(next(iter(history.evaluations.values()), []))
    charts = [chart("Loss", "loss"), *(chart(f"{name} in percent", name) for name in metrics)]
    charts.append(line_chart("Learning rate", [curve(history, history.train, "lr", "")], "epoch", marks=marks))
    speed = curve(history, history.train, "images_per_s", "")
    charts.append(line_chart("Throughput in images/s", [speed], "epoch", marks=marks))
    drawn = [text for text in charts if text]
    return grid(drawn, "narrow") if drawn else ""


def measure_time(history: History) -> dict[str, float]:
    """Return the seconds of training steps, waiting for data, validation, and everything else, over all starts."""
    rows = [(record["count"] / record["images_per_s"], record.get("wait") or 0.0)
            for record in history.train if record.get("images_per_s")]  # fmt: skip
    waiting = sum(seconds * wait for seconds, wait in rows)
    training = sum(seconds for seconds, _ in rows) - waiting
    by_epoch = {record["epoch"]: record.get("seconds") or 0.0
                for records in history.evaluations.values() for record in records}  # fmt: skip
    validation = sum(by_epoch.values())
    total = 3600 * float((history.results.get("training") or {}).get("hours") or 0.0)
    parts = {"training steps": training, "waiting for data": waiting, "validation": validation,
             "start-up, checkpoints, repeated steps": max(0.0, total - training - waiting - validation)}  # fmt: skip
    return parts if total or training else {}


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
            parts.append(f"{len(places)} {name}{'s' * (len(places) > 1)} ({where}{more})")
    return f"Dashed lines: {'; '.join(parts)}." if parts else ""
