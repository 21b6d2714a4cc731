"""Reading of predictions.npz, which may be made by others: every size is checked before memory is allocated for it."""

import json
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import torch

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.files.untrusted import open_regular, parse_json
from distribuuuu.records.predictions import MAX_IMAGES, MAX_LOGITS, SCHEMA_VERSION, TOP

# Classes of a file, characters of a text, and bytes of the file and of all its arrays, at most.
MAX_CLASSES, MAX_WIDTH, MAX_FILE, MAX_BYTES = 2**17, 2**16, 2**30, 2**31
_BLOCK = 2**20
# The types of each array; "U" stands for texts.
_TYPES = {
    "meta": ("U",),
    "classes": ("U",),
    "path": ("U",),
    "label": ("int32", "int64", "uint8"),
    "loss": ("float32", "float64"),
    "logits": ("float16", "float32", "float64"),
    "top_logits": ("float16", "float32", "float64"),
    "top_class": ("int32", "int64"),
    "log_total": ("float32", "float64"),
    "target": ("float32",),
    "score": ("float32",),
}
_META: dict[str, tuple[type, ...]] = {
    "schema": (int,),
    "multilabel": (bool,),
    "weights": (str,),
    "epoch": (int, type(None)),
    "folder": (str,),
    "images": (str,),
    "data": (str,),
    "classifies": (bool,),
}
_DAMAGE = (OSError, ValueError, LookupError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error,
           struct.error)  # fmt: skip


_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


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
        ConfigError: the file does not exist, or is damaged.
    """
    try:
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_FILE:
                raise ValueError(f"has {size:,} bytes, expected at most {MAX_FILE:,}")
            with zipfile.ZipFile(file) as archive:
                return _read_content(archive)
    except FileNotFoundError:
        note = "a task without predict_step, whose model has no score for each class, has none"
        raise ConfigError(f"RUN: {path} does not exist; fix: {command}; {note}") from None
    except _DAMAGE as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        what = f"{path} is damaged, or not written by this version: {problem or type(error).__name__}"
        raise ConfigError(f"RUN: {what}; fix: {command}") from error


# ----------------------------------------------------------------------------------------- arrays


class _Member(NamedTuple):
    """An array in the file, of which the header has been read."""

    entry: zipfile.ZipInfo
    dtype: np.dtype
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    offset: int


def _read_content(archive: zipfile.ZipFile) -> Predictions:
    """Return the named arrays of a file; raises one of `_DAMAGE` if they are damaged or do not fit together."""
    entries = [entry for entry in archive.infolist() if entry.filename.removesuffix(".npy") in _TYPES]
    names = [entry.filename for entry in entries]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"`{repeated[0]}` occurs more than once")
    members = {entry.filename.removesuffix(".npy"): _read_header(archive, entry) for entry in entries}
    meta = _read_meta(archive, members)
    if not meta.get("classifies", True):
        return _read_values(archive, members, meta)
    shapes = _list_shapes(members, meta["multilabel"])
    for name, shape in shapes.items():
        if members[name].shape != shape:
            raise ValueError(f"`{name}` is {members[name].dtype} {members[name].shape}, expected {shape}")
    if (total := sum(_size(members[name]) for name in shapes)) > MAX_BYTES:
        raise ValueError(f"its arrays have {total:,} bytes, expected at most {MAX_BYTES:,}")
    arrays = {name: _read_array(archive, members[name]) for name in shapes}
    num_classes = len(arrays["classes"])
    _check_range("label", arrays["label"], 2 if meta["multilabel"] else num_classes)
    if "top_class" in arrays:
        _check_range("top_class", arrays["top_class"], num_classes)
    return Predictions(
        path=arrays["path"],
        label=arrays["label"],
        loss=arrays["loss"],
        classes=arrays["classes"].tolist(),
        meta=meta,
        scores=arrays["logits" if "logits" in arrays else "top_logits"],
        top_class=arrays.get("top_class"),
        log_total=arrays.get("log_total"),
    )


def _read_values(archive: zipfile.ZipFile, members: dict[str, _Member], meta: dict[str, Any]) -> Predictions:
    """Return the arrays of a task that does not classify."""
    if missing := [name for name in ("path", "classes", "score", "target") if name not in members]:
        raise ValueError(f"`{missing[0]}` is missing")
    if sum(map(_size, members.values())) > MAX_BYTES:
        raise ValueError(f"its arrays have more than {MAX_BYTES:,} bytes")
    path, names, score, target = (
        _read_array(archive, members[name]) for name in ("path", "classes", "score", "target")
    )
    if path.ndim != 1 or names.ndim != 1 or score.shape != (len(path), len(names)) or target.shape[:1] != path.shape:
        raise ValueError("its arrays do not fit together")
    return Predictions(path, target, np.full(len(path), np.nan), names.tolist(), meta, score)


def _list_shapes(members: Mapping[str, _Member], multilabel: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape that each array must have, from the numbers of images and of classes."""
    scores = ("logits",) if "logits" in members else ("top_logits", "top_class", "log_total")
    if missing := [name for name in ("loss", "classes", "path", "label", *scores) if name not in members]:
        raise ValueError(f"`{missing[0]}` is missing")
    num, num_classes = (members[name].shape[0] if members[name].shape else -1 for name in ("loss", "classes"))
    for number, noun, most in ((num, "image", MAX_IMAGES), (num_classes, "class", MAX_CLASSES)):
        if not 0 <= number <= most:
            raise ValueError(f"got {counted(number, noun)}, expected 0 to {most:,}")
    if not num_classes:
        raise ValueError("got no classes")
    if "logits" in members and num * num_classes > MAX_LOGITS:
        raise ValueError(f"`logits` has {num * num_classes:,} values, expected at most {MAX_LOGITS:,}")
    columns = num_classes if "logits" in members else min(TOP, num_classes)
    return {
        "classes": (num_classes,),
        "path": (num,),
        "label": (num, num_classes) if multilabel else (num,),
        "loss": (num,),
        **{name: (num,) if name == "log_total" else (num, columns) for name in scores},
    }


