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
_ENTRIES = [f"{name}.npy" for name in ("meta", "classes", "path", "label", "loss", "logits", "top_logits", "top_class",
                                       "log_total", "target", "score")]  # fmt: skip


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
    arrays = _read_arrays(archive)

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
    if "logits" in arrays:
        scores, top = take("logits", "f", num, columns), {}
    elif meta["multilabel"]:
        raise ValueError("of so many images and labels, it has the largest logits only, which tell too little")
    else:
        scores = take("top_logits", "f", num, arrays["top_logits"].shape[1])
        top = {"top_class": take("top_class", "i", *scores.shape), "log_total": take("log_total", "f", num)}
        _check_range(top["top_class"], columns)
    if not scores.size:
        raise ValueError("it holds no image, or no class")
    return Predictions(path, label, take("loss", "f", num), classes, meta, scores, **top)


def _read_arrays(archive: zipfile.ZipFile) -> dict[str, np.ndarray]:
    """Return the known arrays of a file; nothing is allocated for a shape that an entry cannot hold."""
    entries = [entry for entry in archive.infolist() if entry.filename in _ENTRIES]
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
