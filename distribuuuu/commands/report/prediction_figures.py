"""Figures of predictions: accuracy, classes, confusion, calibration, average precision. Fractions are from 0 to 1."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from distribuuuu.commands.stats.significance import wilson_interval
from distribuuuu.commands.stats.stored_predictions import Predictions
from distribuuuu.tasks.class_metrics import (
    ExpectedCalibrationError,
    average_precisions,
    calibration_sums,
    class_f1_scores,
    class_recalls,
)

# Logits that are processed at a time: they fit into the cache of a core.
_BLOCK = 2**17


def list_confusions(content: Predictions) -> list[tuple[int, int, int]]:
    """Return (label, predicted class, count) of all pairs that occur, in the order of the classes."""
    num = len(content.classes)
    pairs, counts = np.unique(content.label.astype(np.int64) * num + content.predicted, return_counts=True)
    return [(*divmod(pair, num), count) for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True)]


def compute_class_figures(content: Predictions) -> dict[str, np.ndarray]:
    """Return the F1 score, precision, recall, and the images with the label and with the prediction of each class.

    They are (classes,), as in scikit-learn; NaN where a figure is not defined. With several labels per image, a class
    is predicted at a probability above 0.5.
    """
    if content.multilabel:
        is_predicted, is_label = content.scores > 0, content.label.astype(bool)
        counts = np.stack([part.sum(axis=0) for part in (is_predicted & is_label, is_predicted, is_label)])
    else:
        numbers, least = (content.label[content.correct], content.predicted, content.label), len(content.classes)
        counts = np.stack([np.bincount(classes, minlength=least) for classes in numbers])
    sums = torch.from_numpy(counts).double()
    return {
        "f1": class_f1_scores(sums).numpy(),
        "precision": (sums[0] / sums[1]).numpy(),
        "recall": class_recalls(sums).numpy(),
        "support": counts[2],
        "predicted": counts[1],
    }


def mean_of_known(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    return float(np.nanmean(values)) if (~np.isnan(values)).any() else np.nan


def top5_accuracy(content: Predictions) -> float:
    """Return the share of images whose label is among the five largest logits."""
    if content.top_class is not None:
        return float((content.top_class[:, :5] == content.label[:, None]).any(axis=1).mean())
    hits = ((logits > own[:, None]).sum(axis=1) < 5 for logits, own in _blocks(content))
    return float(np.concatenate([*hits]).mean())


# ------------------------------------------------------------------------------------- calibration


def compute_reliability(confidence: np.ndarray, correct: np.ndarray) -> dict[str, Any]:
    """Return the calibration error (`ece`), and the `counts`, `confidence` and `accuracy` of its `bins`, NaN if empty.

    Args:
        confidence: probability of the predicted class (N,).
        correct: whether it is the label (N,).
    """
    sums = calibration_sums(torch.from_numpy(np.nan_to_num(confidence)).double(), torch.from_numpy(correct))
    mean_confidence, accuracy = (sums[1:] / sums[0]).tolist()
    ece = ExpectedCalibrationError(0).value(sums, len(confidence)) / 100
    bins = {"counts": sums[0].long().tolist(), "confidence": mean_confidence, "accuracy": accuracy}
    return {"ece": ece, "bins": bins}


def _blocks(content: Predictions) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield logits relative to the largest, and those of the label, in float32 for many classes."""
    dtype = torch.float32 if content.scores.size > 2**22 else torch.float64
    num = max(1, _BLOCK // len(content.classes))
    for start in range(0, len(content), num):
        # From float16, torch converts several times faster than numpy.
        logits = torch.from_numpy(content.scores[start : start + num]).to(dtype, copy=True).numpy()
        logits -= logits.max(axis=1, keepdims=True)
        yield logits, logits[np.arange(len(logits)), content.label[start : start + num]]


def fit_temperature(content: Predictions) -> dict[str, float] | None:
    """Return the temperature that minimizes the negative log-likelihood (Guo et al., arXiv 1706.04599).

    Returns:
        `temperature`, the mean negative log-likelihood without and with it (`nll`, `nll_at_temperature`), and the
        calibration error with it; None without all logits, or if they do not determine a temperature.
    """
    # If every image is right, no temperature is low enough.
    if content.top_class is not None or content.correct.all() or not np.isfinite(content.scores).all():
        return None
    beta, found = 1.0, list[float]()
    for _ in range(30):  # Newton's method in the inverse temperature
        nll = slope = curvature = 0.0
        for logits, own in _blocks(content):
            weights = np.exp(beta * logits)
            total = weights.sum(axis=1)
            mean, square = ((weights * logits**power).sum(axis=1) / total for power in (1, 2))
            nll += (np.log(total) - beta * own).sum(dtype=np.float64) / len(content)
            slope += (mean - own).sum(dtype=np.float64) / len(content)
            curvature += (square - mean * mean).sum(dtype=np.float64) / len(content)
        found.append(float(nll))
        if not np.isfinite(nll) or curvature <= 0:
            return None
        step = float(np.clip(-slope / curvature, -0.75 * beta, 3 * beta))
        if abs(step) < 1e-5 * beta:
            break
        beta += step
    if not 1e-3 < beta < 1e3 or found[-1] > found[0]:
        return None
    confidence = np.concatenate([1 / np.exp(beta * logits).sum(axis=1, dtype=np.float64)
                                 for logits, _ in _blocks(content)])  # fmt: skip
    ece = compute_reliability(confidence, content.correct)["ece"]
    return {"temperature": 1 / beta, "nll": found[0], "nll_at_temperature": found[-1], "ece_at_temperature": ece}


# ----------------------------------------------------------------------------------- several labels


def compute_label_figures(content: Predictions) -> dict[str, np.ndarray]:
    """Return figures of each class of a multi-label set, (classes,): NaN without images.

    Returns:
        The average precision, as in scikit-learn; the least probability to predict a class that maximizes its F1
        score, `threshold`; and this score, `best_f1`.
    """
    scores, num = content.scores.astype(np.float32), len(content)
    precisions = average_precisions(torch.from_numpy(scores), torch.from_numpy(content.label)).numpy()
    best = [_best_threshold(scores[:, number], content.label[:, number], num) for number in range(len(content.classes))]
    thresholds, f1 = np.array(best, dtype=np.float64).reshape(-1, 2).T
    return {"average_precision": precisions, "threshold": 0.5 * (1 + np.tanh(0.5 * thresholds)), "best_f1": f1}


def _best_threshold(scores: np.ndarray, targets: np.ndarray, num: int) -> tuple[float, float]:
    """Return the least logit to predict a class that maximizes F1, and that F1."""
    if not targets.any() or np.isnan(scores).any():
        return np.nan, np.nan
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    f1 = 2 * np.cumsum(targets[order], dtype=np.int64) / (np.arange(1, num + 1) + targets.sum(dtype=np.int64))
    f1[:-1][ranked[:-1] == ranked[1:]] = 0  # images with the same logit are on the same side of a threshold
    best = int(f1.argmax())
    return float(ranked[best]), float(f1[best])


# ------------------------------------------------------------------------------------------ all


def list_figures(content: Predictions) -> dict[str, Any]:
    """Return all figures of predictions as plain values, for JSON."""
    columns = compute_class_figures(content)
    result: dict[str, Any] = {"images": len(content), "loss": float(content.loss.mean())}
    result |= {f"macro_{name}": mean_of_known(columns[name]) for name in ("precision", "recall", "f1")}
    if content.multilabel and content.top_class is None:
        columns |= compute_label_figures(content)
        result["map"] = mean_of_known(columns["average_precision"])
    lists = {name: values.tolist() for name, values in columns.items()}
    result["classes"] = {name: {column: lists[column][number] for column in lists}
                         for number, name in enumerate(content.classes)}  # fmt: skip
    if content.multilabel:
        return result
    num_correct, names = int(content.correct.sum()), content.classes
    reliability = compute_reliability(content.confidence, content.correct)
    return result | {
        "accuracy": num_correct / len(content),
        "accuracy_interval": list(wilson_interval(num_correct, len(content))),
        "top5_accuracy": top5_accuracy(content),
        "calibration": {**reliability, **(fit_temperature(content) or {})},
        "confusions": [[names[row], names[column], count] for row, column, count in list_confusions(content)],
    }
