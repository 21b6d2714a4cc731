"""Objects beside the tensors in files of other programs: numpy scalars become numbers, others are left out.

Nothing of them is executed. Imported for files that torch does not read as plain data.
"""

import logging
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


def load_without_objects(path: Path, is_zip: bool) -> Any:
    """Return the content of a file on the CPU, as `torch.load`, which raises the errors."""
    stubs = _stub_unknown_classes(path) if is_zip else ()
    with torch.serialization.safe_globals([*_NUMPY_GLOBALS, *stubs]):
        return torch.load(path, map_location="cpu", weights_only=True)


class _NumpyType:
    """Safe replacement of `numpy.dtype`, whose own unpickling does not validate its input."""

    def __init__(self, name: str, *_: Any):
        if not re.fullmatch("[fiu][1248]|b1", name):
            raise pickle.UnpicklingError(f"a numpy scalar of type {name[:20]!r}")
        self.name, self.byte_order = name, "="

    def __setstate__(self, state: tuple) -> None:
        self.byte_order = {"<": "<", ">": ">"}.get(state[1], "=")


def _read_numpy_scalar(kind: _NumpyType, data: bytes) -> bool | int | float:
    """Return a pickled numpy scalar as a Python number (checkpoints of 2021 hold a learning rate of this type)."""
    (number,) = np.frombuffer(data, kind.byte_order + kind.name)
    return number.item()


_NUMPY_GLOBALS: list[Callable | tuple[Callable, str]] = [
    (_NumpyType, "numpy.dtype"),
    (_read_numpy_scalar, "numpy.core.multiarray.scalar"),
    (_read_numpy_scalar, "numpy._core.multiarray.scalar"),
]


class _Left:
    """Stands for an object of an unknown class, of which nothing is kept."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Left":
        """Ignore the arguments of the constructor."""
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Ignore the state."""


def _stub_unknown_classes(path: Path) -> list[tuple[Callable, str]]:
    """Return a harmless replacement of each class in a file that torch does not unpickle, with the class's name."""
    known = {name for _, name in _NUMPY_GLOBALS}  # type: ignore[misc]
    names = [name for name in torch.serialization.get_unsafe_globals_in_checkpoint(path) if name not in known]
    if names:
        logger.warning("%s: objects other than tensors are left out: %s", path, ", ".join(sorted(names)[:5]))
    # torch fills plain containers only.
    containers: dict[str, Callable] = {
        "collections.deque": lambda *arguments: [],
        "collections.defaultdict": lambda *arguments: {},
    }
    return [(containers.get(name, _Left), name) for name in names]
