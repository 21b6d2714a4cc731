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
    if content.top_class is None:
        found["calibration_error"] = calibration_error(scores, labels)
        found["calibration_error_after"] = calibration_error(scores / content.temperature, labels)
    ranked = np.argsort(-content.confidence, kind="stable")
    counts = np.unique(np.linspace(1, len(content), _POINTS).astype(int))
    mistakes = np.cumsum(~content.correct[ranked])
    found["coverage"] = (counts / len(content)).tolist()
    found["risk"] = (mistakes[counts - 1] / counts).tolist()
    if calibration is None:
        return {**found, "note": "not calibrated; fix: distribuuuu calibrate RUN"}
    is_own = calibration.digest and calibration.digest == content.meta.get("digest")
    found["note"] = f"by {'these' if is_own else 'other'} {calibration.images:,} validation images"
    try:
        found["threshold"] = calibration.find_threshold(precision)
    except ConfigError as error:
        return {**found, "note": f"{found['note']}; {error}"}
    answered = content.confidence > found["threshold"]
    right = float(content.correct[answered].mean()) if answered.any() else None
    return {**found, "answered": float(answered.mean()), "right_of_answered": right}


def describe_confidence(found: dict[str, Any]) -> PageSection:
    """Return the section of the figures of `list_confidence`."""
    tiles, marks = [], []
    if "calibration_error" in found:
        tiles.append(("calibration error", percent(found["calibration_error"], 2), "expected, over 15 bins"))
    if found["temperature"] != 1 and tiles:
        after = percent(found["calibration_error_after"], 2)
        tiles.append(("after calibration", after, f"temperature {found['temperature']:.3f}, {found['note']}"))
    note = f"Calibration: {found['note']}."
    if found["threshold"] is not None:
        right = percent(found["right_of_answered"], 2) if found["answered"] else "none"
        tiles.append((f"--precision {found['precision']:g}", percent(found["answered"]), f"answered, {right} right"))
        text = f"threshold {found['threshold']:.4f}: {percent(found['answered'])} answered"
        marks.append(Mark(found["answered"], text))
        note += f" predict --precision {found['precision']:g} answers above a probability of {found['threshold']:.4f}."
    curve = Series("mistakes", found["coverage"], [100 * value for value in found["risk"]])
    chart = line_chart("Mistakes in % of the answers", [curve], "share of the images that are answered", marks=marks)
    return PageSection("Confidence", [html.tiles(tiles), html.grid([chart]), html.paragraph(note, "note")])
