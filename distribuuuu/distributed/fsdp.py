"""Weights, gradients and the optimizer's state shared out among the processes: models larger than one device.

A sharded tensor (DTensor) holds this process's rows of it. What is saved and loaded is whole: a checkpoint does not
tell how many processes wrote it.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from distribuuuu.config import ConfigError
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.blocks import find_blocks

logger = logging.getLogger(__name__)

Optimizer = torch.optim.Optimizer

_TYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class FullStateDict(dict):
    """Whole tensors on the CPU that nothing else refers to; empty or without them on all but the main process."""


def shard_model(
    model: nn.Module, device: torch.device, reduce_dtype: torch.dtype | None = None, offload: bool = False
) -> nn.Module:
    """Keep only this process's part of each weight, on its device; the model gathers a block's weights when it needs
    them (Rajbhandari et al., arXiv 1910.02054, stage 3; torch's `fully_shard`).

    Weights are gathered as they are; autocast stays what decides on the type of a computation. (Gathered as bfloat16,
    norm layers would compute with rounded weights, or, on the CPU, not at all.)

    Args:
        model: the model, anywhere; block by block it comes to the device and is cut.
        device: this process's device.
        reduce_dtype: what gradients are sent and added up in; None: their own.
        offload: keep the parts in the host's memory.

    Raises:
        ConfigError: a weight has no dimension to cut, or torch is too old.
    """
    if device.type == "cpu" and torch.__version__ < (2, 7):
        raise ConfigError(f"DIST.SHARD: fsdp on a CPU needs torch 2.7, this is {torch.__version__}; use zero1")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ConfigError(f"DIST.SHARD: fsdp cannot cut {name}, a single number; use zero1")
        parameter.data = parameter.data.contiguous()
    settings = {
        "mesh": init_device_mesh(device.type, (dist.world_size(),)),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy(),
    }
    for block in find_blocks(model).values():
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def is_sharded(model: nn.Module) -> bool:
    """Tell whether a model's weights are shared out: each of its forward passes must be every process's."""
    return isinstance(model, FSDPModule)


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Run a block of forward passes without gradients.

    A sharded model would be left with what it gathered: as inference tensors, unfit for training, and at the end, since
    no backward pass follows, with whole weights that are soon out of date.
    """
    with torch.no_grad() if is_sharded(model) else torch.inference_mode():
        yield
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's rows of a sharded tensor, which share its memory; any other tensor as it is."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def clip_grad_norm(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Scale the gradients of parameters, whole or sharded, down to the norm `most`, all as one vector.

    Every process must call it. Never waits for the device, unless the gradients are in the host's memory.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        nn.utils.clip_grad_norm_(parameters, most, foreach=True)
        return
    grads = [to_local(parameter.grad) for parameter in parameters]
    square = nn.utils.get_total_norm(grads, foreach=True).square().to(_mesh_device(parameters[0]))
    dist.scaled_all_reduce([square], scale=1.0)
    torch._foreach_mul_(grads, (most / (square.sqrt() + 1e-6)).clamp(max=1.0).to(grads[0].device))


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a model with all tensors whole; of a sharded one only on the main process.

    Every process must call it. The main process receives one tensor at a time.
    """
    return gather(model.state_dict()) if is_sharded(model) else model.state_dict()


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state_dict: dict[str, torch.Tensor]) -> None:
    """Load whole tensors that fit into a model, of which a sharded one takes its rows."""
    if not is_sharded(model):
        model.load_state_dict(state_dict)
        return
    for key, own in model.state_dict().items():
        to_local(own).copy_(_rows_for(state_dict[key], own))


def gather(content: dict[Any, Any]) -> FullStateDict:
    """Return a nested content with its tensors, sharded or not, whole and on the CPU; without them if not main."""
    return FullStateDict({key: _gather(value) for key, value in content.items()})


def _gather(value: Any) -> Any:
    if isinstance(value, DTensor):
        return _whole(value)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if dist.is_main() else None
    if isinstance(value, dict):
        return {key: _gather(item) for key, item in value.items()}
    return type(value)(_gather(item) for item in value) if isinstance(value, (list, tuple)) else value


def _whole(tensor: DTensor) -> torch.Tensor | None:
    """Return all rows on the CPU of the main process, None elsewhere. The last processes may have fewer, or none."""
    local, num_rows, num_each = to_local(tensor), tensor.shape[0], _rows_each(tensor)
    padded = torch.zeros(num_each, *tensor.shape[1:], dtype=tensor.dtype, device=_mesh_device(tensor))
    padded[: len(local)] = local
    if not dist.is_main():
        torch_dist.gather(padded, dst=0)
        return None
    received = padded.new_empty(dist.world_size() * num_each, *tensor.shape[1:])
    torch_dist.gather(padded, list(received.split(num_each)))
    return received[:num_rows].to("cpu", copy=True)


def _rows_for(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return those rows of a whole tensor that this process has of a sharded one; for one that is not, all."""
    if not isinstance(like, DTensor):
        return whole
    begin = dist.rank() * _rows_each(like)
    return whole[begin : begin + _rows_each(like)]


def _rows_each(tensor: DTensor) -> int:
    return -(-tensor.shape[0] // dist.world_size())


def _mesh_device(tensor: DTensor) -> torch.device:
    """Return the device that talks to the others; with offloading, the tensor is not there."""
    kind = tensor.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def use_full_state_dict(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose state dict is whole even if its parameters are sharded: as `full_state_dict`."""
    if any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]):
        optimizer.register_state_dict_post_hook(lambda _, content: gather(content))
        optimizer.register_load_state_dict_pre_hook(_with_own_rows)
    return optimizer


def _with_own_rows(optimizer: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
    """Return a whole state with this process's rows of what belongs to sharded parameters."""
    parameters = dict(zip(_indices(content["param_groups"]), _indices(optimizer.param_groups), strict=False))

    def cut(value: Any, parameter: torch.Tensor | None) -> Any:
        if not isinstance(parameter, DTensor) or getattr(value, "shape", None) != parameter.shape:
            return value
        own = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        to_local(own).copy_(_rows_for(value, parameter))
        return own

    state = {
        index: {name: cut(value, parameters.get(index)) for name, value in entry.items()}
        for index, entry in content["state"].items()
    }
    return {**content, "state": state}


@torch.no_grad()
def match_strides(optimizer: Optimizer) -> None:
    """Lay out loaded state in memory as its parameters are, which fused kernels ask for; the values stay.

    Raises:
        ValueError: a state tensor cannot belong to its parameter.
    """
    optimizer = optimizer.optim if isinstance(optimizer, PartitionedOptimizer) else optimizer
    for parameter, entry in optimizer.state.items():
        for name, value in entry.items() if isinstance(parameter, torch.Tensor) else ():
            if not isinstance(value, torch.Tensor) or value.ndim != parameter.ndim:
                continue  # e.g. a count of steps, or row and column statistics
            if any(mine not in (1, own) for mine, own in zip(value.shape, parameter.shape, strict=True)):
                raise ValueError(f"{name} has the shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
            is_whole = value.shape == parameter.shape
            if is_whole and to_local(value).stride() != to_local(parameter).stride():
                entry[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                to_local(entry[name]).copy_(to_local(value))


def _indices(groups: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(group["params"] for group in groups))


class _Description(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


class PartitionedOptimizer(ZeroRedundancyOptimizer):
    """An optimizer of which each process does the work for its share of the parameters (Rajbhandari et al., stage 1).

    Args:
        groups: parameter groups.
        build: parameter groups to the optimizer of one process; what it computes for one parameter must not depend on
            the others.
    """

    def __init__(self, groups: list[dict[str, Any]], build: Callable[[list[dict[str, Any]]], Optimizer]):
        super().__init__(groups, optimizer_class=build)
        self.defaults = self.optim.defaults

    def _get_is_trainable_mask(self) -> list[bool]:
        """Have torch overlook what is frozen later: without a gradient it was skipped before, too."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of one optimizer for all; without that of single parameters if not main.

        Every process must call it. The main process receives one tensor at a time.
        """
        indices = {parameter: index for index, parameter in enumerate(_indices(self.param_groups))}
        own = {indices[parameter]: entry for parameter, entry in self.optim.state.items()}
        described = {index: {name: _describe(value) for name, value in entry.items()} for index, entry in own.items()}
        owners = {}
        for rank, descriptions in enumerate(dist.gather_objects(described)):
            owners |= {index: (rank, entry) for index, entry in descriptions.items()}
        state = {}
        for index, (rank, entry) in sorted(owners.items()):
            device = _indices(self.param_groups)[index].device
            values = {
                name: _send_to_main(own.get(index, {}).get(name), value, rank, device) for name, value in entry.items()
            }
            if dist.is_main():
                state[index] = values
        return FullStateDict(state=state, param_groups=Optimizer.state_dict(self)["param_groups"])

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Take this process's share of the state of one optimizer for all.

        Raises:
            ValueError: the groups or their sizes differ, or the state is another optimizer's.
        """
        saved = content["param_groups"]
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("its parameter groups have other sizes")
        index_of = dict(zip(_indices(self.param_groups), _indices(saved), strict=True))
        groups = [
            {**group, "params": [index_of[parameter] for parameter in own["params"]]}
            for group, own in zip(saved, self.optim.param_groups, strict=True)
        ]
        state = {index: content["state"][index] for index in _indices(groups) if index in content["state"]}
        self.optim.load_state_dict({"state": state, "param_groups": groups})
        self._sync_param_groups(self.optim.param_groups, self.param_groups)


def _describe(value: Any) -> Any:
    """Return what is to be known of a value before it is sent; single numbers themselves."""
    if not isinstance(value, torch.Tensor):
        return value
    return _Description(value.shape, value.dtype) if value.dim() else value.cpu()


def _send_to_main(mine: Any, described: Any, owner: int, device: torch.device) -> Any:
    """Return the owner's value, on the CPU of the main process."""
    if not isinstance(described, _Description):
        return described
    if owner == 0:
        return mine.detach().to("cpu", copy=True) if dist.is_main() else None
    if dist.is_main():
        received = torch.empty(described.shape, dtype=described.dtype, device=device)
        torch_dist.recv(received, src=owner)
        return received.cpu()
    if dist.rank() == owner:
        torch_dist.send(mine.contiguous(), dst=0)
    return None


def build_sharded_optimizer(
    cfg, groups: list[dict[str, Any]], build: Callable[[list[dict[str, Any]]], Optimizer]
) -> Optimizer:
    """Return `build(groups)`; with DIST.SHARD zero1 one whose work is shared out. Its state dict is whole."""
    if cfg.DIST.SHARD == "zero1" and dist.is_distributed():
        return PartitionedOptimizer(groups, build)
    return use_full_state_dict(build(groups))


def parallelize_model(cfg, device: torch.device) -> Callable[[nn.Module], nn.Module]:
    """Return what brings a model to the device: whole, or with DIST.SHARD fsdp this process's part of it."""
    settings = cfg.DIST
    if settings.SHARD != "none" and not dist.is_distributed():
        logger.info("DIST.SHARD %s: one process has nobody to share with", settings.SHARD)
    if settings.SHARD != "fsdp" or not dist.is_distributed():
        return lambda model: model.to(device)
    return lambda model: shard_model(model, device, _TYPES[settings.COMPRESS], settings.CPU_OFFLOAD)
