"""Less memory for more work: the backward pass computes each block's activations again (Chen et al., 1604.06174)."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from distribuuuu.config import ConfigError, Problem
from distribuuuu.distributed.blocks import find_blocks


def recompute_blocks(model: nn.Module) -> int:
    """Have each repeated block keep only its inputs for the backward pass, and compute the rest again; return how many.

    What is computed does not change by a bit: the second time draws the same random numbers (dropout, drop path), under
    the same autocast, and leaves the running statistics of batch norm alone. timm's own checkpointing moves them twice.
    Names of weights stay as they are, and copies of the model recompute too.
    """
    blocks = find_blocks(model)
    for block in blocks.values():
        block.forward = types.MethodType(_recomputed_forward, block)  # a method: a copy of the block gets its own
    return len(blocks)


def _recomputed_forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Be the forward pass of a block that is recomputed."""
    forward = types.MethodType(type(block).forward, block)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts = lambda: (contextlib.nullcontext(), _statistics_kept(block))  # noqa: E731
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextlib.contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """Let the norm layers that are trained move copies of their statistics within the block, instead of their own."""
    layers = [layer for layer in block.modules() if isinstance(layer, _NormBase) and layer.training]
    before = [dict(layer._buffers) for layer in layers]
    for layer, buffers in zip(layers, before, strict=True):
        layer._buffers.update({name: buffer.clone() for name, buffer in buffers.items() if buffer is not None})
    try:
        yield
    finally:
        for layer, buffers in zip(layers, before, strict=True):
            layer._buffers.update(buffers)


def build_act_checkpoint(cfg, model: nn.Module) -> nn.Module:
    """Return the model, with MODEL.ACT_CHECKPOINT its blocks recomputed in the backward pass.

    Raises:
        ConfigError: it has no repeated blocks.
    """
    if cfg.MODEL.ACT_CHECKPOINT and not recompute_blocks(model):
        message = f"{cfg.MODEL.ARCH} has no repeated blocks to recompute; set it False"
        raise ConfigError(Problem("MODEL.ACT_CHECKPOINT", message), cfg.origins)
    return model
