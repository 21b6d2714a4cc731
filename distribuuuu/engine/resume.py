"""Resuming: capture the state of a run for a checkpoint, restore it, or begin a new run."""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distribuuuu.checkpoint.io import CheckpointError, find_class_mismatch, read_checkpoint
from distribuuuu.checkpoint.restore import WEIGHTS_ONLY, check_resumable, load_state_dict
from distribuuuu.checkpoint.snapshot import NonFiniteError
from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.errors import counted
from distribuuuu.config.options import OPEN_SECTIONS, option_of
from distribuuuu.distributed import comm as dist
from distribuuuu.engine.out_of_memory import explain_out_of_memory, is_out_of_memory
from distribuuuu.engine.run import Run, is_finished
from distribuuuu.engine.state import TrainState
from distribuuuu.launch.detect import list_jobs
from distribuuuu.tasks.base import Task
from distribuuuu.tasks.metrics import check_finite

logger = logging.getLogger(__name__)

# Values without tensors that a checkpoint can hold.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NEW_RUN = "set another OUT_DIR, or TRAIN.AUTO_RESUME False to start a new run in this one"


def capture(run: Run) -> dict[str, Any]:
    """Return the content of a checkpoint, see state.py; complete on the main process only. Every process must call it.

    Raises:
        NonFiniteLoss: the loss of a step since the last row of metrics is infinite or NaN.
    """
    content = run.state.to_dict()
    check_finite({"loss": sum(float(state["sums"][1]) for state in content["meter"])})
    content["task"] = capture_task(run.task)
    return {**content, "jobs": list_jobs(), "finished": is_finished(run.cfg, run.state)}


def roll_back(run: Run, error: NonFiniteError) -> None:
    """Restore the newest checkpoint, whose values are all finite, and continue with other random numbers.

    Raises:
        NonFiniteError: TRAIN.ON_NAN or TRAIN.MAX_ROLLBACKS does not allow a rollback, or there is no checkpoint.
    """
    cfg, state = run.cfg, run.state
    run.checkpoints.finish()
    latest, num = run.checkpoints.find_latest(), state.num_rollbacks + 1
    position = f"in epoch {state.epoch + 1}, by step {state.step}"
    if latest is None:
        remedy = "set CHECKPOINT.EVERY_STEPS, to have checkpoints within the epoch"
        raise error.located(f"{position}; there is no checkpoint", remedy) from None
    if cfg.TRAIN.ON_NAN == "stop" or num > cfg.TRAIN.MAX_ROLLBACKS:
        remedy = "set TRAIN.ON_NAN rollback" if cfg.TRAIN.ON_NAN == "stop" else "raise TRAIN.MAX_ROLLBACKS"
        raise error.located(f"{position}; the newest checkpoint, {latest}, is finite", remedy) from None
    logger.warning("%s in epoch %d, by step %d: rollback %d of %d, to %s", error, state.epoch + 1, state.step, num,
                   cfg.TRAIN.MAX_ROLLBACKS, latest)  # fmt: skip
    began = (state.epoch, state.step)
    restore(state, run.task, read_checkpoint(latest), latest)
    state.reset_row()
    state.num_rollbacks = num
    run.log.rewind(state.epoch, state.step, began)


@explain_out_of_memory("restoring a checkpoint", batch=None)
def begin(cfg: Config, state: TrainState, task: Task, latest: Path | None, prepare_task: Callable[[], None]) -> None:
    """Restore state and task from the newest checkpoint of OUT_DIR, else begin with MODEL.WEIGHTS, else anew.

    Args:
        cfg: the config.
        state: the state before the first step.
        task: the task.
        latest: the newest checkpoint.
        prepare_task: builds what the task needs from the weights; called between them and its state.

    Raises:
        CheckpointError: the file does not match the config; the message lists the options that differ.
    """
    path = latest or cfg.MODEL.WEIGHTS
    if not path:
        prepare_task()
        return
    content = read_checkpoint(path)
    if not latest and not (cfg.TRAIN.LOAD_OPT and "optimizer" in content):
        for model in state.models.values():
            load_state_dict(model, content["state_dict"], path)
        if mismatch := find_class_mismatch(content, state.classes):
            logger.warning("%s: was trained on other classes: %s", path, mismatch)
        logger.info("initial weights: %s", path)
        prepare_task()
        return
    before = content.get("config", {"MODEL.ARCH": content.get("arch", state.arch)})
    try:
        restore(state, task, content, path, prepare_task)
    except CheckpointError as error:
        if not latest:
            raise
        changed = ", ".join(list_changes(before, state.config, ("MODEL.", "FINETUNE.", "OPTIM.", "EMA.", "DATA.")))
        cause = f"; changed since the checkpoint: {changed}; fix: set them back, or" if changed else "; fix:"
        raise CheckpointError(f"{error}{cause} {_NEW_RUN}") from error
    if latest:
        logger.info("resumed from %s: epoch %d, step %d", path, state.epoch + 1, state.step)
        _describe_changes(state, content, before, latest)
    else:
        logger.info("resumed from %s: epoch %d; TRAIN.LOAD_OPT False loads its weights only", path, state.epoch + 1)


