"""Reading of predictions.npz, which may come from elsewhere, and its figures as plain values; fractions from 0 to 1."""

import zipfile
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distribuuuu.commands.stats.significance import wilson_interval
from distribuuuu.config import ConfigError
from distribuuuu.data.datasets.table_file import csv_line
from distribuuuu.files.untrusted import InvalidFileError, open_regular, parse_json, untrusted
from distribuuuu.records.predictions import SCHEMA_VERSION
from distribuuuu.tasks.class_metrics import average_precisions, class_f1_scores, class_recalls

# Bytes of all arrays, at most.
MAX_BYTES = 2**31
_ENTRIES = ("meta", "classes", "path", "label", "loss", "logits", "top_logits", "top_class", "log_total", "target",
            "score")  # fmt: skip


@dataclass
class Predictions:
    """The content of predictions.npz; see `predictions`.

    Attributes:
        path, label, loss: of each image, in the order of the data set.
        classes: the class names.
        meta: the JSON entries.
        scores: the logits (N, C), or the largest ones (N, k).
        top_class, log_total: of the largest ones; None if `scores` has all classes.
        temperature: scores are divided by it before the softmax.
    """

    path: np.ndarray
    label: np.ndarray
    loss: np.ndarray
    classes: list[str]
    meta: dict[str, Any]
    scores: np.ndarray = field(repr=False)
    top_class: np.ndarray | None = None
    log_total: np.ndarray | None = None
    temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.label)

    @property
    def classifies(self) -> bool:
        """Whether the scores are those of classes; else `label` holds targets, `loss` NaN, and `classes` names."""
        return self.meta.get("classifies", True)

    @property
    def multilabel(self) -> bool:
        """Whether an image may have several labels."""
        return self.label.ndim == 2 and self.classifies

    @cached_property
    def predicted(self) -> np.ndarray:
        """The class with the largest logit: int64 (N,); the first one of several."""
        return self.scores.argmax(axis=1) if self.top_class is None else self.top_class[:, 0].astype(np.int64)

    @cached_property
    def correct(self) -> np.ndarray:
        """Whether the class with the largest logit is the label: bool (N,); with several labels, one of them."""
        return self.label[np.arange(len(self)), self.predicted] > 0 if self.multilabel else self.predicted == self.label

    def probabilities(self, rows: Any = slice(None)) -> np.ndarray:
        """Return the probabilities of the stored classes, by softmax or with several labels by sigmoid, in float64."""
        scores = torch.from_numpy(self.scores[rows]).double().numpy()  # from float16 several times faster than numpy
        if self.multilabel:
            return 0.5 * (1 + np.tanh(0.5 * scores))
        if self.log_total is not None:
            return np.exp(scores - self.log_total[rows, None])
        exponentials = np.exp((scores - scores.max(axis=1, keepdims=True, initial=-np.inf)) / self.temperature)
        return exponentials / exponentials.sum(axis=1, keepdims=True)

    @cached_property
    def confidence(self) -> np.ndarray:
        """The probability of the predicted class: float64 (N,)."""
        step = max(1, 2**17 // len(self.classes))
        rows = (slice(start, start + step) for start in range(0, len(self), step))
        parts = [self.probabilities(part).max(axis=1, initial=0) for part in rows]
        return np.concatenate([np.zeros(0), *parts])


def read_predictions(path: Path, command: str) -> Predictions:
    """Return the content of a predictions.npz.

    Args:
        path: the file.
        command: the command that makes it, for messages.

    Raises:
        ConfigError: the file does not exist, cannot be read, or is damaged, or its scores are not finite.
    """
    try:
        with open_regular(path) as file, untrusted(path, "predictions.npz"), zipfile.ZipFile(file) as archive:
            content = _read_content(archive)
    except FileNotFoundError:
        note = "a task without predict_step, whose model has no score for each class, has none"
        raise ConfigError(f"RUN: {path} does not exist; fix: {command}; {note}") from None
    except InvalidFileError as error:
        raise ConfigError(f"RUN: {error}; fix: {command}") from error
    except OSError as error:
        raise ConfigError(f"RUN: {path} cannot be read: {error.strerror or error}") from error
    if not np.isfinite(content.scores).all():
        raise ConfigError(f"RUN: {path} has scores that are not finite; fix: evaluate another checkpoint of this run")
    return content


def _read_content(archive: zipfile.ZipFile) -> Predictions:
    """Return the named arrays of a file; raises an error of any type if they are damaged or do not fit together."""
    arrays = read_arrays(archive, _ENTRIES)

    def take(name: str, kinds: str, *shape: int) -> np.ndarray:
        array = arrays[name]
        if array.dtype.kind not in kinds or not array.dtype.isnative or array.shape != shape:
            raise ValueError(f"{name} has the type {array.dtype} and the shape {array.shape}, expected {shape}")
        return array

    meta, num, columns = parse_json(str(arrays["meta"])), len(arrays["path"]), len(arrays["classes"])
    if meta["schema"] != SCHEMA_VERSION:
        raise ValueError(f"schema {meta['schema']}, expected {SCHEMA_VERSION}")
    texts = (meta.get(name, "") for name in ("weights", "folder", "images", "data"))
    if not all(isinstance(text, str) for text in texts) or type(meta.get("epoch")) not in (int, type(None)):
        raise ValueError(f"meta is {meta}")
    path, classes = take("path", "U", num), take("classes", "U", columns).tolist()
    path.tolist()  # raises if there are characters that do not exist
    if not meta.get("classifies", True):
        target = take("target", "f", num, *arrays["target"].shape[1:])
        return Predictions(path, target, np.full(num, np.nan), classes, meta, take("score", "f", num, columns))
    label = take("label", "iu", *((num, columns) if meta["multilabel"] else (num,)))
    _check_range(label, 2 if meta["multilabel"] else columns)
    top: dict[str, Any] = {}
    if "logits" in arrays:
        scores = take("logits", "f", num, columns)
    elif meta["multilabel"]:
        raise ValueError("of so many images and labels, it has the largest logits only, which tell too little")
    else:
        scores = take("top_logits", "f", num, arrays["top_logits"].shape[1])
        top = {"top_class": take("top_class", "i", *scores.shape), "log_total": take("log_total", "f", num)}
        _check_range(top["top_class"], columns)
    if not scores.size:
        raise ValueError("it holds no image, or no class")
    return Predictions(path, label, take("loss", "f", num), classes, meta, scores, **top)


def read_arrays(archive: zipfile.ZipFile, names: Collection[str]) -> dict[str, np.ndarray]:
    """Return the arrays of some names in a file; nothing is allocated for a shape that an entry cannot hold."""
    entries = [entry for entry in archive.infolist() if entry.filename.removesuffix(".npy") in names]
    if (total := sum(entry.file_size for entry in entries)) > MAX_BYTES:
        raise ValueError(f"its arrays have {total:,} bytes, expected at most {MAX_BYTES:,}")
    arrays = {}
    for entry in entries:
        with archive.open(entry) as file:
            np.lib.format.read_magic(file)
            shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
            flat = np.frombuffer(bytearray(file.read()), dtype)
        arrays[entry.filename.removesuffix(".npy")] = flat.reshape(shape, order="F" if is_fortran else "C")
    return arrays


def _check_range(array: np.ndarray, limit: int) -> None:
    if array.size and not 0 <= array.min() <= array.max() < limit:
        raise ValueError(f"it has classes from {array.min()} to {array.max()}, expected 0 to {limit - 1}")


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
    # As in scikit-learn, a class that occurs and is never predicted has the precision 0.
    occurs = (columns["support"] > 0) | (columns["predicted"] > 0)
    precision = np.where(occurs, np.nan_to_num(columns["precision"]), np.nan)
    means = {"precision": precision, "recall": columns["recall"], "f1": columns["f1"]}
    result |= {f"macro_{name}": mean_of_known(values) for name, values in means.items()}
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
    """Return the metrics of a task that does not classify, and as `values` the images with the largest errors.

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
    return {**metrics, "values": values}
