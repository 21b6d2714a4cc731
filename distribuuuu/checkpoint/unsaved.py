"""Tensors that checkpoints leave out, as every start of the run loads or draws them again: `Task.unsaved_tensors`."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from distribuuuu.checkpoint.io import CheckpointError
from distribuuuu.checkpoint.manager import hash_tensors
from distribuuuu.checkpoint.weights_files import tensors_key
from distribuuuu.config import ConfigError, Problem


def describe_unsaved(names: Collection[str], tensors: Mapping[str, torch.Tensor], weights: str) -> dict[str, Any]:
    """Return the entry `unsaved` of checkpoints, by the initial tensors of the model: the names and their SHA-256.

    `weights` is MODEL.WEIGHTS, which only a first start loads.

    Raises:
        ConfigError: the model lacks one of them, or a resume would not find them again.
    """
    if unknown := sorted({*names} - {*tensors}):
        raise ConfigError(Problem("TASK.NAME", f"unsaved_tensors names {unknown[0]}, which the model lacks"))
    if names and weights:
        message = f"got {weights}, which no resume loads, and checkpoints leave out tensors"
        raise ConfigError(Problem("MODEL.WEIGHTS", f"{message}; fix: name it as FINETUNE.WEIGHTS"))
    return {"names": sorted(names), "sha256": hash_tensors({name: tensors[name] for name in names})} if names else {}


def check_whole_weights(task: Any, base: type) -> None:
    """Raise ConfigError if a task overrides a method of the base class that needs whole weights, which fsdp divides."""
    for hook in ("deploy_model", "unsaved_tensors"):
        if getattr(type(task), hook) is not getattr(base, hook):
            fix = f"{type(task).__name__}.{hook} needs whole weights; fix: set it to none or zero1"
            raise ConfigError(Problem("DIST.SHARD", f"got fsdp; {fix}"))


def leave_out(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint without these tensors; CheckpointError: one is not that of the start."""
    names = {*content["unsaved"]["names"]}
    keys = [tensors_key(kind) for kind in content["bests"]]
    if hash_tensors({name: content[keys[0]][name] for name in names}) != content["unsaved"]["sha256"]:
        raise CheckpointError(f"TASK.NAME: the training changes tensors of unsaved_tensors, e.g. {min(names)}")
    kept = {key: {name: one for name, one in content[key].items() if name not in names} for key in keys}
    return {**content, **kept}


def add_unsaved(
    content: dict[str, Any], unsaved: dict[str, Any], own: Mapping[str, torch.Tensor], path: Any
) -> dict[str, Any]:
    """Return the content of a checkpoint with the tensors that it leaves out, those of this start.

    Raises:
        CheckpointError: they are others than those of the first start of the run.
    """
    if content.get("unsaved", unsaved) != unsaved:
        left_out = f"{path}: leaves out tensors, e.g. {content['unsaved']['names'][0]}, that are others in this start"
        raise CheckpointError(f"{left_out}; fix: restore the task, and the file of FINETUNE.WEIGHTS")
    given = {name: own[name] for name in unsaved.get("names", ())}
    keys = [tensors_key(kind) for kind in content.get("bests", ()) if tensors_key(kind) in content]
    return {**content, **{key: {**given, **content[key]} for key in keys}}