def restore(
    state: TrainState,
    task: Task,
    content: dict[str, Any],
    path: str | os.PathLike,
    prepare_task: Callable[[], None] = lambda: None,
) -> None:
    """Restore state and task from the content of a checkpoint; arguments as of `begin`.

    Raises:
        CheckpointError: it is incomplete or damaged, or does not match the model, the optimizer, the classes, the task.
    """
    check_resumable(content, path)
    if mismatch := find_class_mismatch(content, state.classes):
        raise CheckpointError(f"{path}: was trained on other classes: {mismatch}; {WEIGHTS_ONLY}")
    try:
        state.load_dict(content, path)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path}: not a valid checkpoint: {type(error).__name__}: {error!s:.200}") from error
    prepare_task()
    restore_task(task, content.get("task"), path)


def _describe_changes(state: TrainState, content: dict[str, Any], before: dict[str, Any], latest: Path) -> None:
    """Log what differs from the run that has written a checkpoint: options, plug-ins, data."""
    if changes := list_changes(before, state.config):
        logger.info("options changed since the checkpoint: %s", ", ".join(changes))
    hashes = content.get("plugins", {})
    if edited := [name for name, value in state.plugins.items() if hashes.get(name, value) != value]:
        logger.warning("PLUGINS: edited since the checkpoint: %s", ", ".join(edited))
    for split, saved in content.get("data", {}).items():
        if saved != (own := state.data.get(split, saved)):
            what = "training" if split == "train" else "evaluation"
            other = f"{counted(own['images'], 'image')}, {saved['images']:,} then"
            other = "with other names or labels" if own["images"] == saved["images"] else other
            logger.warning("the %s data has changed since the checkpoint: %s; the result is not that of one data set",
                           what, other)  # fmt: skip
    # A program that reads the results would take them for those of the options that it has passed.
    others = [change for change in changes if not option_of(change.split()[0]).neutral]
    if others and state.epoch >= state.config["OPTIM.MAX_EPOCH"] and dist.is_main():
        logger.warning("OUT_DIR: %s holds a run with other options, finished after %s; nothing is trained, and its "
                       "results remain; changed: %s; fix: %s",
                       latest.parent.parent, counted(state.epoch, "epoch"), ", ".join(others), _NEW_RUN)  # fmt: skip


def list_changes(before: dict[str, Any], now: dict[str, Any], sections: tuple[str, ...] = ("",)) -> list[str]:
    """Return the options that differ between two configs, e.g. ["OPTIM.BASE_LR 0.1 -> 0.2"].

    Options that exist in only one version are ignored, as is an empty DATA.MEAN or DATA.STD of an older one.
    """
    before = {key: value for key, value in before.items() if value or key not in ("DATA.MEAN", "DATA.STD")}
    keys = [key for key in dict.fromkeys((*before, *now)) if key.startswith(sections)]
    known = [key for key in keys if key.startswith(OPEN_SECTIONS) or (key in before and key in now)]
    pairs = {key: (before.get(key, "unset"), now.get(key, "unset")) for key in known}
    return [f"{key} {old} -> {new}" for key, (old, new) in pairs.items() if old != new]


# ------------------------------------------------------------------------------------------- state of the task


