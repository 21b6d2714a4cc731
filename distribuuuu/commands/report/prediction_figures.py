"""Figures of predictions: accuracy, classes, confusion, average precision. Fractions are from 0 to 1."""

from typing import Any

import numpy as np
import torch

from distribuuuu.commands.stats.significance import wilson_interval
from distribuuuu.commands.stats.stored_predictions import Predictions
from distribuuuu.tasks.class_metrics import (
    average_precisions,
    class_f1_scores,
    class_recalls,
)


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
    own = content.scores[np.arange(len(content)), content.label]
    return float(((content.scores > own[:, None]).sum(axis=1) < 5).mean())


def average_precision(content: Predictions) -> np.ndarray:
    """Return the average precision of each class of a multi-label set, as in scikit-learn; NaN without images."""
    scores = torch.from_numpy(content.scores.astype(np.float32))
    return average_precisions(scores, torch.from_numpy(content.label)).numpy()


def list_figures(content: Predictions) -> dict[str, Any]:
    """Return all figures of predictions as plain values, for JSON."""
    columns = compute_class_figures(content)
    result: dict[str, Any] = {"images": len(content), "loss": float(content.loss.mean())}
    result |= {f"macro_{name}": mean_of_known(columns[name]) for name in ("precision", "recall", "f1")}
    if content.multilabel and content.top_class is None:
        columns["average_precision"] = average_precision(content)
        result["map"] = mean_of_known(columns["average_precision"])
    lists = {name: values.tolist() for name, values in columns.items()}
    result["classes"] = {name: {column: lists[column][number] for column in lists}
                         for number, name in enumerate(content.classes)}  # fmt: skip
    if content.multilabel:
        return result
    num_correct, names = int(content.correct.sum()), content.classes
    return result | {
        "accuracy": num_correct / len(content),
        "accuracy_interval": list(wilson_interval(num_correct, len(content))),
        "top5_accuracy": top5_accuracy(content),
        "confusions": [[names[row], names[column], count] for row, column, count in list_confusions(content)],
    }
