"""Figures of predictions: accuracy, classes, confusion, calibration, average precision. Fractions are from 0 to 1."""

from collections.abc import Iterator
from dataclasses import dataclass
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


def count_confusions(content: Predictions, block: int = 1) -> np.ndarray:
    """Return how many images of each label (row) were predicted as each class (column): int64 (rows, columns).

    A row or a column stands for `block` neighboring classes, so that thousands of classes take little memory.
    """
    num = -(-len(content.classes) // block)
    pairs = content.label.astype(np.int64) // block * num + content.predicted // block
    return np.bincount(pairs, minlength=num * num).reshape(num, num)


def list_confusions(content: Predictions) -> list[tuple[int, int, int]]:
    """Return (label, predicted class, count) of all pairs that occur, in the order of the classes."""
    num = len(content.classes)
    pairs, counts = np.unique(content.label.astype(np.int64) * num + content.predicted, return_counts=True)
    return [(*divmod(pair, num), count) for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True)]


@dataclass(frozen=True)
class ClassFigures:
    """Figures of each class, (classes,); NaN where a figure is not defined.

    Attributes:
        support: number of images with the label.
        predicted: number of images with the prediction.
        precision, recall, f1: 2 TP / (2 TP + FP + FN), as in scikit-learn.
    """

    support: np.ndarray
    predicted: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray


def compute_class_figures(content: Predictions) -> ClassFigures:
    """Return the figures of each class; with several labels per image, at a probability above 0.5."""
    if content.multilabel:
        is_predicted = content.scores > 0
        counts = np.stack([part.sum(axis=0) for part in (is_predicted & content.label.astype(bool), is_predicted,
                                                         content.label.astype(bool))])  # fmt: skip
    else:
        numbers, least = (content.label[content.correct], content.predicted, content.label), len(content.classes)
        counts = np.stack([np.bincount(classes, minlength=least) for classes in numbers])
    sums = torch.from_numpy(counts).double()
    precision, recall, f1 = sums[0] / sums[1], class_recalls(sums), class_f1_scores(sums)
    return ClassFigures(counts[2], counts[1], precision.numpy(), recall.numpy(), f1.numpy())