def _read_header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> _Member:
    """Return the type and the shape of an array, which agree with the size of the entry."""
    name = entry.filename.removesuffix(".npy")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & 1:
        raise ValueError(f"`{name}` is encrypted, or compressed by another method than numpy's")
    with archive.open(entry) as file:
        try:
            shape, is_fortran, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
        except (ValueError, TypeError, SyntaxError, LookupError, MemoryError, RecursionError, OverflowError,
                tokenize.TokenError) as error:  # fmt: skip
            raise ValueError(f"`{name}` is not an array") from error  # numpy's texts advise to unpickle the file
        offset = file.tell()
    is_text = dtype.kind == "U" and dtype.itemsize <= 4 * MAX_WIDTH
    if not dtype.isnative or ("U" if is_text else dtype.name) not in _TYPES[name]:
        kinds = "texts" if "U" in _TYPES[name] else " or ".join(_TYPES[name])
        raise ValueError(f"`{name}` is {_describe(dtype)} {shape}, expected {kinds}")
    member = _Member(entry, dtype, shape, "F" if is_fortran else "C", offset)
    if any(side < 0 for side in shape) or _size(member) != entry.file_size - offset:
        raise ValueError(f"`{name}` is {_describe(dtype)} {shape}, but has {entry.file_size - offset:,} bytes")
    return member


def _describe(dtype: np.dtype) -> str:
    return "of Python objects" if dtype.hasobject else str(dtype)[:40]


def _size(member: _Member) -> int:
    """Return the bytes of an array, from its header; Python integers do not overflow."""
    return member.dtype.itemsize * math.prod(member.shape)


def _read_array(archive: zipfile.ZipFile, member: _Member) -> np.ndarray:
    """Return an array, after its checksum and its texts have been checked."""
    flat = np.zeros(_size(member), np.uint8)
    with archive.open(member.entry) as file:
        file.read(member.offset)
        _fill(file, flat)
        if file.read(1):  # also checks the checksum
            raise ValueError(f"`{member.entry.filename}` is longer than its header says")
    if member.dtype.kind == "U" and flat.size and flat.view(np.uint32).max() > 0x10FFFF:
        raise ValueError(f"`{member.entry.filename.removesuffix('.npy')}` holds characters that do not exist")
    array = flat.view(member.dtype) if flat.size else np.zeros(0, member.dtype)
    if not array.size and 0 not in member.shape:  # empty texts
        return np.zeros(member.shape, member.dtype)
    return np.ascontiguousarray(array.reshape(member.shape, order=member.order)).reshape(member.shape)


def _fill(file: IO[bytes], flat: np.ndarray) -> None:
    """Read the bytes of an array in blocks, so that no second copy is in memory."""
    for start in range(0, len(flat), _BLOCK):
        block = file.read(min(_BLOCK, len(flat) - start))
        if len(block) < min(_BLOCK, len(flat) - start):
            raise EOFError("an array ends early")
        flat[start : start + len(block)] = np.frombuffer(block, np.uint8)


def _read_meta(archive: zipfile.ZipFile, members: Mapping[str, _Member]) -> dict[str, Any]:
    """Return the entries of `meta`, with the types of `_META`."""
    if "meta" not in members or members["meta"].shape != ():
        raise ValueError("`meta` is missing, or no single text")
    meta = parse_json(str(_read_array(archive, members["meta"])))
    if not isinstance(meta, dict):
        raise ValueError("`meta` is no JSON object")
    for name, types in _META.items():
        if name not in meta and name in ("schema", "multilabel"):
            raise ValueError(f"`meta`: `{name}` is missing")
        value = meta.get(name)
        if name in meta and (not isinstance(value, types) or isinstance(value, bool) and bool not in types):
            raise ValueError(f"`meta`: `{name}`: got {json.dumps(value)[:40]}")
    if meta["schema"] != SCHEMA_VERSION:
        raise ValueError(f"schema {meta['schema']}, expected {SCHEMA_VERSION}")
    if not 0 <= (meta.get("epoch") or 0) < 2**31:
        raise ValueError(f"`meta`: `epoch`: got {meta['epoch']}")
    return meta


def _check_range(name: str, array: np.ndarray, limit: int) -> None:
    if array.size and not 0 <= array.min() <= array.max() < limit:
        raise ValueError(f"`{name}` has values from {array.min()} to {array.max()}, expected 0 to {limit - 1}")
