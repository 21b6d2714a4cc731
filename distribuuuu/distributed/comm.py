"""Rank, world size, progress and collectives. Without a process group, all act as in a world of one process."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import nn

from distribuuuu.config import ConfigError

T = TypeVar("T")


class GroupState:
    """State of this process in the process group, set by `process_group`.

    Attributes:
        rank, local_rank: the rank in the group, and the one on this node.
        host_group: a gloo group for values of the host, whose collectives never wait for the device.
        stall_timer: the thread that ends this process if it makes no progress; None: there is one process.
    """

    rank = local_rank = 0
    host_group: torch_dist.ProcessGroup | None = None
    stall_timer: Any = None


def is_distributed() -> bool:
    """Tell whether this process is in a process group."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def rank() -> int:
    """Return the rank of this process."""
    return GroupState.rank


def world_size() -> int:
    """Return the number of processes."""
    return torch_dist.get_world_size() if is_distributed() else 1


def is_main() -> bool:
    """Tell whether this is the process that logs and saves."""
    return rank() == 0


def backend() -> str:
    """Return the name of the backend, or 'none'."""
    return torch_dist.get_backend() if is_distributed() else "none"


def barrier() -> None:
    """Wait for every process, but not for the device."""
    if is_distributed():
        torch_dist.barrier(group=GroupState.host_group)


def all_reduce_max(values: Sequence[float]) -> list[float]:
    """Return the maximum of each value over the processes; does not wait for the device."""
    if not is_distributed():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    torch_dist.all_reduce(tensor, torch_dist.ReduceOp.MAX, group=GroupState.host_group)
    return tensor.tolist()


def scaled_all_reduce(tensors: Sequence[torch.Tensor], scale: float | None = None) -> Sequence[torch.Tensor]:
    """Sum each tensor over the processes in place, then multiply it by `scale` (None: 1 / world size).

    Every process must call it, with tensors of the same shapes. After pycls (Radosavovic et al.).
    """
    if not is_distributed():
        return tensors
    scale = 1.0 / world_size() if scale is None else scale
    pending = [torch_dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for reduction in pending:
        reduction.wait()
    if scale != 1.0:
        for tensor in tensors:
            tensor.mul_(scale)
    return tensors


def gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of every process in the order of ranks, on every process: (sum of N, ...).

    Args:
        tensor: (N, ...), where N may differ between processes and be 0; the other sizes and the type may not.
    """
    if not is_distributed():
        return tensor
    counts = torch.zeros(world_size(), dtype=torch.int64, device=tensor.device)
    counts[rank()] = len(tensor)
    torch_dist.all_reduce(counts)
    padded = tensor.new_zeros((int(counts.max()), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in range(world_size())]
    torch_dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)])


class _DifferentiableSum(torch.autograd.Function):
    """Sum over the processes. The result of every process depends on each tensor, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        torch_dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _DifferentiableSum.forward(ctx, grad)


def all_gather_single(gathered: torch.Tensor, tensor: torch.Tensor, group: Any = None) -> None:
    """Write the tensors of all processes, of one shape, to `gathered`, one after the other; the group must exist."""
    name = "all_gather_single" if hasattr(torch_dist, "all_gather_single") else "all_gather_into_tensor"  # torch < 2.14
    getattr(torch_dist, name)(gathered, tensor, group)


def differentiable_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of `tensor` over the processes; gradients flow back to each of them."""
    return _DifferentiableSum.apply(tensor) if is_distributed() else tensor


def broadcast_object(value: T) -> T:
    """Return the main process's `value` on every process."""
    if not is_distributed():
        return value
    values = [value]
    torch_dist.broadcast_object_list(values, src=0)
    return values[0]


def on_main(function: Callable[[], T]) -> T:
    """Return function() of the main process, or raise its ConfigError, on every process."""
    outcome: Any = None
    if is_main():
        try:
            outcome = function()
        except ConfigError as error:
            error.on_all_processes = True
            outcome = error
    outcome = broadcast_object(outcome)
    if isinstance(outcome, ConfigError):
        raise outcome
    return outcome


def gather_objects(value: T) -> list[T]:
    """Return the `value` of every process in the order of ranks, on every process."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    torch_dist.all_gather_object(values, value)
    return values


class PeerError(ConfigError):
    """Another process failed with this error; this process only stops."""


def local_main_first(function: Callable[[], T]) -> T:
    """Return function() on every process, called on local rank 0 of each node before the others, e.g. to download.

    Raises:
        PeerError: local rank 0 of some node failed (there, its own error is raised).
    """
    is_first = GroupState.local_rank == 0 or not is_distributed()
    error = None
    if is_first:
        try:
            result = function()
        except Exception as caught:  # raised below, after the waiting processes have been notified
            error = caught
    failures = [text for text in gather_objects(str(error) if error else None) if text]
    if error:
        raise error
    if failures:
        raise PeerError(failures[0])
    return result if is_first else function()


def is_communication_error(error: Exception) -> bool:
    """Tell whether an error may be the consequence of the end of another process."""
    text = str(error).lower()
    return isinstance(error, torch_dist.DistError) or any(word in text for word in ("gloo", "nccl", "closed by peer"))


def broadcast_buffers(model: nn.Module) -> None:
    """Copy the main process's buffers, which are evaluated and saved, to every process: one broadcast for each type."""
    groups: dict[tuple, list[torch.Tensor]] = {}
    for buffer in model.buffers() if is_distributed() else ():
        groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in groups.values():
        joined = torch.cat([buffer.flatten() for buffer in buffers])
        torch_dist.broadcast(joined, src=0)
        for buffer, values in zip(buffers, joined.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))


def gradient_sync(model: nn.Module, enabled: bool) -> contextlib.AbstractContextManager:
    """Return the context of a micro-batch; its gradients are averaged over the processes only if `enabled`.

    A sharded model always reduces them: to accumulate them locally would take the memory of the full model.
    """
    no_sync: Any = getattr(model, "no_sync", None)  # of DDP
    return contextlib.nullcontext() if enabled or not no_sync else no_sync()


class FullStateDict(dict):
    """State dict of full CPU tensors that nothing else refers to; without tensors on all but the main process."""


def to_local(tensor: Any) -> torch.Tensor:
    """Return this process's rows of a sharded tensor, which share its memory; any other tensor unchanged."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor


def mark_position(position: str) -> None:
    """Report progress, e.g. 'epoch 2, step 14', which is logged if this process dies or stalls."""
    if GroupState.stall_timer:
        GroupState.stall_timer.mark(position)


def begin_slow_phase() -> None:
    """Apply DIST.STARTUP_TIMEOUT_S, if larger than DIST.TIMEOUT_S, until the next position."""
    if timer := GroupState.stall_timer:
        timer.is_slow = True
        timer.num_marks += 1


def marked(items: Iterable[T], position: str) -> Iterator[T]:
    """Yield the items and report progress after each."""
    for number, item in enumerate(items, 1):
        yield item
        mark_position(f"{position}, batch {number}")
