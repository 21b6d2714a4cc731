"""The process group, the device and the reductions; the only file that knows torch.distributed.

Every function works with no group at all: one process is a world of one.
"""

import contextlib
import datetime
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distribuuuu.config import ConfigError
from distribuuuu.launch import Launch

T = TypeVar("T")

# This process's number on its node; set when it joins the group.
_local_rank = 0


def pick_device(local_rank: int) -> torch.device:
    """Return this process's device, made the current one: CUDA (one card a process), else Apple's MPS, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if torch.backends.mps.is_available() and "RANK" not in os.environ:
        return torch.device("mps")
    return torch.device("cpu")


@contextlib.contextmanager
def process_group(launch: Launch, device: torch.device, timeout_s: float) -> Iterator[None]:
    """Join the processes of the run for the length of the block; one process alone joins nothing.

    A group brings threads that come and go. Fork (data loader workers) before: a fork while such a thread holds one of
    the interpreter's locks leaves the child waiting for ever.
    """
    global _local_rank
    _local_rank = launch.local_rank
    if launch.world_size == 1:
        yield
        return
    torch_dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        init_method=launch.init_method or "env://",
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        torch_dist.destroy_process_group()


def in_group() -> bool:
    """Tell whether this process shares the run with others."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def rank() -> int:
    """Return this process's number, from 0."""
    return torch_dist.get_rank() if in_group() else 0


def world_size() -> int:
    """Return the number of processes."""
    return torch_dist.get_world_size() if in_group() else 1


def is_main() -> bool:
    """Tell whether this is the process that logs and saves."""
    return rank() == 0


def backend() -> str:
    """Return the name of the group's backend, or 'none'."""
    return torch_dist.get_backend() if in_group() else "none"


def barrier() -> None:
    """Wait until every process is here."""
    if in_group():
        torch_dist.barrier()


def scaled_all_reduce(tensors: Sequence[torch.Tensor], scale: float | None = None) -> Sequence[torch.Tensor]:
    """Sum each tensor over the processes in place, then multiply by `scale` (None: one over their number).

    Every process must call it, with tensors of the same shapes. After pycls (Radosavovic et al.).
    """
    if not in_group():
        return tensors
    scale = 1.0 / world_size() if scale is None else scale
    pending = [torch_dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for reduction in pending:
        reduction.wait()
    if scale != 1.0:
        for tensor in tensors:
            tensor.mul_(scale)
    return tensors


class _SummedOverProcesses(torch.autograd.Function):
    """A sum over the processes whose gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the processes, in the shape of `tensor`."""
        total = tensor.clone()
        torch_dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        """Return the sum of the gradients, since every process's result depends on this process's tensor."""
        grad = grad.clone()
        torch_dist.all_reduce(grad)
        return grad


def differentiable_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of `tensor` over the processes; gradients flow back to each of them."""
    return _SummedOverProcesses.apply(tensor) if in_group() else tensor


def broadcast_object(value: T) -> T:
    """Return the main process's `value` on every process."""
    if not in_group():
        return value
    box = [value]
    torch_dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: T) -> list[T]:
    """Return the `value` of every process, in the order of their ranks, on every process."""
    if not in_group():
        return [value]
    values: list[Any] = [None] * world_size()
    torch_dist.all_gather_object(values, value)
    return values


class PeerError(ConfigError):
    """Another process cannot go on and says why; this one only stops."""


def call_first_on_node(function: Callable[[], T]) -> T:
    """Return function() of every process, called by one process of each node before the others, e.g. to download.

    Raises:
        PeerError: the process that went first on some node failed (there, its own error is raised).
    """
    first = _local_rank == 0 or not in_group()
    result, error = None, None
    if first:
        try:
            result = function()
        except Exception as caught:  # raised again below, once the waiting processes know
            error = caught
    failed = [text for text in gather_objects(str(error) if error else None) if text]
    if error:
        raise error
    if failed:
        raise PeerError(failed[0])
    return result if first else function()


def wrap_model(model: nn.Module, device: torch.device, example: torch.Tensor) -> nn.Module:
    """Return the model with gradients averaged over the processes; alone, the model itself.

    Buffers (batch norm's running statistics) are not exchanged at every step: see `broadcast_buffers`.

    Args:
        model: the model, on `device`.
        device: this process's device.
        example: images (N, 3, H, W) on `device`, like those to come.
    """
    if not in_group():
        return model
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    exchange = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before torch 2.15
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **{exchange: False},
    )
    _settle_buckets(wrapped, example)
    return wrapped


def _settle_buckets(wrapped: DistributedDataParallel, example: torch.Tensor) -> None:
    """Let DDP order its buckets, without a trace on the model.

    It does so after the first backward of a process. The order decides in which order the gradients of three or more
    processes are summed, so the step after a resume would differ in the last bit from the same step without one.
    """
    buffers = [buffer.clone() for buffer in wrapped.module.buffers()]
    wrapped.train()
    for _ in range(2):  # the order is taken up by the second forward
        wrapped(example).sum().backward()
    wrapped.zero_grad()
    with torch.no_grad():
        for buffer, before in zip(wrapped.module.buffers(), buffers, strict=True):
            buffer.copy_(before)


def without_gradient_sync(model: nn.Module, enabled: bool) -> contextlib.AbstractContextManager:
    """Return the context of a micro-batch whose gradients only accumulate, or of an ordinary one."""
    return model.no_sync() if enabled and isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


def broadcast_buffers(model: nn.Module) -> None:
    """Give every process the main process's buffers: those that are evaluated and saved."""
    if in_group():
        for buffer in model.buffers():
            torch_dist.broadcast(buffer, src=0)
