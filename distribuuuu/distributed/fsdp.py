"""Fully sharded data parallelism (FSDP2): weights, gradients and optimizer state split over the processes.

sharding.py imports it if DIST.SHARD is fsdp.
"""

from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.activation_checkpoint import find_blocks
from distribuuuu.distributed.comm import FullStateDict, to_local

Optimizer = torch.optim.Optimizer


def shard_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Shard each block and the model over all processes, in place (Rajbhandari et al., arXiv 1910.02054, stage 3).

    Weights are gathered in their own type, and autocast decides on the type of each computation: with weights gathered
    as bfloat16 norm layers would compute with rounded weights or, on the CPU, fail.
    The model is moved to the device block by block.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.world_size(),)),
        "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False),
    }
    for block in find_blocks(model).values():
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model


@torch.no_grad()
def copy_full(own: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a full tensor, or this process's rows of it, to a tensor; every process must call it."""
    if isinstance(own, DTensor):
        full = distribute_tensor(full, own.device_mesh, own.placements).to_local()
    to_local(own).copy_(full)


def gather(content: dict[Any, Any]) -> FullStateDict:
    """Return a nested dict with its tensors, sharded or not, as full CPU tensors; None for each if not main."""
    return FullStateDict({key: _gather(value) for key, value in content.items()})


@torch.no_grad()
def _gather(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.to("cpu", copy=True) if dist.is_main() else None
    if isinstance(value, dict):
        return {key: _gather(item) for key, item in value.items()}
    return type(value)(_gather(item) for item in value) if isinstance(value, (list, tuple)) else value


def use_full_state_dict(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer, which saves and loads full state dicts from now on; see `full_state_dict`."""
    optimizer.register_state_dict_post_hook(lambda _, content: gather(content))
    optimizer.register_load_state_dict_pre_hook(_shard_state)
    return optimizer


def _shard_state(optimizer: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's full state dict with this process's rows of the state of sharded parameters."""
    indices = chain.from_iterable(group["params"] for group in content["param_groups"])
    own = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    parameters = dict(zip(indices, own, strict=False))

    def shard(value: Any, parameter: torch.Tensor | None) -> Any:
        if not isinstance(parameter, DTensor) or getattr(value, "shape", None) != parameter.shape:
            return value
        sharded = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        copy_full(sharded, value)
        return sharded

    state = {
        index: {name: shard(value, parameters.get(index)) for name, value in entry.items()}
        for index, entry in content["state"].items()
    }
    return {**content, "state": state}
