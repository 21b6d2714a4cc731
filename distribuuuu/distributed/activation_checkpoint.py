"""Activation checkpointing: the backward pass recomputes the activations of each block (Chen et al., 1604.06174)."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from distribuuuu.config import ConfigError, Problem
from distribuuuu.distributed.model_blocks import find_blocks


def recompute_blocks(model: nn.Module) -> int:
    """Make each repeated block save only its inputs for the backward pass; return the number of blocks.

    The result is bitwise the same: the second forward pass draws the same random numbers (dropout, drop path) under the
    same autocast and leaves the running statistics of batch norm alone, which timm's own checkpointing updates twice.
    The names of parameters stay, and copies of the model recompute too.
    """
    blocks = find_blocks(model)
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


def build_act_checkpoint(cfg, model: nn.Module) -> nn.Module:
    """Return the model, with activation checkpointing of its blocks if MODEL.ACT_CHECKPOINT is set.

    Raises:
        ConfigError: the model has no repeated blocks.
    """
    if cfg.MODEL.ACT_CHECKPOINT and not recompute_blocks(model):
        message = f"{cfg.MODEL.ARCH} has no repeated blocks to recompute; set it False"
        raise ConfigError(Problem("MODEL.ACT_CHECKPOINT", message), cfg.origins)
    return model
