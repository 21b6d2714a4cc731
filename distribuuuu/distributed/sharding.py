"""Passes through a model, and DIST.SHARD as the rest of the package sees it; fsdp.py and zero1.py do the work.

A sharded tensor (DTensor) holds this process's rows. Checkpoints hold full tensors, so they load on any number of
processes.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from distribuuuu.distributed import comm as dist

logger = logging.getLogger(__name__)

Optimizer = torch.optim.Optimizer
Build = Callable[[list[dict[str, Any]]], Optimizer]


def is_sharded(model: nn.Module) -> bool:
    """Tell whether a model is sharded: every process must then take part in each forward pass."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(model, module.FSDPModule)


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Run a block of forward passes without gradients.

    A sharded model keeps its gathered weights after the last forward pass, since no backward pass follows: they would
    be outdated soon, and as inference tensors unusable for training. So they are freed here.
    """
    with torch.no_grad() if is_sharded(model) else torch.inference_mode():
        yield
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model and remove its gradients after the block."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        model.zero_grad()
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)


def sum_output(output: Any) -> torch.Tensor:
    """Return the sum () of the values of an output that have a gradient, e.g. of a tuple or a dict of tensors."""
    tensors = [tensor for tensor in tree_leaves(output) if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a model with full tensors; of a sharded model on the main process only.

    Every process must call it. One tensor at a time is gathered, for which each process needs memory on its device.
    """
    if not is_sharded(model):
        return model.state_dict()
    from distribuuuu.distributed.fsdp import gather

    return gather(model.state_dict())


def load_full_state_dict(model: nn.Module, state_dict: dict[str, torch.Tensor]) -> None:
    """Load full tensors, whose shapes fit, into a model, sharded or not."""
    if not is_sharded(model):
        model.load_state_dict(state_dict)
        return
    from distribuuuu.distributed.fsdp import copy_full

    for key, own in model.state_dict().items():
        copy_full(own, state_dict[key])


def build_sharded_optimizer(cfg, groups: list[dict[str, Any]], build: Build) -> Optimizer:
    """Return `build(groups)`, partitioned if DIST.SHARD is zero1; its state dict is full for any DIST.SHARD."""
    if cfg.DIST.SHARD == "none" or not dist.is_distributed():
        return build(groups)
    if cfg.DIST.SHARD == "zero1":
        from distribuuuu.distributed.zero1 import PartitionedOptimizer

        return PartitionedOptimizer(groups, build)
    from distribuuuu.distributed.fsdp import use_full_state_dict

    return use_full_state_dict(build(groups))


def build_parallelize_fn(cfg, device: torch.device) -> Callable[[nn.Module], nn.Module]:
    """Return the function that moves a model to the device, sharded if DIST.SHARD is fsdp."""
    shard = cfg.DIST.SHARD
    if shard != "none" and not dist.is_distributed():
        logger.info("DIST.SHARD %s has no effect: world size is 1 and DIST.BACKEND auto", shard)
    if shard != "fsdp" or not dist.is_distributed():
        return lambda model: model.to(device)
    from distribuuuu.distributed.fsdp import shard_model

    return lambda model: shard_model(model, device)
