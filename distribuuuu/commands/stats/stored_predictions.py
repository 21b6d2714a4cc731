"""Reading of predictions.npz, which may come from elsewhere."""

import zipfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distribuuuu.config import ConfigError
from distribuuuu.files.untrusted import InvalidFileError, open_regular, parse_json, untrusted
from distribuuuu.records.predictions import SCHEMA_VERSION

# Bytes of all arrays, at most.
MAX_BYTES = 2**31
# Names of the arrays, and the kinds of their numbers; "U" stands for texts.
_KINDS = {
    "meta": "U", "classes": "U", "path": "U", "label": "iu", "loss": "f", "logits": "f", "top_logits": "f",
    "top_class": "i", "log_total": "f", "target": "f", "score": "f",
}  # fmt: skip


@dataclass
class Predictions:
    """The content of predictions.npz; see `predictions`.

    Attributes:
        path, label, loss: of each image, in the order of the data set.
        classes: the class names.
        meta: the JSON entries.
        scores: the logits (N, C), or the largest ones (N, k).
        top_class, log_total: of the largest ones; None if `scores` has all classes.
    """

    path: np.ndarray
    label: np.ndarray
    loss: np.ndarray
    classes: list[str]
    meta: dict[str, Any]
    scores: np.ndarray = field(repr=False)
    top_class: np.ndarray | None = None
    log_total: np.ndarray | None = None

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
        exponentials = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
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
        ConfigError: the file does not exist, cannot be read, or is damaged.
    """
    try:
        with open_regular(path) as file, untrusted(path, "predictions.npz"), zipfile.ZipFile(file) as archive:
            return _read_content(archive)
    except FileNotFoundError:
        note = "a task without predict_step, whose model has no score for each class, has none"
        raise ConfigError(f"RUN: {path} does not exist; fix: {command}; {note}") from None
    except InvalidFileError as error:
        raise ConfigError(f"RUN: {error}; fix: {command}") from error
    except OSError as error:
        raise ConfigError(f"RUN: {path} cannot be read: {error.strerror or error}") from error


def _read_content(archive: zipfile.ZipFile) -> Predictions:
    """Return the named arrays of a file; raises an error of any type if they are damaged or do not fit together."""
    entries = [entry for entry in archive.infolist() if entry.filename.removesuffix(".npy") in _KINDS]
    if (total := sum(entry.file_size for entry in entries)) > MAX_BYTES:
        raise ValueError(f"its arrays have {total:,} bytes, expected at most {MAX_BYTES:,}")
    arrays = {entry.filename.removesuffix(".npy"): _read_array(archive, entry) for entry in entries}
    meta = parse_json(str(arrays["meta"]))
    if meta["schema"] != SCHEMA_VERSION:
        raise ValueError(f"schema {meta['schema']}, expected {SCHEMA_VERSION}")
    texts = (meta.get(name, "") for name in ("weights", "folder", "images", "data"))
    if not all(isinstance(text, str) for text in texts) or type(meta.get("epoch")) not in (int, type(None)):
        raise ValueError(f"meta is {meta}")
    path, classes, num = arrays["path"], arrays["classes"].tolist(), len(arrays["path"])
    path.tolist()  # raises if there are characters that do not exist
    if not meta.get("classifies", True):
        content = Predictions(path, arrays["target"], np.full(num, np.nan), classes, meta, arrays["score"])
        if content.scores.shape != (num, len(classes)) or len(content.label) != num:
            raise ValueError("its arrays do not fit together")
        return content
    label, scores = arrays["label"], arrays["logits" if "logits" in arrays else "top_logits"]
    content = Predictions(path, label, arrays["loss"], classes, meta, scores, arrays.get("top_class"))
    columns, limit = len(classes), 2 if meta["multilabel"] else len(classes)
    if "logits" not in arrays:
        content.log_total, columns = arrays["log_total"], scores.shape[1]
        if arrays["top_class"].shape != scores.shape or content.log_total.shape != (num,):
            raise ValueError("its arrays do not fit together")
        _check_range(arrays["top_class"], len(classes))
    _check_range(label, limit)
    shape = (num, len(classes)) if meta["multilabel"] else (num,)
    if label.shape != shape or content.loss.shape != (num,) or scores.shape != (num, columns) or not columns:
        raise ValueError("its arrays do not fit together")
    return content


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    """Return an array; nothing is allocated for a shape that the entry cannot hold."""
    with archive.open(entry) as file:
        read_header = np.lib.format.read_array_header_1_0
        if np.lib.format.read_magic(file) != (1, 0):
            read_header = np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
    if dtype.kind not in _KINDS[entry.filename.removesuffix(".npy")] or not dtype.isnative:
        raise ValueError(f"{entry.filename} has the type {dtype.kind}{dtype.itemsize}")
    size = dtype.itemsize
    for side in shape:
        size *= side
    if size > entry.file_size or min(shape, default=0) < 0:
        raise ValueError(f"{entry.filename} has the shape {shape} and {entry.file_size:,} bytes")
    with archive.open(entry) as file:
        return np.ascontiguousarray(np.lib.format.read_array(file)).reshape(shape)


def _check_range(array: np.ndarray, limit: int) -> None:
    if array.size and not 0 <= array.min() <= array.max() < limit:
        raise ValueError(f"it has classes from {array.min()} to {array.max()}, expected 0 to {limit - 1}")
