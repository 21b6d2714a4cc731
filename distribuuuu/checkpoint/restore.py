"""Loading the weights and the optimizer state of a checkpoint."""

import os
from typing import Any

import torch
from torch import nn

from distribuuuu.checkpoint.io import CheckpointError
from distribuuuu.checkpoint.weights_files import KINDS
from distribuuuu.config.errors import counted
from distribuuuu.distributed.comm import to_local
from distribuuuu.distributed.sharding import load_full_state_dict

# The remedy when weights may be used, but not the rest of a checkpoint.
WEIGHTS_ONLY = "to take only its weights name it as MODEL.WEIGHTS, with TRAIN.LOAD_OPT False and another OUT_DIR"


# Entries that files of best weights, which cannot be resumed, do not have.
_ONLY_TO_RESUME = {"optimizer", "step", "seconds", "timing", "peak_memory_mib", "meter", "scaler", "evaluations",
                   *(kind.tensors for kind in KINDS.values())}  # fmt: skip


def check_resumable(content: dict[str, Any], path: str | os.PathLike) -> None:
    """Raise CheckpointError if a checkpoint holds weights only."""
    if "optimizer" not in content or "epoch" not in content:
        raise CheckpointError(f"{path}: holds weights only, so it cannot be resumed; give it as MODEL.WEIGHTS")


def weights_of(content: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the content of a file of best weights of a kind, e.g. "raw"."""
    weights = {key: value for key, value in content.items() if key not in _ONLY_TO_RESUME}
    return {**weights, "weights": kind, "state_dict": content[KINDS[kind].tensors]}


def load_state_dict(model: nn.Module, state_dict: dict[str, torch.Tensor], path: str | os.PathLike) -> None:
    """Load all weights of a state dict into a model.

    Raises:
        CheckpointError: class counts, names or shapes differ; names the differences.
    """
    own = model.state_dict()
    if own.keys() != state_dict.keys():
        from distribuuuu.checkpoint.tensor_names import rename_tensors

        state_dict = rename_tensors(state_dict, own)
    shapes = {key: (tuple(state_dict[key].shape), tuple(own[key].shape)) for key in own if key in state_dict}
    different = {key: pair for key, pair in shapes.items() if pair[0] != pair[1]}
    missing, extra = [key for key in own if key not in state_dict], [key for key in state_dict if key not in own]
    if not (different or missing or extra):
        load_full_state_dict(model, state_dict)
        return
    if not missing and not extra and all(a[1:] == b[1:] for a, b in different.values()) and len(different) <= 2:
        key, (saved, expected) = next(iter(different.items()))
        classes = counted(saved[0], "class")
        raise CheckpointError(f"{path}: has {classes} ({key}), but MODEL.NUM_CLASSES is {expected[0]}")
    parts = [f"{key} is {a}, here {b}" for key, (a, b) in list(different.items())[:2]]
    parts += [f"lacks {counted(len(missing), 'tensor')}, e.g. {missing[0]}"] if missing else []
    parts += [f"has {len(extra)} that the model lacks, e.g. {extra[0]}"] if extra else []
    raise CheckpointError(f"{path}: does not fit the model: {'; '.join(parts)}; was MODEL.ARCH another one?")


def load_optimizer(optimizer: torch.optim.Optimizer, content: dict[str, Any], path: str | os.PathLike) -> None:
    """Load the state of an optimizer and what a schedule sets; other settings (momentum, ...) stay the config's.

    Raises:
        CheckpointError: the groups, their sizes or the shapes of the state differ.
    """
    settings = []
    for group in optimizer.param_groups:
        scheduled = {"lr", "weight_decay"} if "full_decay" in group else {"lr"}
        settings.append({key: group[key] for key in group if key in {*optimizer.defaults, "lr_scale"} - scheduled})
    try:
        optimizer.load_state_dict(content)
        _match_strides(optimizer)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: its optimizer does not fit: {error}; {WEIGHTS_ONLY}") from error
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


@torch.no_grad()
def _match_strides(optimizer: torch.optim.Optimizer) -> None:
    """Give state tensors the strides of their parameters, which fused kernels require; the values stay.

    Raises:
        ValueError: a state tensor cannot belong to its parameter.
    """
    own_share = getattr(optimizer, "optim", optimizer)  # of an optimizer that is partitioned by ZeRO-1
    for parameter, entry in own_share.state.items():
        for name, value in entry.items() if isinstance(parameter, torch.Tensor) else ():
            if not isinstance(value, torch.Tensor) or value.ndim != parameter.ndim:
                continue  # e.g. a step count, or row and column statistics
            if any(size not in (1, expected) for size, expected in zip(value.shape, parameter.shape, strict=True)):
                raise ValueError(f"{name} has the shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
            has_shape = value.shape == parameter.shape
            if has_shape and to_local(value).stride() != to_local(parameter).stride():
                entry[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                to_local(entry[name]).copy_(to_local(value))