def capture_task(task: Task) -> dict[str, Any]:
    """Return the state of a task for a checkpoint, `shared` by the processes and `by_rank`. All must call it.

    Raises:
        ConfigError: a checkpoint cannot hold an entry; on every process.
    """
    shared, own = task.state_dict(), task.rank_state_dict()
    problem = next(_find_unsavable({**shared, **own}), "")
    gathered = dist.gather_objects((problem, {} if problem else own))
    if problem := next((text for text, _ in gathered if text), ""):
        raise ConfigError(Problem("TASK.NAME", f"{type(task).__name__}.state_dict: {problem}"))
    return {"shared": shared, "by_rank": [part for _, part in gathered] if own else []}


def _find_unsavable(value: Any, name: str = "") -> Iterator[str]:
    """Yield a message for each entry of a state that a checkpoint cannot hold, or not read back."""
    if type(value) in (dict, OrderedDict, list, tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            place = f"{name}.{key}" if name else str(key)
            yield from _find_unsavable(part, place if isinstance(value, dict) else f"{name}[{key}]")
    elif isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        return
    elif type(value) not in _PLAIN and not (isinstance(value, np.generic) and value.dtype.kind in "biuf"):
        fix = "save what it consists of, e.g. torch.from_numpy(array), list(deque), sorted(set)"
        yield (f"{name or 'its result'} is a {type(value).__name__}, which a checkpoint cannot hold; expected dense"
               f" tensors, numbers, texts, and dicts, lists and tuples of them; fix: {fix}")  # fmt: skip


def restore_task(task: Task, saved: Mapping[str, Any] | None, path: Any, in_training: bool = True) -> None:
    """Restore the state of a task; log a warning if a part of it is missing.

    Args:
        task: the task.
        saved: the entry `task` of a checkpoint, if it has one.
        path: the checkpoint.
        in_training: False: the task only evaluates, and what it builds in `prepare_training` is left out.

    Raises:
        CheckpointError: the names or the shapes differ from those of the task.
    """
    try:
        own = {**task.state_dict(), **task.rank_state_dict()}
    except AttributeError:  # of what `prepare_training` builds
        if in_training:
            raise
        return
    if not own and not (saved and in_training):
        return
    if saved is None:  # of an older version, of the 2021 distribuuuu, or weights alone
        logger.warning("%s has no task state; the task is re-initialized: %s", path, ", ".join(own))
        return
    try:
        state, by_rank = dict(saved["shared"]), saved.get("by_rank", [])
        if by_rank and len(by_rank) != dist.world_size():
            logger.warning("%s was written by %d processes; all continue with the state of the first one: %s", path,
                           len(by_rank), ", ".join(by_rank[0]))  # fmt: skip
        if by_rank:
            state |= by_rank[dist.rank() if len(by_rank) == dist.world_size() else 0]
        if not in_training:
            state = {name: value for name, value in state.items() if name in own}
        if differs := _find_mismatch(own, state):
            raise CheckpointError(f"{path}: the state of the task differs: {differs}; fix: undo the change of the task,"
                                  f" or {WEIGHTS_ONLY}")  # fmt: skip
        task.load_state_dict(state)
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        reason = f"{type(task).__name__}.load_state_dict: {type(error).__name__}: {error}"
        raise CheckpointError(f"{path}: the state of the task cannot be restored: {reason}; {WEIGHTS_ONLY}") from error


def _find_mismatch(own: Any, saved: Any, name: str = "") -> str | None:
    """Return the first difference of two states in names, and in types and shapes of tensors; None: there is none.

    An entry that is None or an empty dict may grow in training: only what both have is compared.
    """
    if isinstance(own, torch.Tensor) and isinstance(saved, torch.Tensor):
        if own.shape != saved.shape or own.dtype != saved.dtype:
            return f"{name} is {saved.dtype} {tuple(saved.shape)}; expected {own.dtype} {tuple(own.shape)}"
    elif isinstance(own, Mapping) and isinstance(saved, Mapping) and (own or not name):
        for key in [*own, *(key for key in saved if key not in own)]:
            place = f"{name}.{key}" if name else str(key)
            if key not in saved or key not in own:
                return f"{place} is {'missing' if key in own else 'unknown'}"
            if found := _find_mismatch(own[key], saved[key], place):
                return found
    elif isinstance(own, (torch.Tensor, Mapping)) and saved is not None and type(own) is not type(saved):
        return f"{name} is a {type(saved).__name__}; expected a {type(own).__name__}"
    return None
