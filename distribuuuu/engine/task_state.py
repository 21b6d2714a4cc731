"""State of a task in checkpoints, and a search for attributes of a task that change but are not part of it."""

import contextlib
import copy
import hashlib
import logging
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from distribuuuu.checkpoint.io import CheckpointError
from distribuuuu.checkpoint.restore import WEIGHTS_ONLY
from distribuuuu.config import ConfigError, Problem
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.distributed import comm as dist
from distribuuuu.tasks.base import Task

logger = logging.getLogger(__name__)

# What a checkpoint can hold, and read back: containers, and values that have no tensors in them.
_CONTAINERS: tuple[type, ...] = (dict, OrderedDict, list, tuple)
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None))
# How to save other types.
_FIXES = {
    np.ndarray: "save torch.from_numpy(array), and restore state[name].numpy()",
    deque: "save list(values), and restore deque(state[name])",
    set: "save sorted(values), and restore set(state[name])",
}
# Kinds of values, which a checkpoint and a task must agree on.
_KINDS: dict[str, Any] = {"tensor": torch.Tensor, "dict": Mapping, "list": (list, tuple), "text": str,
                          "number": (int, float, complex, np.generic)}  # fmt: skip
# Random generators, and the functions that return their state.
_GENERATORS: dict[type, Callable[[Any], Any]] = {
    torch.Generator: torch.Generator.get_state,
    np.random.Generator: lambda generator: generator.bit_generator.state,
    np.random.RandomState: np.random.RandomState.get_state,
    random.Random: random.Random.getstate,
}
# Attributes of a task that belong to the run, and are saved or built by it.
_OF_THE_RUN = ("cfg", "state", "device", "train_metrics", "eval_metrics", "mix")
# Attributes of every module.
_OF_MODULES = set(vars(nn.Module()))
# Objects whose attributes are not followed in the search for changes, and the depth up to which others are.
_LEAVES = (torch.Tensor, np.ndarray, ImageDataset, logging.Logger, type, types.ModuleType, types.FunctionType,
           types.MethodType, *_GENERATORS)  # fmt: skip
_MAX_DEPTH = 6


def gather_state(task: Task | None) -> dict[str, Any]:
    """Return the state of a task for a checkpoint; complete on the main process only. Every process must call it.

    Returns:
        `shared`: the entries that are equal on all processes; `by_rank`: the others, for each process.

    Raises:
        ConfigError: a checkpoint cannot hold an entry; on every process.
    """
    own = task.state_dict() if task else {}
    problem = next(_find_unsavable(own), "")
    digests = {} if problem or not dist.is_distributed() else {name: digest(value) for name, value in own.items()}
    gathered = dist.gather_objects((problem, digests))
    if problem := next((text for text, _ in gathered if text), ""):
        raise ConfigError(Problem("TASK.NAME", f"{type(task).__name__}.state_dict: {problem}"))
    first = gathered[0][1]
    differs = {name for _, other in gathered for name in {**first, **other} if other.get(name) != first.get(name)}
    by_rank = dist.gather_objects({name: own[name] for name in own if name in differs}) if differs else []
    return {"shared": {name: own[name] for name in own if name not in differs}, "by_rank": by_rank}


def _find_unsavable(value: Any, name: str = "") -> Iterator[str]:
    """Yield a message for each entry of a state that a checkpoint cannot hold, or not read back."""
    if isinstance(value, Mapping) and type(value) in _CONTAINERS:
        for key, part in value.items():
            if type(key) not in (*_PLAIN, tuple):
                yield f"{name or 'its result'} has the key {key!r:.40}; expected texts and numbers as keys"
            yield from _find_unsavable(part, f"{name}.{key}" if name else str(key))
    elif type(value) in _CONTAINERS:
        for number, part in enumerate(value):
            yield from _find_unsavable(part, f"{name}[{number}]")
    elif isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        return
    elif type(value) not in _PLAIN and not (isinstance(value, np.generic) and value.dtype.kind in "biuf"):
        fix = next((text for kind, text in _FIXES.items() if isinstance(value, kind)), "save what it consists of")
        yield (f"{name or 'its result'} is a {type(value).__name__}, which a checkpoint cannot hold; expected dense"
               f" tensors, numbers, texts, and dicts, lists and tuples of them; fix: {fix}")  # fmt: skip


