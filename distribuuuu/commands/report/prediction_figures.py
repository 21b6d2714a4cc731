"""Figures of predictions as plain values: accuracy, classes, confusions, mistakes. Fractions are from 0 to 1."""

from typing import Any

import numpy as np
import torch

from distribuuuu.commands.stats.significance import wilson_interval
from distribuuuu.commands.stats.stored_predictions import Predictions
from distribuuuu.data.datasets.table_file import csv_line
from distribuuuu.tasks.class_metrics import average_precisions, class_f1_scores, class_recalls

# Mistakes and uncertain images that are listed, and images of a task that does not classify.
_NUM_MISTAKES, _NUM_UNCERTAIN, _NUM_VALUES = 16, 8, 50


def compute_class_figures(content: Predictions) -> dict[str, np.ndarray]:
    """Return the F1 score, precision, recall, and the images with the label and with the prediction of each class.

    They are (classes,), as in scikit-learn; NaN where a figure is not defined. With several labels per image, a class
    is predicted at a probability above 0.5, and there is the average precision, if the scores of all classes are known.
    """
    if content.multilabel:
        is_predicted, is_label = content.scores > 0, content.label.astype(bool)
        counts = np.stack([part.sum(axis=0) for part in (is_predicted & is_label, is_predicted, is_label)])
    else:
        numbers, least = (content.label[content.correct], content.predicted, content.label), len(content.classes)
        counts = np.stack([np.bincount(classes, minlength=least) for classes in numbers])
    sums = torch.from_numpy(counts).double()
    figures = {
        "f1": class_f1_scores(sums).numpy(),
        "precision": (sums[0] / sums[1]).numpy(),
        "recall": class_recalls(sums).numpy(),
        "support": counts[2],
        "predicted": counts[1],
    }
    if content.multilabel:
        scores = torch.from_numpy(content.scores.astype(np.float32))
        figures["average_precision"] = average_precisions(scores, torch.from_numpy(content.label)).numpy()
    return figures


def mean_of_known(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    return float(np.nanmean(values)) if (~np.isnan(values)).any() else np.nan


def top5_accuracy(content: Predictions) -> float:
    """Return the share of images whose label is among the five largest logits."""
    if content.top_class is not None:
        return float((content.top_class[:, :5] == content.label[:, None]).any(axis=1).mean())
    own = content.scores[np.arange(len(content)), content.label]
    return float(((content.scores > own[:, None]).sum(axis=1) < 5).mean())


def list_figures(content: Predictions) -> dict[str, Any]:
    """Return all figures of predictions of classes, for JSON and for the page."""
    columns, names = compute_class_figures(content), content.classes
    result: dict[str, Any] = {"images": len(content), "loss": float(content.loss.mean())}
    result |= {f"macro_{name}": mean_of_known(columns[name]) for name in ("precision", "recall", "f1")}
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    result["classes"] = {name: dict(zip(columns, row, strict=True)) for name, row in zip(names, rows, strict=True)}
    if content.multilabel:
        result["map"] = mean_of_known(columns["average_precision"])
    else:
        num_correct, num = int(content.correct.sum()), len(names)
        pairs, counts = np.unique(content.label.astype(np.int64) * num + content.predicted, return_counts=True)
        result |= {
            "accuracy": num_correct / len(content),
            "accuracy_interval": list(wilson_interval(num_correct, len(content))),
            "top5_accuracy": top5_accuracy(content),
            "confusions": [[names[pair // num], names[pair % num], count]
                           for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True)],
        }  # fmt: skip
    result["mistakes"] = [describe_answer(content, index) for index in rank_mistakes(content)[:_NUM_MISTAKES]]
    result["least_certain"] = [describe_answer(content, index) for index in rank_uncertain(content)]
    return result


def rank_mistakes(content: Predictions) -> list[int]:
    """Return the images with a mistake, the most confident one first."""
    if content.multilabel:
        errors = np.abs(content.probabilities() - content.label).max(axis=1)
        wrong = np.flatnonzero(errors > 0.5)
    else:
        errors, wrong = content.confidence, np.flatnonzero(~content.correct)
    return wrong[np.argsort(-errors[wrong], kind="stable")].tolist()


def rank_uncertain(content: Predictions) -> list[int]:
    """Return the least certain images, the least certain first: with several labels, those with one near 0.5."""
    certainty = np.abs(content.probabilities() - 0.5).min(axis=1) if content.multilabel else content.confidence
    return np.argsort(certainty, kind="stable")[:_NUM_UNCERTAIN].tolist()


def describe_answer(content: Predictions, index: int) -> dict[str, Any]:
    """Return the file, the labels and the most probable classes of an image."""
    probabilities = content.probabilities(slice(index, index + 1))[0]
    order = np.argsort(-probabilities, kind="stable")[:3]
    numbers = order if content.top_class is None else content.top_class[index, order]
    labels = np.flatnonzero(content.label[index]) if content.multilabel else [content.label[index]]
    shares = zip(numbers, probabilities[order].tolist(), strict=True)
    return {
        "image": str(content.path[index]),
        "labels": [content.classes[number] for number in labels],
        "predicted": {content.classes[number]: share for number, share in shares},
        "loss": float(content.loss[index]),
    }


def list_mistakes(content: Predictions) -> str:
    """Return the images with a wrong answer as CSV, the most confident mistakes first."""
    lines = [csv_line(["path", "labels", "predicted", "probability", "loss"])]
    for answer in (describe_answer(content, index) for index in rank_mistakes(content)):
        label, probability = next(iter(answer["predicted"].items()))
        cells = [answer["image"], ";".join(answer["labels"]), label, f"{probability:.6g}", f"{answer['loss']:.6g}"]
        lines.append(csv_line(cells))
    return "".join(lines)


def list_values(content: Predictions, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a task that does not classify, and the images with the largest errors.

    The error of an image is the mean absolute difference of scores and targets; where these are not comparable, the
    first images are listed.

    Args:
        content: the predictions.
        facts: content of results.json or test_results.json; empty if there is none.
    """
    accuracy = facts.get("accuracy", {}).get(content.meta.get("weights", "raw"), {}) if facts else {}
    found = accuracy.get("last", accuracy).items()
    metrics = {name: value for name, value in found if name != "epoch" and isinstance(value, (int, float))}
    targets, order = content.label.reshape(len(content), -1), np.arange(len(content))
    if targets.shape == content.scores.shape:
        errors = np.abs(content.scores - targets).mean(axis=1)
        order, metrics["mean absolute error"] = np.argsort(-errors, kind="stable"), float(errors.mean())
    values = [{"path": str(content.path[row]), "target": content.label[row].tolist(),
               "score": content.scores[row].tolist()} for row in order[:_NUM_VALUES]]  # fmt: skip
    return {"metrics": metrics, "values": values}
