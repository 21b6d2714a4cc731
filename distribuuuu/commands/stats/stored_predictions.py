"""Reading of predictions.npz, which may come from elsewhere, and its figures as plain values; fractions from 0 to 1."""

import zipfile
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distribuuuu.commands.stats.intervals import wilson_interval
from distribuuuu.config import ConfigError
from distribuuuu.files.untrusted import InvalidFileError, open_regular, parse_json, untrusted
from distribuuuu.records.predictions import SCHEMA_VERSION
from distribuuuu.tasks.class_metrics import average_precisions, class_f1_scores, class_recalls

# Bytes of all arrays, at most.
MAX_BYTES = 2**31
_ENTRIES = ("meta", "classes", "path", "label", "loss", "logits")
# Mistakes that are listed.
_NUM_MISTAKES = 16


@dataclass
class Predictions:
    """The content of predictions.npz; see `predictions`.

    Attributes:
        path, label, loss: of each image, in the order of the data set.
        meta: the JSON entries.
        scores: the logits (N, C).
        temperature: scores are divided by it before the softmax.
    """

    path: np.ndarray
    label: np.ndarray
    loss: np.ndarray
    classes: list[str]
    meta: dict[str, Any]
    scores: np.ndarray = field(repr=False)
    temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.label)

    @property
    def multilabel(self) -> bool:
        """Whether an image may have several labels."""
        return self.label.ndim == 2

    @cached_property
    def predicted(self) -> np.ndarray:
        """The class with the largest logit: int64 (N,); the first one of several."""
        return self.scores.argmax(axis=1)

    @cached_property
    def correct(self) -> np.ndarray:
        """Whether the class with the largest logit is the label: bool (N,); with several labels, one of them."""
        return self.label[np.arange(len(self)), self.predicted] > 0 if self.multilabel else self.predicted == self.label

    def probabilities(self, rows: Any = slice(None)) -> np.ndarray:
        """Return the probabilities of the classes, by softmax or with several labels by sigmoid, in float64."""
        scores = torch.from_numpy(self.scores[rows]).double()
        return (scores.sigmoid() if self.multilabel else (scores / self.temperature).softmax(dim=1)).numpy()

    @cached_property
    def confidence(self) -> np.ndarray:
        """The probability of the predicted class: float64 (N,)."""
        step = max(1, 2**17 // len(self.classes))  # limits the memory
        parts = [self.probabilities(slice(start, start + step)).max(axis=1) for start in range(0, len(self), step)]
        return np.concatenate(parts)


def read_predictions(path: Path, command: str) -> Predictions:
    """Return the content of a predictions.npz; messages name the `command` that makes it.

    Raises:
        ConfigError: the file does not exist, cannot be read, or is damaged, or its scores are not finite, or are no
            scores of classes.
    """
    try:
        with open_regular(path) as file, untrusted(path, "predictions.npz"), zipfile.ZipFile(file) as archive:
            arrays = read_arrays(archive, _ENTRIES)
            meta = parse_json(str(arrays["meta"]))
            content = _check(arrays, meta) if meta.get("classifies", True) else None
    except FileNotFoundError:
        note = "a task without predict_step, whose model has no score for each class, has none"
        raise ConfigError(f"RUN: {path} does not exist; fix: {command}; {note}") from None
    except InvalidFileError as error:
        raise ConfigError(f"RUN: {error}; fix: {command}") from error
    except OSError as error:
        raise ConfigError(f"RUN: {path} cannot be read: {error.strerror or error}") from error
    if content is None:
        what = f"{path} is of a task that does not classify; expected predictions of classes"
        raise ConfigError(f"RUN: {what}; fix: distribuuuu test prints its metrics, and this file has its values")
    if not np.isfinite(content.scores).all():
        raise ConfigError(f"RUN: {path} has scores that are not finite; fix: evaluate another checkpoint of this run")
    return content


def _check(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> Predictions:
    """Return the content of arrays; raises an error of any type if they are damaged or do not fit together."""
    if meta["schema"] != SCHEMA_VERSION:
        raise ValueError(f"schema {meta['schema']}, expected {SCHEMA_VERSION}")
    texts = [meta.get(name, "") for name in ("weights", "folder", "images", "data")]
    if not all(isinstance(text, str) for text in texts) or type(meta.get("epoch")) not in (int, type(None)):
        raise ValueError(f"meta is {meta}")
    num, columns = len(arrays["path"]), len(arrays["classes"])
    expected = {"path": ("U", num), "classes": ("U", columns), "loss": ("f", num),
                "label": ("iu", num, columns) if meta["multilabel"] else ("iu", num),
                "logits": ("f", num, columns)}  # fmt: skip
    for name, (kinds, *shape) in expected.items():
        array = arrays[name]
        if array.dtype.kind not in kinds or not array.dtype.isnative or list(array.shape) != shape or not array.size:
            raise ValueError(f"{name} has the type {array.dtype} and the shape {array.shape}, expected {shape}")
    label, limit = arrays["label"], 2 if meta["multilabel"] else columns
    if not 0 <= label.min() <= label.max() < limit:
        raise ValueError(f"label has numbers from {label.min()} to {label.max()}, expected 0 to {limit - 1}")
    arrays["path"].tolist()  # raises if there are characters that do not exist
    names = arrays["classes"].tolist()
    return Predictions(arrays["path"], label, arrays["loss"], names, meta, arrays["logits"])


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


def list_figures(content: Predictions) -> dict[str, Any]:
    """Return all figures of predictions of classes, for JSON and for the page.

    Those of `classes` are NaN where they are not defined, as in scikit-learn. With several labels per image, a class is
    predicted at a probability above 0.5.
    """
    if content.multilabel:
        is_predicted, is_label = content.scores > 0, content.label.astype(bool)
        counts = np.stack([part.sum(axis=0) for part in (is_predicted & is_label, is_predicted, is_label)])
    else:
        numbers, least = (content.label[content.correct], content.predicted, content.label), len(content.classes)
        counts = np.stack([np.bincount(classes, minlength=least) for classes in numbers])
    sums = torch.from_numpy(counts).double()
    precision = (sums[0] / sums[1]).numpy()
    columns = {"f1": class_f1_scores(sums).numpy(), "precision": precision, "recall": class_recalls(sums).numpy(),
               "support": counts[2], "predicted": counts[1]}  # fmt: skip
    # As in scikit-learn, a class that occurs and is never predicted has the precision 0 in the mean.
    macro = {**columns, "precision": np.where(counts[1:].any(axis=0), np.nan_to_num(precision), np.nan)}
    result: dict[str, Any] = {"images": len(content), "loss": float(content.loss.mean())}
    result |= {f"macro_{name}": _mean_of_known(macro[name]) for name in ("precision", "recall", "f1")}
    if content.multilabel:
        scores = torch.from_numpy(content.scores.astype(np.float32))
        columns["average_precision"] = average_precisions(scores, torch.from_numpy(content.label)).numpy()
        result["map"] = _mean_of_known(columns["average_precision"])
    else:
        result |= _list_accuracies(content)
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    named = zip(content.classes, rows, strict=True)
    result["classes"] = {name: dict(zip(columns, row, strict=True)) for name, row in named}
    result["mistakes"] = [describe_answer(content, index) for index in rank_mistakes(content)[:_NUM_MISTAKES]]
    return result


def _mean_of_known(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    return float(np.nanmean(values)) if (~np.isnan(values)).any() else np.nan


def _list_accuracies(content: Predictions) -> dict[str, Any]:
    """Return the figures of predictions with one label per image."""
    num_correct, names, label = int(content.correct.sum()), content.classes, content.label.astype(np.int64)
    is_in_top = (content.scores > content.scores[np.arange(len(label)), label, None]).sum(axis=1) < 5
    pairs, counts = np.unique(label * len(names) + content.predicted, return_counts=True)
    owns, answers = np.divmod(pairs, len(names))
    return {
        "accuracy": num_correct / len(content),
        "accuracy_interval": list(wilson_interval(num_correct, len(content))),
        "top5_accuracy": float(is_in_top.mean()),
        "confusions": [
            [names[own], names[answer], int(count)] for own, answer, count in zip(owns, answers, counts, strict=True)
        ],
    }


def rank_mistakes(content: Predictions) -> list[int]:
    """Return the images with a mistake, the most confident one first."""
    if content.multilabel:
        errors = np.abs(content.probabilities() - content.label).max(axis=1)
        wrong = np.flatnonzero(errors > 0.5)
    else:
        errors, wrong = content.confidence, np.flatnonzero(~content.correct)
    return wrong[np.argsort(-errors[wrong], kind="stable")].tolist()


def describe_answer(content: Predictions, index: int) -> dict[str, Any]:
    """Return the file, the labels and the most probable classes of an image."""
    probabilities = content.probabilities(slice(index, index + 1))[0]
    order = np.argsort(-probabilities, kind="stable")[:3]
    labels = np.flatnonzero(content.label[index]) if content.multilabel else [content.label[index]]
    shares = zip(order, probabilities[order].tolist(), strict=True)
    return {
        "image": str(content.path[index]),
        "labels": [content.classes[number] for number in labels],
        "predicted": {content.classes[number]: share for number, share in shares},
        "loss": float(content.loss[index]),
    }
