"""Replicas of a model, one on each process: equal weights, and buffers (batch norm statistics) that may differ."""

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from distribuuuu.config import ConfigError
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.sharding import is_sharded

# Relative difference of the sums of weights that rounding on other hardware may cause.
TOLERANCE = 1e-5

# Buffers by the kind of weights and their name.
Buffers = dict[str, dict[str, torch.Tensor]]


def check_replicas(model: nn.Module) -> None:
    """Compare the sum of the absolute weights of the processes, one number of each. Every process must call it.

    Raises:
        ConfigError: they differ, on every process, with exit status 1.
    """
    weights = [weight.detach() for weight in model.parameters() if weight.is_floating_point() and weight.numel()]
    if not weights or is_sharded(model):
        return
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(weights, 1)])
    sums = dist.gather_objects(norms.sum().item())
    rank = max(range(len(sums)), key=lambda rank: abs(sums[rank] - sums[0]))
    if abs(sums[rank] - sums[0]) > TOLERANCE * abs(sums[0]):  # not if they are NaN
        found = f"the sum of the absolute weights is {sums[0]:.6g} on process 0 and {sums[rank]:.6g} on process {rank}"
        cause = "make what `Task.update`, `begin_epoch` or an optimizer draws or computes equal on all processes, and "
        fix = f"{cause}average over them what depends on their images, see comm.scaled_all_reduce"
        error = ConfigError(f"the processes have trained different models: {found}; fix: {fix}")
        error.on_all_processes, error.status = True, 1
        raise error


def broadcast_buffers(model: nn.Module) -> None:
    """Copy the main process's buffers, which are evaluated and saved, to every process: one broadcast for each type."""
    groups: dict[tuple, list[torch.Tensor]] = {}
    for buffer in model.buffers():
        groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in groups.values():
        joined = torch.cat([buffer.flatten() for buffer in buffers])
        torch_dist.broadcast(joined, src=0)
        for buffer, values in zip(buffers, joined.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))


def gather_buffers(models: Mapping[str, nn.Module], norms: bool) -> list[Buffers]:
    """Return for each process the saved buffers that differ from those of the main one. Every process must call it.

    Training normalizes by the batch, so the statistics of batch norms, which are those of a process's own images, are
    needed only by a task that uses them: `norms`. Without such buffers, no process waits for another.
    """
    names = {kind: _saved(model, norms) for kind, model in models.items()}
    if not any(names.values()):
        return []
    own = {kind: {name: models[kind].get_buffer(name).cpu() for name in known} for kind, known in names.items()}
    parts = dist.gather_objects(own)
    return [
        {kind: {name: value for name, value in named.items() if not torch.equal(value, parts[0][kind][name])}
         for kind, named in part.items()}
        for part in parts
    ]  # fmt: skip


def _saved(model: nn.Module, norms: bool) -> list[str]:
    saved, layers = model.state_dict().keys(), model.named_modules()
    own = (one.named_buffers(name, recurse=False) for name, one in layers if norms or not isinstance(one, _NormBase))
    return [name for name, _ in itertools.chain.from_iterable(own) if name in saved]


def load_buffers(models: Mapping[str, nn.Module], parts: Sequence[Buffers]) -> None:
    """Restore the buffers of this process, once those of the main one are; of another number of processes, none."""
    if len(parts) != dist.world_size():
        return
    for kind, named in parts[dist.rank()].items():
        for name, value in named.items() if kind in models else ():
            models[kind].get_buffer(name).copy_(value)
