"""State of a task in checkpoints, and a search for attributes of a task that change but are not part of it."""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from distribuuuu.checkpoint.io import CheckpointError
from distribuuuu.checkpoint.load import WEIGHTS_ONLY
from distribuuuu.distributed import comm as dist
from distribuuuu.tasks.base import Task

logger = logging.getLogger(__name__)

# Attributes of a task that belong to the run, and are saved or built by it.
_OF_THE_RUN = ("cfg", "state", "device", "train_metrics", "eval_metrics", "mix")
# Attributes of every module.
_OF_MODULES = set(vars(nn.Module()))
# Containers within containers that are followed in the search for changes.
_MAX_DEPTH = 6


def gather_state(task: Task | None) -> dict[str, Any]:
    """Return the state of a task for a checkpoint; complete on the main process only. Every process must call it.

    Returns:
        `shared`: the entries that are equal on all processes; `by_rank`: the others, for each process.
    """
    own = task.state_dict() if task else {}
    if not dist.is_distributed():
        return {"shared": own, "by_rank": []}
    digests = [dict(parts) for parts in dist.gather_objects([(name, digest(value)) for name, value in own.items()])]
    differs = {name for of_rank in digests for name in own if of_rank.get(name) != digests[0].get(name)}
    differs = set(dist.broadcast_object(sorted(differs)))
    by_rank = dist.gather_objects({name: own[name] for name in own if name in differs}) if differs else []
    return {"shared": {name: own[name] for name in own if name not in differs}, "by_rank": by_rank}


def restore_state(task: Task | None, saved: Mapping[str, Any] | None, path: Any) -> str | None:
    """Restore the state of a task; return a warning if a part of it is missing.

    Raises:
        CheckpointError: the names, types or shapes differ from those of the task.
    """
    own = task.state_dict() if task else {}
    if not task or not own and not saved:
        return None
    if saved is None:  # of an older version, or of the 2021 distribuuuu
        return f"{path} has no state of the task; it starts anew: {', '.join(own)}"
    if not isinstance(saved, Mapping) or {type(part) for part in _parts_of(saved)} != {dict}:
        raise CheckpointError(f"{path}: the entry task is damaged; expected dicts; fix: {WEIGHTS_ONLY}")
    by_rank, problem = saved.get("by_rank") or [], None
    state = dict(saved["shared"])
    if len(by_rank) == dist.world_size():
        state |= by_rank[dist.rank()]
    elif by_rank:
        state |= by_rank[0]
        problem = f"{path} was written by {len(by_rank)} processes; all continue with the state of the first one"
        problem = f"{problem}: {', '.join(by_rank[0])}"
    if found := next(find_mismatches(own, state), None):
        raise CheckpointError(f"{path}: the state of the task differs: {found}; fix: undo the change of the task,"
                              f" or {WEIGHTS_ONLY}")  # fmt: skip
    task.load_state_dict(state)
    return problem