def restore_state(task: Task, saved: Mapping[str, Any] | None, path: Any, in_training: bool = True) -> None:
    """Restore the state of a task; log a warning if a part of it is missing.

    Args:
        task: the task.
        saved: the entry `task` of a checkpoint, if it has one.
        path: the checkpoint.
        in_training: False: the task only evaluates, and what it builds in `prepare_training` is left out.

    Raises:
        CheckpointError: the names, types or shapes differ from those of the task, or the task does not restore them.
    """
    try:
        own = task.state_dict()
    except AttributeError:  # of what `prepare_training` builds
        if in_training:
            raise
        return
    if not own and not (saved and in_training):
        return
    if saved is None:  # of an older version, of the 2021 distribuuuu, or weights alone
        logger.warning("%s has no state of the task; it starts anew: %s", path, ", ".join(own))
        return
    state = _state_of_process(saved, path)
    if not in_training:
        state = {name: value for name, value in state.items() if name in own}
    if found := next(find_mismatches(own, state), None):
        raise CheckpointError(f"{path}: the state of the task differs: {found}; fix: undo the change of the task,"
                              f" or {WEIGHTS_ONLY}")  # fmt: skip
    expected = {name: digest(value) for name, value in state.items()}  # a task may change what it gets
    task.load_state_dict(state)
    restored = {name: digest(value) for name, value in task.state_dict().items()}
    if lost := [name for name, value in expected.items() if restored.get(name) != value]:
        raise CheckpointError(f"{path}: {type(task).__name__}.load_state_dict does not restore {', '.join(lost)}, which"
                              " its state_dict has saved; fix: restore each entry in load_state_dict")  # fmt: skip


def _state_of_process(saved: Mapping[str, Any], path: Any) -> dict[str, Any]:
    """Return the state that `gather_state` saved for this process; of another number of processes, the first one's."""
    by_rank = saved.get("by_rank", []) if isinstance(saved, Mapping) else None
    if not isinstance(by_rank, list) or {type(part) for part in [saved.get("shared"), *by_rank]} != {dict}:
        raise CheckpointError(f"{path}: the entry task is damaged; expected dicts; fix: {WEIGHTS_ONLY}")
    if len(by_rank) == dist.world_size():
        return saved["shared"] | by_rank[dist.rank()]
    if by_rank:
        logger.warning("%s was written by %d processes; all continue with the state of the first one: %s", path,
                       len(by_rank), ", ".join(by_rank[0]))  # fmt: skip
    return saved["shared"] | (by_rank[0] if by_rank else {})


def find_mismatches(own: Any, saved: Any, name: str = "") -> Iterator[str]:
    """Yield the differences of two states in names, kinds of values, and types and shapes of tensors.

    A list, or an entry that is None or an empty dict, may grow in training: only what both have is compared.
    """
    if own is None or saved is None or (name and isinstance(own, Mapping) and not own):
        return
    kind = _kind_of(own)
    if kind != _kind_of(saved):
        yield f"{name} is a {_kind_of(saved)}; expected a {kind}"
    elif kind == "tensor":
        if own.shape != saved.shape:
            yield f"{name} has shape {tuple(saved.shape)}; expected {tuple(own.shape)}"
        elif own.dtype != saved.dtype:
            yield f"{name} has type {saved.dtype}; expected {own.dtype}"
    elif kind == "dict":
        for key in [*own, *(key for key in saved if key not in own)]:
            place = f"{name}.{key}" if name else str(key)
            if key not in saved or key not in own:
                yield f"{place} is {'missing' if key in own else 'unknown'}"
            else:
                yield from find_mismatches(own[key], saved[key], place)
    elif kind == "list":
        if isinstance(own, tuple) and isinstance(saved, tuple) and len(own) != len(saved):
            yield f"{name} has {len(saved)} values; expected {len(own)}"
        for number, (mine, theirs) in enumerate(zip(own, saved, strict=False)):
            yield from find_mismatches(mine, theirs, f"{name}[{number}]")


def _kind_of(value: Any) -> str:
    """Return the kind of a value in a state; values of one kind may replace each other."""
    return next((name for name, types in _KINDS.items() if isinstance(value, types)), type(value).__name__)


def is_built_in(task: Task) -> bool:
    """Tell whether a task and its loss are of this package, and save all that they change."""
    modules = {type(task).__module__, type(getattr(task, "criterion", None)).__module__}
    return modules <= {f"distribuuuu.tasks.{name}" for name in ("classification", "distillation", "losses")}


