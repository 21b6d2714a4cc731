"""One model on many processes: gradients averaged, buffers shared. Beside distributed.py, the only user of DDP."""

import contextlib
import inspect
from collections.abc import Callable, Sequence

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from distribuuuu.distributed.comm import all_reduce_max, is_distributed
from distribuuuu.distributed.fsdp import is_sharded

# Gradients travel in this type and are added up in it; the model's own stays as it is.
COMPRESSIONS: dict[str, Callable | None] = {
    "none": None,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


def wrap_model(
    model: nn.Module,
    device: torch.device,
    example: torch.Tensor,
    bucket_mb: float = 25,
    compress: str = "none",
    unused: Sequence[str] = (),
    find_unused: bool = False,
) -> nn.Module:
    """Return the model with gradients averaged over the processes; alone or sharded, the model itself.

    Buffers (batch norm's running statistics) are not exchanged at every step: see `broadcast_buffers`.

    Args:
        model: the model, on `device`.
        device: this process's device.
        example: images (N, 3, H, W) on `device`, like those to come.
        bucket_mb: MiB of gradients that are sent at once.
        compress: the type they are sent in: one of COMPRESSIONS.
        unused: names of the parameters that get no gradient on any process. They are frozen: optimizers skip them
            anyway, and to look for them DDP would wait for the device in each step.
        find_unused: other parameters may get no gradient in a step; if so on any process, DDP looks for them in each.
    """
    if not is_distributed() or is_sharded(model):
        return model
    for name in unused:
        model.get_parameter(name).requires_grad_(False)
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    exchange = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before torch 2.15
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,
        find_unused_parameters=bool(all_reduce_max([find_unused])[0]),
        **{exchange: False},
    )
    if COMPRESSIONS[compress]:
        wrapped.register_comm_hook(None, COMPRESSIONS[compress])
    _warm_up_buckets(wrapped, example[:2])  # two are enough for batch norm, and take little memory
    return wrapped


def _warm_up_buckets(wrapped: DistributedDataParallel, example: torch.Tensor) -> None:
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


def compile_model(model: nn.Module, mode: str) -> None:
    """Have a wrapped model compiled at its first forward pass; "none": leave it. Names and weights stay as they are.

    Args:
        model: what `wrap_model` returned: the compiler then cuts the backward pass where gradients are sent.
        mode: "none", or a mode of torch.compile.
    """
    if mode != "none":
        model.compile(mode=mode)


def without_gradient_sync(model: nn.Module, enabled: bool) -> contextlib.AbstractContextManager:
    """Return the context of a micro-batch whose gradients only accumulate, or of an ordinary one.

    A sharded model sends them always: to keep them would take the memory of a whole model.
    """
    return model.no_sync() if enabled and isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


def broadcast_buffers(model: nn.Module) -> None:
    """Give every process the main process's buffers: those that are evaluated and saved."""
    if is_distributed():
        for buffer in model.buffers():
            torch_dist.broadcast(buffer, src=0)
