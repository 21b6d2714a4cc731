"""Fully sharded data parallelism (FSDP2): weights, gradients and optimizer state split over the processes.

A sharded tensor (DTensor) holds this process's rows. Checkpoints hold full tensors, so they load on any number of
processes.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from distribuuuu.config import ConfigError
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.model_blocks import find_blocks

logger = logging.getLogger(__name__)

Optimizer = torch.optim.Optimizer

_REDUCE_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class FullStateDict(dict):
    """State dict of full CPU tensors that nothing else refers to; without tensors on all but the main process."""


def shard_model(
    model: nn.Module, device: torch.device, reduce_dtype: torch.dtype | None = None, offload: bool = False
) -> nn.Module:
    """Shard each block and the model over all processes, in place (Rajbhandari et al., arXiv 1910.02054, stage 3).

    Weights are gathered in their own type, and autocast decides on the type of each computation: with weights gathered
    as bfloat16 norm layers would compute with rounded weights or, on the CPU, fail.

    Args:
        model: the model, on any device; it is moved block by block.
        device: this process's device.
        reduce_dtype: type in which gradients are sent and summed; None: their own.
        offload: keep the shards in host memory.

    Raises:
        ConfigError: a parameter has no dimension to shard, or torch is too old.
    """
    if device.type == "cpu" and torch.__version__ < "2.7":
        raise ConfigError(f"DIST.SHARD: fsdp on a CPU needs torch 2.7, this is {torch.__version__}; use zero1")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ConfigError(f"DIST.SHARD: fsdp cannot shard {name}, a single number; use zero1")
        parameter.data = parameter.data.contiguous()
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.world_size(),)),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy(),
    }
    for block in find_blocks(model).values():
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model


def is_sharded(model: nn.Module) -> bool:
    """Tell whether a model is sharded: every process must then take part in each forward pass."""
    return isinstance(model, FSDPModule)


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Run a block of forward passes without gradients.

    A sharded model keeps its gathered weights after the last forward pass, since no backward pass follows: they would
    be outdated soon, and as inference tensors unusable for training. So they are freed here.
    """
    with torch.no_grad() if is_sharded(model) else torch.inference_mode():
        yield
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's rows of a sharded tensor, which share its memory; any other tensor unchanged."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else tensor


def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float) -> None:
    """Scale the gradients of parameters, sharded or not, as one vector down to the norm `max_norm`.

    Every process must call it. It never waits for the device, unless the gradients are in host memory.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if not sharded:
        nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
        return
    grads = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    norm = whole_norms(nn.utils.get_total_norm(grads, foreach=True), sharded[0])
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(grads[0].device))


def whole_norms(norms: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the L2 norms of whole tensors from those of this process's rows, if they are sharded like a parameter.

    Every process must call it.
    """
    if not isinstance(parameter, DTensor):
        return norms
    squares = norms.square().to(_mesh_device(parameter))
    dist.scaled_all_reduce([squares], scale=1.0)
    return squares.sqrt()


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a model with full tensors; of a sharded model on the main process only.

    Every process must call it. One tensor at a time is gathered, for which each process needs memory on its device.
    """
    return gather(model.state_dict()) if is_sharded(model) else model.state_dict()


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state_dict: dict[str, torch.Tensor]) -> None:
    """Load full tensors, whose shapes fit, into a model, sharded or not."""
    if not is_sharded(model):
        model.load_state_dict(state_dict)
        return
    for key, own in model.state_dict().items():
        _copy_full(own, state_dict[key])


def _copy_full(own: torch.Tensor, full: torch.Tensor) -> None:
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
        gathered: Any = value.to(_mesh_device(value))
        value = gathered.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.to("cpu", copy=True) if dist.is_main() else None
    if isinstance(value, dict):
        return {key: _gather(item) for key, item in value.items()}
    return type(value)(_gather(item) for item in value) if isinstance(value, (list, tuple)) else value


def _mesh_device(tensor: DTensor) -> torch.device:
    """Return the device of the collectives; with offloading, the tensor is not there."""
    kind = tensor.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def use_full_state_dict(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer, which saves and loads full state dicts from now on; see `full_state_dict`."""
    if any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]):
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
        _copy_full(sharded, value)
        return sharded

    state = {
        index: {name: shard(value, parameters.get(index)) for name, value in entry.items()}
        for index, entry in content["state"].items()
    }
    return {**content, "state": state}


def build_parallelize_fn(cfg, device: torch.device) -> Callable[[nn.Module], nn.Module]:
    """Return the function that moves a model to the device, sharded if DIST.SHARD is fsdp."""
    settings = cfg.DIST
    if settings.SHARD != "none" and not dist.is_distributed():
        logger.info("DIST.SHARD %s has no effect: world size is 1 and DIST.BACKEND auto", settings.SHARD)
    if settings.SHARD != "fsdp" or not dist.is_distributed():
        return lambda model: model.to(device)
    return lambda model: shard_model(model, device, _REDUCE_DTYPES[settings.COMPRESS], settings.CPU_OFFLOAD)
