"""The report of a task that does not classify: its scores beside the targets."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from distribuuuu.commands.html.page import Column, PageSection, html
from distribuuuu.commands.stats.stored_predictions import Predictions

# Rows of the table of the largest errors.
_NUM_ROWS = 50


def find_errors(content: Predictions) -> np.ndarray | None:
    """Return the mean absolute difference of scores and targets of each image; None if they are not comparable."""
    targets = content.label.reshape(len(content), -1)
    return np.abs(content.scores - targets).mean(axis=1) if targets.shape == content.scores.shape else None


def list_figures(content: Predictions, facts: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each metric of the evaluation, and the mean absolute error if there is one."""
    accuracy = facts.get("accuracy", {}).get(content.meta.get("weights", "raw"), {})
    for name, value in accuracy.get("last", accuracy).items():
        if name != "epoch" and isinstance(value, (int, float)):
            yield name, value
    if (errors := find_errors(content)) is not None:
        yield "mean absolute error", float(errors.mean())


def list_values(content: Predictions) -> list[dict[str, Any]]:
    """Return the images with the largest errors: path, target and scores; without errors, the first images."""
    errors = find_errors(content)
    order = range(len(content)) if errors is None else np.argsort(-errors, kind="stable")
    return [
        {"path": str(content.path[row]), "target": content.label[row].tolist(), "score": content.scores[row].tolist()}
        for row in order[:_NUM_ROWS]
    ]


def describe_values(content: Predictions) -> PageSection:
    """Return the section with the table of `list_values`."""

    def show(value: Any) -> str:
        return " ".join(f"{part:.4g}" for part in np.ravel(value)[:8])

    columns = [Column("image"), Column("target"), Column(", ".join(content.classes[:8]))]
    rows = [[row["path"], show(row["target"]), show(row["score"])] for row in list_values(content)]
    return PageSection("Images with the largest errors", [html.table(columns, rows)])