class ChangeFinder:
    """Find the attributes of a task that change in training, but are not in its state; built before `begin_epoch`."""

    def __init__(self, task: Task):
        self._task, self._num_looks = task, 0
        self._before = _list_values(task)

    def begin_epoch(self, epoch: int) -> str | None:
        """Call the task's `begin_epoch`. What it sets to a function of the epoch, e.g. a margin, need not be saved.

        To find such attributes, it is called once more for a copy of the task, in which a counter changes again.
        """
        stage = self._task.begin_epoch(epoch)
        if not dist.all_reduce_max([bool(self.find())])[0]:  # it may communicate
            return stage
        with contextlib.suppress(Exception):  # an attribute that cannot be copied: then all are named
            again = copy.deepcopy(self._task, _objects_of_the_run(self._task))
            expected = _list_values(again)
            again.begin_epoch(epoch)
            now = _list_values(again)
            self._before |= {name: value for name, value in expected.items() if now.get(name) == value}
        return stage

    def look(self, is_evaluated: bool) -> None:
        """Log a warning that names the attributes, if there are any.

        The first call shows what the first steps change, the first one with `is_evaluated` what an evaluation changes.
        """
        if self._num_looks > 1:
            return
        found = self.find() if self._num_looks == 0 or is_evaluated else []
        self._before, self._num_looks = _list_values(self._task), 2 if is_evaluated else 1
        if found:
            logger.warning(
                "TASK.NAME: %s changes in training, but is not in the state of %s: a resumed run differs;"
                " fix: return it from state_dict and restore it in load_state_dict, or name it in `transient`",
                ", ".join(found), type(self._task).__name__,
            )  # fmt: skip

    def find(self) -> list[str]:
        """Return the names of the attributes that have changed, e.g. ["count", "queue.rows"]."""
        before, now, saved = self._before, _list_values(self._task), dict(_list_entries(self._task.state_dict()))
        # Under another name; a number may be equal to another one by chance, but hardly before and after.
        pairs = {(before.get(_SAVED + name), now[_SAVED + name]) for name in saved}
        return [name for name, value in now.items()
                if before.get(name) != value and (before.get(name), value) not in pairs
                and not name.startswith(_SAVED) and not _is_named(name, [*saved, *self._task.transient])]  # fmt: skip


# The names of the entries of a state begin with this among the values of a task.
_SAVED = "state_dict: "


def _is_named(name: str, names: Sequence[str]) -> bool:
    """Tell whether one of the names is that of the attribute, of a part of it, or of the object that it belongs to."""
    return any(f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") for other in names)


def _list_values(task: Task) -> dict[str, str]:
    """Return the digest of each attribute of a task and of each entry of its state by name.

    Those of modules and other objects, also within dicts and lists, are listed one by one.
    """
    values = {_SAVED + name: digest(value) for name, value in _list_entries(task.state_dict())}
    for name, value in vars(task).items():
        if name not in _OF_THE_RUN:
            values |= _list_parts(value, name, {id(task), *_objects_of_the_run(task)}, 0)
    return values


def _list_entries(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each entry of a state, and of the entries of dicts in it."""
    for key, value in state.items():
        yield f"{prefix}{key}", value
        yield from _list_entries(value, f"{prefix}{key}.") if isinstance(value, Mapping) else ()


def _objects_of_the_run(task: Task) -> dict[int, Any]:
    """Return the objects that the run saves or builds, with the trained model and its parts, by their `id`."""
    found = [value for name, value in vars(task).items() if name in _OF_THE_RUN]
    for model in task.state.models.values() if task.state else ():
        found += [*model.modules(), *model.parameters()]
    return {id(value): value for value in found}


def _list_parts(value: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[str, str]]:
    parts = _parts_of(value)
    if parts is None and id(value) not in seen:
        yield name, digest(value)
    elif parts and id(value) not in seen and depth < _MAX_DEPTH:
        seen.add(id(value))
        for key, part in parts.items():
            yield from _list_parts(part, f"{name}.{key}", seen, depth + 1)


def _parts_of(value: Any) -> dict[Any, Any] | None:
    """Return what an object or a container of objects consists of; None for a value with a digest of its own."""
    parts: dict[Any, Any]
    if isinstance(value, nn.Module):
        own = ((place, key, part) for place, module in value.named_modules() for key, part in vars(module).items()
               if key not in _OF_MODULES)  # fmt: skip
        parts = {f"{place}.{key}".lstrip("."): part for place, key, part in own}
        return parts | dict(value.named_parameters()) | dict(value.named_buffers())
    if isinstance(value, (Mapping, list, tuple, deque)):
        parts = dict(value) if isinstance(value, Mapping) else dict(enumerate(value))
        objects = (part for part in parts.values() if type(part) not in _PLAIN)
        return parts if any(isinstance(part, nn.Parameter) or _parts_of(part) is not None for part in objects) else None
    return vars(value) if hasattr(value, "__dict__") and not isinstance(value, _LEAVES) else None


def digest(value: Any) -> str:
    """Return a text that is equal for equal values: tensors, arrays, generators, numbers, texts, containers of them.

    Of other objects, it is the name of their class.
    """
    for kind, state_of in _GENERATORS.items():
        if isinstance(value, kind):
            return digest(state_of(value))
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        content = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode() + content).hexdigest()
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, np.ndarray):
        return digest(torch.from_numpy(value)) if value.dtype.kind in "biuf" else digest(value.tolist())
    if isinstance(value, Mapping):
        return _hash(f"{digest(key)}: {digest(part)}" for key, part in value.items())
    if isinstance(value, (set, frozenset)):
        return _hash(sorted(map(digest, value)))
    if isinstance(value, (list, tuple, deque)):
        return _hash(map(digest, value))
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


def _hash(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
