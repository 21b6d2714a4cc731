"""Files of weights and checkpoints: written whole or not at all, verified before they are believed.

The zip that torch writes has a CRC-32 of every entry: a damaged one is refused. torch's format from before 1.6 and
safetensors have no checksums: damage to their structure is refused, changed values of tensors are not noticed.
Only plain data is unpickled. A tensor or an entry that claims more bytes than its file has is refused.
"""

import io
import os
import pickle
import re
import stat
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distribuuuu.config import ConfigError
from distribuuuu.config.atomic_file import replacing, sync_folder

# Containers and values that a file may hold. More come of containers that hold each other many times over.
_MAX_VALUES = 1_000_000
_FOLDER_ATTRIBUTE = 0x10  # of MS-DOS


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used; names the file and the reason."""


def find_class_mismatch(content: dict[str, Any], classes: Sequence[str]) -> str | None:
    """Return which of as many classes the weights in a file were trained on in the place of one of these.

    None: the same, or another number of them, or the file does not name them (others may keep their number there).
    """
    theirs = content.get("classes")
    if not is_list_of(theirs, str) or len(theirs) != len(classes):
        return None
    different = (pair for pair in zip(theirs, classes, strict=True) if pair[0] != pair[1])
    return next((f"{other!r} where the data has {own!r}" for other, own in different), None)


def write_atomically(path: Path, content: dict[str, Any], is_abandoned: Callable[[], bool] = lambda: False) -> bool:
    """Write a file that is whole under its name or not there: temporary file, fsync, rename, fsync of the folder.

    Args:
        path: the file.
        content: what `torch.save` takes.
        is_abandoned: asked during the write; once it is true nothing is written, and False returned.

    Raises:
        OSError: the disk refuses it.
    """
    try:
        with replacing(path, "wb", buffering=0) as file:
            sink = _Sink(file, is_abandoned)
            try:
                torch.save(content, sink)
            except RuntimeError as error:
                raise sink.error or error from None
    except _Abandoned:
        return False
    sync_folder(path.parent)
    return True


class _Abandoned(OSError):
    """The file that is being written is not wanted any more."""


class _Sink:
    """A file that remembers what the disk said; torch covers it with an error of its own."""

    def __init__(self, file: io.RawIOBase, is_abandoned: Callable[[], bool]):
        self._file = file
        self._is_abandoned = is_abandoned
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write all of the data."""
        left = memoryview(data)
        try:
            while left:
                if self._is_abandoned():
                    raise _Abandoned
                left = left[self._file.write(left) :]
        except OSError as error:
            self.error = error
            raise
        return len(data)

    def flush(self) -> None:
        """Do nothing: nothing is held back."""


def read_checkpoint(path: str | os.PathLike) -> dict[str, Any]:
    """Return the content of a checkpoint, ours or the original's, or of a file of bare weights, on the CPU.

    A bare state dict, or one under `model`, `model_state` or `model_state_dict`, comes back under `state_dict`.

    Raises:
        CheckpointError: it cannot be read, its checksums do not match, or it holds something else.
    """
    try:
        content = _read_verified(Path(path))
        state_dict = _find_state_dict(content)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except Exception as error:  # torch's reader raises nearly anything when bytes are wrong
        # torch puts advice to unpickle anything before what was wrong.
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip() or type(error).__name__
        raise CheckpointError(f"{path}: not a sound checkpoint: {reason.splitlines()[0][:200]}") from error
    if state_dict is None:
        raise CheckpointError(f"{path}: holds no state dict of a model, but {_describe(content)}")
    whole = content if "state_dict" in content else {}
    return {**whole, "state_dict": {key.removeprefix("module."): value for key, value in state_dict.items()}}


def is_state_dict(value: Any) -> bool:
    """Tell whether a value is tensors by name."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items()
    )


def is_list_of(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Tell whether a value is a list or a tuple with items of one type."""
    return isinstance(value, (list, tuple)) and all(isinstance(item, kind) for item in value)


def _read_verified(path: Path) -> Any:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    with open(path, "rb") as file:
        is_zip = file.read(4) == b"PK\3\4"  # as torch decides
    if is_zip:
        _verify_zip(path, status.st_size)
    with torch.serialization.safe_globals(_NUMPY_GLOBALS):
        content = torch.load(path, map_location="cpu", weights_only=True)
    _verify_content(content, status.st_size)
    return content


def _verify_zip(path: Path, size: int) -> None:
    """Raise BadZipFile unless all entries are as torch writes them, uncompressed, and match their checksums."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise zipfile.BadZipFile(f"{entry.filename} is compressed, which torch does not write")
            if entry.external_attr & _FOLDER_ATTRIBUTE:  # torch would take its tensor for read and leave it undefined
                raise zipfile.BadZipFile(f"{entry.filename} is marked as a folder")
        if len({entry.filename for entry in entries}) < len(entries):
            raise zipfile.BadZipFile("several entries have the same name")
        if sum(entry.file_size for entry in entries) > size:
            raise zipfile.BadZipFile("its entries have more bytes than the file")
        damaged = archive.testzip()
    if damaged:
        raise zipfile.BadZipFile(f"checksum of {damaged} does not match")


def _verify_content(content: Any, size: int) -> None:
    """Raise ValueError for a tensor that is no plain one or has more bytes than the file, and for endless nesting."""
    waiting, num_values = [content], 0
    while waiting:
        value = waiting.pop()
        num_values += 1
        if num_values > _MAX_VALUES:
            raise ValueError(f"more than {_MAX_VALUES} values, or containers that hold themselves")
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, torch.Tensor) and (problem := _find_tensor_problem(value, size)):
            raise ValueError(f"a tensor {problem}")


def _find_tensor_problem(tensor: torch.Tensor, size: int) -> str | None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type != "cpu":
        return "is not a plain one on the CPU"
    if min((*tensor.shape, *tensor.stride()), default=0) < 0:
        return f"has the shape {tuple(tensor.shape)} and the strides {tensor.stride()}"
    if max(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) > size:
        return f"of the shape {tuple(tensor.shape)} needs more bytes than the file has"
    return None


class _NumpyType:
    """Stand-in for `numpy.dtype`, whose own reader trusts what it reads."""

    def __init__(self, name: str, *_: Any):
        if not re.fullmatch("[fiu][1248]|b1", name):
            raise pickle.UnpicklingError(f"a numpy scalar of type {name[:20]!r}")
        self.name, self.byte_order = name, "="

    def __setstate__(self, state: tuple) -> None:
        self.byte_order = {"<": "<", ">": ">"}.get(state[1], "=")


def _read_numpy_scalar(kind: _NumpyType, data: bytes) -> bool | int | float:
    """Return a pickled numpy scalar as a Python number (old checkpoints hold a learning rate of type float64)."""
    (number,) = np.frombuffer(data, kind.byte_order + kind.name)
    return number.item()


_NUMPY_GLOBALS = [
    (_NumpyType, "numpy.dtype"),
    (_read_numpy_scalar, "numpy.core.multiarray.scalar"),
    (_read_numpy_scalar, "numpy._core.multiarray.scalar"),
]


def _find_state_dict(content: Any) -> dict[str, torch.Tensor] | None:
    if not isinstance(content, dict):
        return None
    for key in ("state_dict", "model", "model_state", "model_state_dict"):
        if isinstance(content.get(key), dict):
            return _find_state_dict(content[key])
    return content if content and is_state_dict(content) else None


def _describe(content: Any) -> str:
    keys = f" with the keys {', '.join(map(str, list(content)[:5]))}" if isinstance(content, dict) else ""
    return f"a {type(content).__name__}{keys}"
