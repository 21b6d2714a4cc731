"""Restoration of a checkpoint: a run is resumed, or begins anew."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from distribuuuu.checkpoint import io as checkpoint_io
from distribuuuu.checkpoint.io import WEIGHTS_ONLY, CheckpointError, find_class_mismatch, load_state_dict
from distribuuuu.checkpoint.weights_files import find_weights_file
from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.errors import counted
from distribuuuu.config.options import OPEN_SECTIONS
from distribuuuu.distributed import comm as dist
from distribuuuu.engine.state import TrainState
from distribuuuu.tasks.base import Task

logger = logging.getLogger(__name__)

_NEW_RUN = "set another OUT_DIR, or TRAIN.AUTO_RESUME False to start a new run in this one"


def resume_or_load_weights(cfg: Config, state: TrainState, latest: Path | None) -> dict[str, Any]:
    """Restore the state from the newest checkpoint of OUT_DIR, else load MODEL.WEIGHTS, else leave it as it is.

    Return the content of the checkpoint from which the run continues, whose task is not restored yet; empty: none.

    Raises:
        CheckpointError: the file does not match the config; the message lists the options that differ.
    """
    if not (latest or cfg.MODEL.WEIGHTS):
        return {}
    path = latest or find_weights_file(cfg.MODEL.WEIGHTS)
    content = checkpoint_io.read_checkpoint(path, to_resume=latest is not None)
    if not latest and not (cfg.TRAIN.LOAD_OPT and "optimizer" in content):
        try:
            for model in state.models.values():
                load_state_dict(model, content["state_dict"], path)
        except CheckpointError as error:
            fix = "for other classes, set FINETUNE.WEIGHTS to it instead, which draws the head anew"
            raise CheckpointError(f"MODEL.WEIGHTS: {error}; {fix}") from error
        if mismatch := find_class_mismatch(content, state.classes):
            logger.warning("%s: was trained on other classes: %s", path, mismatch)
        logger.info("initial weights: %s", path)
        return {}
    before = content.get("config", {"MODEL.ARCH": content.get("arch", state.arch)})
    try:
        restore_state(state, content, path)
    except CheckpointError as error:
        if not latest:
            raise
        changed = ", ".join(list_changes(before, state.config, ("MODEL.", "FINETUNE.", "OPTIM.", "EMA.", "DATA.")))
        cause = f"; changed since the checkpoint: {changed}; fix: set them back, or" if changed else "; fix:"
        raise CheckpointError(f"{error}{cause} {_NEW_RUN}") from error
    if latest:
        logger.info("resumed from %s: epoch %d, step %d", path, state.epoch + 1, state.step)
        _describe_changes(state, content, before)
    else:
        state.bests.clear()  # their files are in another folder
        logger.info("resumed from %s: epoch %d; TRAIN.LOAD_OPT False loads its weights only", path, state.epoch + 1)
    return content


def restore_state(state: TrainState, content: dict[str, Any], path: str | os.PathLike) -> None:
    """Restore the state from the content of a checkpoint.

    Raises:
        CheckpointError: it is incomplete or damaged, or does not match the model, the optimizer or the classes.
    """
    checkpoint_io.check_resumable(content, path)
    if mismatch := find_class_mismatch(content, state.classes):
        raise CheckpointError(f"{path}: was trained on other classes: {mismatch}; {WEIGHTS_ONLY}")
    try:
        state.load_dict(content, path)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path}: not a valid checkpoint: {type(error).__name__}: {error!s:.200}") from error


def _describe_changes(state: TrainState, content: dict[str, Any], before: dict[str, Any]) -> None:
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


def check_task_state(task: Task) -> None:
    """Raise ConfigError, on every process, if a checkpoint could not hold the state of a task, or not be read back."""
    problem = ""
    try:
        shared, own = task.state_dict(), task.rank_state_dict()
        if shared or own:
            from distribuuuu.checkpoint.readable import check_readable

            check_readable({"shared": shared, "by_rank": [own] * dist.world_size()})
    except CheckpointError as error:
        problem = f"{type(task).__name__}.state_dict: {error}"
    if problem := next(filter(None, dist.gather_objects(problem)), ""):
        fix = "save what it consists of, e.g. torch.from_numpy(array), list(deque), number.item()"
        expected = "dense tensors, numbers, texts, and dicts, lists and tuples of them"
        raise ConfigError(Problem("TASK.NAME", f"{problem}; expected {expected}; fix: {fix}"))


def restore_task(task: Task, saved: Mapping[str, Any] | None, path: Any, in_training: bool = True) -> None:
    """Restore the state of a task from the entry `task` of a checkpoint; log a warning if there is none.

    If not `in_training`, the task only evaluates, and what it builds in `prepare_training` is left out.

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
        reason = f"{type(task).__name__}.load_state_dict: {type(error).__name__}: {error}"
        raise CheckpointError(f"{path}: the state of the task cannot be restored: {reason}; {WEIGHTS_ONLY}") from error


def _find_mismatch(own: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Return the first difference of two states in names, or in types and shapes of tensors, if there is one."""
    for name in {**own, **saved}:
        if name not in own or name not in saved:
            return f"{name} is {'missing' if name in own else 'unknown'}"
        mine, theirs = own[name], saved[name]
        are_tensors = isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)
        if are_tensors and (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            return f"{name} is {theirs.dtype} {tuple(theirs.shape)}; expected {mine.dtype} {tuple(mine.shape)}"
    return None
