"""Files of other programs: names of tensors with what wrappers add, and objects beside the tensors.

Of the objects, numpy scalars become numbers, and others are left out: nothing of them is executed. Imported for a state
dict whose names are not the model's, and for files that torch does not read as plain data.
"""

import logging
import pickle
import re
from collections import Counter
from collections.abc import Callable, Collection, Container
from pathlib import Path
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]

# What wrappers add to the names of tensors: DDP, Lightning and others, detectors at the front; torch.compile, FSDP and
# activation checkpointing anywhere.
_IN_FRONT = ("module", "model", "backbone")
_ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def rename_tensors(tensors: Tensors, known: Collection[str]) -> Tensors:
    """Return tensors under the known names that equal theirs up to what wrappers add; the others without prefixes.

    A prefix is one that common wrappers add, or any that more than half of the known names have.
    """
    plain = {".".join(part for part in name.split(".") if part not in _ANYWHERE): name for name in tensors}
    by_core = {_core(name): name for name in known}
    matches = {name: _split(name, by_core) for name in plain}
    counts = Counter(prefix for prefix, suffix in matches.values() if suffix)
    common = next((prefix for prefix, count in counts.most_common(1) if 2 * count > len(known)), "")
    renamed = {name: tensors[given] for name, given in plain.items() if name in known}
    for name, given in plain.items():
        prefix, suffix = matches[name]
        if name in known:
            continue
        is_wrapper = prefix == common or all(part in _IN_FRONT for part in prefix.split(".")[:-1])
        target = by_core[suffix] if suffix and is_wrapper else _core(name.removeprefix(common))
        renamed[name if target in renamed else target] = tensors[given]
    return renamed


def _core(name: str) -> str:
    """Return a name without the prefixes of common wrappers."""
    while name.partition(".")[0] in _IN_FRONT and "." in name:
        name = name.partition(".")[2]
    return name


def _split(name: str, known: Container[str]) -> tuple[str, str]:
    """Return a name as a prefix and its longest known suffix; ("", "") if there is none."""
    parts = name.split(".")
    suffixes = ((".".join(parts[:start]), ".".join(parts[start:])) for start in range(len(parts)))
    return next(((f"{front}." if front else "", suffix) for front, suffix in suffixes if suffix in known), ("", ""))


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
