"""Files of weights and checkpoints: written whole or not at all, verified before they are believed.

The zip that torch writes carries a CRC-32 of every tensor; it is checked before a file is used. Nothing but plain data
is ever unpickled.
"""

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distribuuuu.atomic_file import replacing
from distribuuuu.config import ConfigError


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used; names the file and the reason."""


def find_other_class(content: dict[str, Any], classes: Sequence[str]) -> str | None:
    """Return which of as many classes the weights in a file were trained on in the place of one of these.

    None: the same, or another number of them, or the file does not name them (others may keep their number there).
    """
    theirs = content.get("classes")
    if not isinstance(theirs, (list, tuple)) or len(theirs) != len(classes):
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
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
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
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{path}: not a sound checkpoint: {reason[:200]}") from error
    state_dict = _find_state_dict(content)
    if state_dict is None:
        raise CheckpointError(f"{path}: holds no state dict of a model, but {_describe(content)}")
    whole = content if isinstance(content, dict) and "state_dict" in content else {}
    return {**_plain(whole), "state_dict": {key.removeprefix("module."): value for key, value in state_dict.items()}}


def _read_verified(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(error) from error
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged:
            raise zipfile.BadZipFile(f"checksum of {damaged} does not match")
    with torch.serialization.safe_globals(list(_numpy_scalars())):
        return torch.load(path, map_location="cpu", weights_only=True)


def _numpy_scalars() -> Iterator[Any]:
    """Yield the types that pickled numpy scalars need (old checkpoints hold a learning rate of type float64)."""
    scalar = np.float64(0).__reduce__()[0]
    yield from (np.dtype, *{type(np.dtype(kind)) for kind in "dfilqILQ?"})
    yield from ((scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core"))


def _plain(value: Any) -> Any:
    """Return the value with numpy scalars as Python numbers."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value.item() if isinstance(value, np.generic) else value


def _find_state_dict(content: Any) -> dict[str, torch.Tensor] | None:
    if not isinstance(content, dict):
        return None
    for key in ("state_dict", "model", "model_state", "model_state_dict"):
        if isinstance(content.get(key), dict):
            return _find_state_dict(content[key])
    is_bare = content and all(isinstance(value, torch.Tensor) for value in content.values())
    return content if is_bare else None


def _describe(content: Any) -> str:
    keys = f" with the keys {', '.join(map(str, list(content)[:5]))}" if isinstance(content, dict) else ""
    return f"a {type(content).__name__}{keys}"