def _parts_of(saved: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a saved state: what the processes share, then those of each; None for a wrong container."""
    by_rank = saved.get("by_rank", [])
    return [saved.get("shared"), *(by_rank if isinstance(by_rank, list) else [None])]


def find_mismatches(own: Any, saved: Any, name: str = "") -> Iterator[str]:
    """Yield the differences of two states in names, types and shapes. Numbers and texts have no shape."""
    if isinstance(own, torch.Tensor) and isinstance(saved, torch.Tensor):
        if own.shape != saved.shape:
            yield f"{name} has shape {tuple(saved.shape)}; expected {tuple(own.shape)}"
    elif isinstance(own, Mapping) and isinstance(saved, Mapping):
        for key in [*own, *(key for key in saved if key not in own)]:
            place = f"{name}.{key}" if name else str(key)
            if key not in saved or key not in own:
                yield f"{place} is {'missing' if key in own else 'unknown'}"
            else:
                yield from find_mismatches(own[key], saved[key], place)
    elif isinstance(own, torch.Tensor) or isinstance(saved, torch.Tensor):
        yield f"{name} is {type(saved).__name__}; expected {type(own).__name__}"


def is_built_in(task: Task) -> bool:
    """Tell whether a task is one of this package, which saves all that it changes."""
    return type(task).__module__ in ("distribuuuu.tasks.classification", "distribuuuu.tasks.distillation")


class ChangeFinder:
    """Find the attributes of a task that change in training steps, but are not in its state.

    Args:
        task: the task before the steps.
    """

    def __init__(self, task: Task):
        self._task, self._before, self._has_warned = task, dict(_list_values(task)), False

    def warn_once(self) -> None:
        """Log a warning that names the attributes, if there are any; only in the first call."""
        self._has_warned, is_first = True, not self._has_warned
        if is_first and (found := self.find()):
            logger.warning(
                "TASK.NAME: %s changes in training, but is not in the state of %s: a resumed run differs;"
                " fix: return it from state_dict and restore it in load_state_dict, or name it in `transient`",
                ", ".join(found), type(self._task).__name__,
            )  # fmt: skip

    def find(self) -> list[str]:
        """Return the names of the attributes, e.g. ["count", "queue.rows"]."""
        task, state = self._task, self._task.state_dict()
        names, saved = _names_of(state), {digest(value) for value in _leaves_of(state)}
        changed = (name for name, value in _list_values(task) if self._before.get(name) != value and value not in saved)
        return [name for name in changed if not _is_named(name, names) and not _is_named(name, task.transient)]


def _is_named(name: str, names: Sequence[str]) -> bool:
    """Tell whether one of the names is that of the attribute, of a part of it, or of the object that it belongs to."""
    return any(f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") for other in names)


def _list_values(task: Task) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each attribute of a task; those of modules and other objects one by one."""
    for name, value in vars(task).items():
        if name not in _OF_THE_RUN:
            yield from _list_parts(value, name, {id(task)}, 0)


def _list_parts(value: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, nn.Module):
        tensors = [*value.named_parameters(), *value.named_buffers()]
        yield from ((f"{name}.{part}", digest(tensor)) for part, tensor in tensors)
        parts = {
            f"{place}.{key}".lstrip("."): part
            for place, module in value.named_modules()
            for key, part in vars(module).items()
            if key not in _OF_MODULES
        }
    elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.Tensor)) and not callable(value):
        parts = vars(value)
    else:
        yield name, digest(value)
        return
    if id(value) in seen or depth == _MAX_DEPTH:
        return
    seen.add(id(value))
    for key, part in parts.items():
        yield from _list_parts(part, f"{name}.{key}", seen, depth + 1)


def digest(value: Any) -> str:
    """Return a text that is equal for equal values: tensors, arrays, containers of them, or anything with a repr."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        content = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode() + content).hexdigest()
    if isinstance(value, torch.Generator):
        return digest(value.get_state())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return digest(torch.from_numpy(value)) if value.dtype.kind in "biuf" else repr(value.tolist())
    if isinstance(value, Mapping):
        return repr([(key, digest(part)) for key, part in value.items()])
    if isinstance(value, (list, tuple, set)) or type(value).__name__ == "deque":
        return repr([digest(part) for part in value])
    is_plain = isinstance(value, (int, float, complex, str, bytes, type(None)))
    return repr(value) if is_plain else type(value).__name__


def _names_of(state: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the names of the entries of a state, those of nested ones joined by points."""
    names = []
    for key, value in state.items():
        names += _names_of(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else [f"{prefix}{key}"]
    return names


def _leaves_of(value: Any) -> Iterator[Any]:
    """Yield the tensors and containers of a state; numbers may be equal by chance."""
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _leaves_of(part)
    elif isinstance(value, (torch.Tensor, np.ndarray, list, tuple)):
        yield value
