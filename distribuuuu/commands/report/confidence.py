"""Confidence of a run in a report: calibration error, and mistakes by the share of the images that are answered."""

from typing import Any

import numpy as np
import torch

from distribuuuu.commands.html.charts import Mark, Series, line_chart
from distribuuuu.commands.html.page import PageSection, html, percent
from distribuuuu.commands.stats.stored_predictions import Predictions
from distribuuuu.config import ConfigError
from distribuuuu.inference.calibration import Calibration, calibration_error

# Points of the curve.
_POINTS = 200


def list_confidence(content: Predictions, calibration: Calibration | None, precision: float) -> dict[str, Any]:
    """Return the figures of the confidence of predictions with one label per image, as values for JSON.

    Args:
        content: the predictions; its temperature is that of the calibration.
        calibration: that of the weights that have made the predictions; None: there is none.
        precision: the share of right answers that a threshold is to promise.
    """
    scores, labels = torch.from_numpy(content.scores).float(), torch.from_numpy(content.label).long()
    found: dict[str, Any] = {"temperature": content.temperature, "precision": precision, "threshold": None}
    found["calibration_error"] = calibration_error(scores, labels)
    found["calibration_error_after"] = calibration_error(scores / content.temperature, labels)
    counts = np.unique(np.linspace(1, len(content), _POINTS).astype(int))
    mistakes = np.cumsum(~content.correct[np.argsort(-content.confidence, kind="stable")])
    found |= {"coverage": (counts / len(content)).tolist(), "risk": (mistakes[counts - 1] / counts).tolist()}
    if calibration is None:
        return {**found, "note": "none of these weights; fix: distribuuuu calibrate RUN, then distribuuuu test RUN"}
    same = calibration.digest and calibration.digest == content.meta.get("digest")
    by = f"these {calibration.images:,} images" if same else f"{calibration.images:,} other images"
    found["note"] = f"temperature {content.temperature:.3f}, by {by}"
    try:
        found["threshold"] = calibration.find_threshold(precision)
    except ConfigError as error:
        return {**found, "note": f"{found['note']}; {error}"}
    answered = content.confidence > found["threshold"]
    right = content.correct[answered].mean() if answered.any() else np.nan
    return {**found, "answered": float(answered.mean()), "right_of_answered": float(right)}


def describe_confidence(found: dict[str, Any]) -> PageSection:
    """Return the section of the figures of `list_confidence`."""
    tiles, marks = [], []
    for name, key in (("calibration error", "calibration_error"), ("after calibration", "calibration_error_after")):
        if name == "calibration error" or found["temperature"] != 1:
            tiles.append((name, percent(found[key], 2), "expected, over 15 bins"))
    if found["threshold"] is not None:
        name, detail = f"--precision {found['precision']:g}", f"answered, {percent(found['right_of_answered'])} right"
        tiles.append((name, percent(found["answered"]), detail))
        marks.append(Mark(found["answered"], f"{name}: a probability above {found['threshold']:.6g}"))
    curve = Series("mistakes", found["coverage"], [100 * value for value in found["risk"]])
    chart = line_chart("Mistakes in % of the answers", [curve], "share of the images that are answered", marks=marks)
    note = html.paragraph(f"Calibration: {found['note']}.", "note")
    return PageSection("Confidence", [html.tiles(tiles), html.grid([chart]), note])
