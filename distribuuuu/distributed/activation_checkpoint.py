"""Repeated blocks of a model, the units of FSDP and of activation checkpointing (Chen et al., arXiv 1604.06174)."""

import contextlib
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from distribuuuu.config import ConfigError, Problem

# Containers hold modules and may be indexed instead of called.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def recompute_blocks(model: nn.Module) -> int:
    """Make each repeated block save only its inputs for the backward pass; return the number of blocks.

    The result is bitwise the same: the second forward pass draws the same random numbers (dropout, drop path) under the
    same autocast and leaves the running statistics of batch norm alone, which timm's own checkpointing updates twice.
    The names of parameters stay, and copies of the model recompute too. A model without such blocks is a ConfigError.
    """
    if not (blocks := find_blocks(model)):
        raise ConfigError(Problem("MODEL.ACT_CHECKPOINT", "the model has no repeated blocks; set it False"))
    for block in blocks.values():
        block.forward = types.MethodType(_checkpointed_forward, block)  # a method: a copy of the block gets its own
    return len(blocks)


def _checkpointed_forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = types.MethodType(type(block).forward, block)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts = lambda: (contextlib.nullcontext(), _preserve_statistics(block))  # noqa: E731
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextlib.contextmanager
def _preserve_statistics(block: nn.Module) -> Iterator[None]:
    """Give norm layers in training mode copies of their running statistics to update in the `with` block."""
    layers = [layer for layer in block.modules() if isinstance(layer, _NormBase) and layer.training]
    originals = [dict(layer._buffers) for layer in layers]
    for layer, buffers in zip(layers, originals, strict=True):
        layer._buffers.update({name: buffer.clone() for name, buffer in buffers.items() if buffer is not None})
    try:
        yield
    finally:
        for layer, buffers in zip(layers, originals, strict=True):
            layer._buffers.update(buffers)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model by name, in the order of its modules; none lies inside another.

    A block, such as a residual block or a transformer layer, is a member of a container or of a module whose children
    have one type; its type occurs at least twice there, and it has at least two layers with a weight matrix. Single
    convolutions with their norm are too small. A module that holds several blocks, such as a stage, is no block.
    """
    members = {
        name: module for name, module in _members(model)
        if sum(any(own.ndim >= 2 for own in layer.parameters(recurse=False)) for layer in module.modules()) >= 2
    }  # fmt: skip
    counts = Counter(type(module) for module in members.values())
    repeated = {name: module for name, module in members.items() if counts[type(module)] >= 2}
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # a module comes before those inside it
        is_inside = any(name.startswith(f"{block}.") for block in blocks)
        is_stage = sum(other.startswith(f"{name}.") for other in repeated) >= 2
        if name in repeated and not is_inside and not is_stage:
            blocks[name] = module
    return blocks


def _members(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, parent in model.named_modules():
        children = dict(parent.named_children())
        if isinstance(parent, _CONTAINERS) or len({type(child) for child in children.values()}) == 1:
            for name, child in children.items():
                if type(child) not in _CONTAINERS:
                    yield f"{prefix}.{name}" if prefix else name, child