def mean_of_known(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    return float(np.nanmean(values)) if (~np.isnan(values)).any() else np.nan


def list_confused_pairs(content: Predictions, num: int) -> list[tuple[int, int, int]]:
    """Return (label, predicted class, count) of the `num` most frequent mistakes, the most frequent first."""
    wrong = [pair for pair in list_confusions(content) if pair[0] != pair[1]]
    return sorted(wrong, key=lambda pair: -pair[2])[:num]


def top5_accuracy(content: Predictions) -> float:
    """Return the share of images whose label is among the five largest logits."""
    if content.top_class is not None:
        return float((content.top_class[:, :5] == content.label[:, None]).any(axis=1).mean())
    hits = ((logits > own[:, None]).sum(axis=1) < 5 for logits, own in _blocks(content))
    return float(np.concatenate([*hits]).mean())


# ------------------------------------------------------------------------------------- calibration


@dataclass(frozen=True)
class Reliability:
    """Confidence against accuracy in bins of equal width, (bins,); NaN in empty bins. `ece`: see `tasks.metrics`."""

    counts: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray
    ece: float


def compute_reliability(confidence: np.ndarray, correct: np.ndarray) -> Reliability:
    """Return confidence and accuracy in `NUM_BINS` bins (low, high].

    Args:
        confidence: probability of the predicted class (N,).
        correct: whether it is the label (N,).
    """
    sums = calibration_sums(torch.from_numpy(np.nan_to_num(confidence)).double(), torch.from_numpy(correct))
    mean_confidence, accuracy = (sums[1:] / sums[0]).numpy()
    ece = ExpectedCalibrationError(0).value(sums, len(confidence)) / 100
    return Reliability(sums[0].long().numpy(), mean_confidence, accuracy, ece)


@dataclass(frozen=True)
class Temperature:
    """The temperature that minimizes the negative log-likelihood (Guo et al., arXiv 1706.04599).

    Attributes:
        value: logits are divided by it, which does not change the predicted classes.
        nll_before, nll_after: mean negative log-likelihood at temperature 1, and at the fitted one.
        confidence: probability of the predicted class at the fitted temperature (N,).
    """

    value: float
    nll_before: float
    nll_after: float
    confidence: np.ndarray


def _blocks(content: Predictions) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield logits relative to the largest, and those of the label, in float32 for many classes."""
    dtype = torch.float32 if content.scores.size > 2**22 else torch.float64
    num = max(1, _BLOCK // len(content.classes))
    for start in range(0, len(content), num):
        # From float16, torch converts several times faster than numpy.
        logits = torch.from_numpy(content.scores[start : start + num]).to(dtype, copy=True).numpy()
        logits -= logits.max(axis=1, keepdims=True)
        yield logits, logits[np.arange(len(logits)), content.label[start : start + num]]


def _likelihood(content: Predictions, beta: float) -> tuple[float, float, float]:
    """Return the mean negative log-likelihood at inverse temperature `beta`, and its first two derivatives."""
    sums = np.zeros(3)
    for logits, own in _blocks(content):
        weights = np.exp(beta * logits)
        total = weights.sum(axis=1)
        weights *= logits
        mean = weights.sum(axis=1) / total
        weights *= logits
        spread = weights.sum(axis=1) / total - mean * mean
        sums += [(np.log(total) - beta * own).sum(dtype=np.float64), (mean - own).sum(dtype=np.float64), spread.sum()]
    return tuple(sums / len(content))


def fit_temperature(content: Predictions) -> Temperature | None:
    """Return the best temperature, by Newton's method; None without all logits, or if they do not determine one."""
    # If every image is right, no temperature is low enough.
    if content.top_class is not None or content.correct.all() or not np.isfinite(content.scores).all():
        return None
    beta, nll = 1.0, np.inf
    before = _likelihood(content, 1.0)
    value = before
    for _ in range(30):
        nll, slope, curvature = value
        if not np.isfinite(nll) or curvature <= 0:
            return None
        step = float(np.clip(-slope / curvature, -0.75 * beta, 3 * beta))
        beta += step
        value = _likelihood(content, beta)
        if abs(step) < 1e-5 * beta:
            break
    if not 1e-3 < beta < 1e3 or value[0] > before[0]:
        return None
    parts = [1 / np.exp(beta * logits).sum(axis=1, dtype=np.float64) for logits, _ in _blocks(content)]
    return Temperature(1 / beta, before[0], value[0], np.concatenate(parts))


def compute_risk_coverage(confidence: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return coverage and risk (N,): the share of the most confident images, and the share of mistakes among them.

    El-Yaniv and Wiener, "On the foundations of noise-free selective classification", JMLR 2010. Images with the same
    confidence are counted together.
    """
    order = np.argsort(-np.nan_to_num(confidence), kind="stable")
    ranked, num = np.nan_to_num(confidence)[order], np.arange(1, len(order) + 1)
    last = np.searchsorted(-ranked, -ranked, side="right") - 1
    return num / len(order), (np.cumsum(~correct[order]) / num)[last]


# ----------------------------------------------------------------------------------- several labels


@dataclass(frozen=True)
class LabelFigures:
    """Figures of each class of a multi-label set, (classes,).

    Attributes:
        average_precision: as in scikit-learn; NaN without images.
        threshold: the least probability to predict a class that maximizes its F1 score; NaN without images.
        best_f1: the F1 score at this threshold.
    """

    average_precision: np.ndarray
    threshold: np.ndarray
    best_f1: np.ndarray


def compute_label_figures(content: Predictions) -> LabelFigures:
    """Return the figures of each class."""
    scores, num = content.scores.astype(np.float32), len(content)
    precisions = average_precisions(torch.from_numpy(scores), torch.from_numpy(content.label)).numpy()
    best = [_best_threshold(scores[:, number], content.label[:, number], num) for number in range(len(content.classes))]
    thresholds, f1 = np.array(best, dtype=np.float64).reshape(-1, 2).T
    return LabelFigures(precisions, 0.5 * (1 + np.tanh(0.5 * thresholds)), f1)


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
    figures, num = compute_class_figures(content), len(content)
    result: dict[str, Any] = {"images": num, "loss": float(content.loss.mean()), "classes": {}}
    columns = {name: values.tolist() for name, values in vars(figures).items()}
    if content.multilabel and content.top_class is None:
        columns |= {name: values.tolist() for name, values in vars(compute_label_figures(content)).items()}
        result["map"] = mean_of_known(np.array(columns["average_precision"]))
    for number, name in enumerate(content.classes):
        result["classes"][name] = {column: values[number] for column, values in columns.items()}
    for name in ("precision", "recall", "f1"):
        result[f"macro_{name}"] = mean_of_known(getattr(figures, name))
    if not content.multilabel:
        result |= _list_single_label(content)
    return result


def _list_single_label(content: Predictions) -> dict[str, Any]:
    num_correct = int(content.correct.sum())
    reliability, temperature = compute_reliability(content.confidence, content.correct), fit_temperature(content)
    coverage, risk = compute_risk_coverage(content.confidence, content.correct)
    calibration: dict[str, Any] = {"ece": reliability.ece, "area_under_risk_coverage": float(risk.mean())}
    calibration["bins"] = {name: getattr(reliability, name).tolist() for name in ("counts", "confidence", "accuracy")}
    if temperature:
        scaled = compute_reliability(temperature.confidence, content.correct)
        calibration |= {"temperature": temperature.value, "nll": temperature.nll_before,
                        "nll_at_temperature": temperature.nll_after, "ece_at_temperature": scaled.ece}  # fmt: skip
    marks = [max(1, round(share * len(content) / 20)) - 1 for share in range(1, 21)]
    calibration["risk_coverage"] = [[float(coverage[mark]), float(risk[mark])] for mark in marks]
    names = content.classes
    return {
        "accuracy": num_correct / len(content),
        "accuracy_interval": list(wilson_interval(num_correct, len(content))),
        "top5_accuracy": top5_accuracy(content),
        "calibration": calibration,
        "confusions": [[names[row], names[column], count] for row, column, count in list_confusions(content)],
    }
