"""DistributedDataParallel: gradients are averaged by an all-reduce of each bucket during the backward pass."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from distribuuuu.distributed.comm import all_reduce_max, is_distributed
from distribuuuu.distributed.sharding import is_sharded

# Gradients are sent and summed in this type; the parameters keep theirs.
COMPRESSION_HOOKS: dict[str, Callable] = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}

# Compiled shapes of a model or of the normalization: more than any progressive resizing has sizes.
MAX_GRAPHS = 4096


def wrap_model(
    model: nn.Module,
    device: torch.device,
    example: torch.Tensor,
    bucket_mb: float = 25,
    compress: str = "none",
    unused: Sequence[str] = (),
    find_unused: bool = False,
) -> nn.Module:
    """Return the model wrapped in DDP; the model itself if there is one process or it is sharded.

    Buffers (running statistics of batch norm) are not synchronized in a step: see `broadcast_buffers`.

    Args:
        model: the model, on `device`.
        device: this process's device.
        example: images (N, 3, H, W) on `device`, of the size of training.
        bucket_mb: MiB of gradients in one all-reduce.
        compress: type of the gradients sent: 'none' (their own), 'bf16' or 'fp16'.
        unused: names of the parameters without a gradient on every process. They are frozen: optimizers skip them
            anyway, and DDP would have to wait for the device in each step to find them.
        find_unused: other parameters may get no gradient in a step; if so on any process, DDP searches in each step.
    """
    if not is_distributed() or is_sharded(model):
        return model
    for name in unused:
        model.get_parameter(name).requires_grad_(False)
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # torch < 2.15
    settings: dict[str, Any] = {sync_buffers: False}
    if "batched_grad_copy" in known and device.type == "cuda":  # one kernel for the gradients of a bucket
        settings["batched_grad_copy"] = True
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,
        find_unused_parameters=bool(all_reduce_max([find_unused])[0]),
        **settings,
    )
    if compress != "none":
        wrapped.register_comm_hook(None, COMPRESSION_HOOKS[compress])
    _warm_up_buckets(wrapped, example[:2])  # two images are enough for batch norm, and take little memory
    return wrapped


def _warm_up_buckets(wrapped: DistributedDataParallel, example: torch.Tensor) -> None:
    """Let DDP fix the order of its buckets, without an effect on the model.

    DDP reorders them after the first backward pass of a process. Their order decides in which order the gradients of
    three or more processes are summed, so a resumed run would differ from an uninterrupted one in the last bit.
    """
    wrapped.train()
    with restored(wrapped):
        for _ in range(2):  # the second forward pass applies the order
            sum_output(wrapped(example)).backward()


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


def compile_model(model: nn.Module, mode: str) -> None:
    """Compile a model in place at its first forward pass, for each shape separately; names and weights stay.

    With dynamic shapes, the code of a step would depend on the shapes that this process has computed before, so a
    resumed run would differ from an uninterrupted one in the last bits.

    Args:
        model: the result of `wrap_model`: the compiler then splits the backward pass at the all-reduces.
        mode: 'none' (do nothing), or a mode of torch.compile.
    """
    if mode != "none":
        model.compile(mode=mode, dynamic=False)
        _allow_graphs(MAX_GRAPHS)


def _allow_graphs(num: int) -> None:
    """Raise the number of shapes after which torch stops compiling and runs eagerly, with other bits."""
    known = torch._dynamo.config
    prefix = "recompile" if hasattr(known, "recompile_limit") else "cache_size"  # torch < 2.7
    for name in (f"{prefix}_limit", f"accumulated_{prefix}_limit"):
        setattr(known, name, num)


def without_gradient_sync(model: nn.Module, enabled: bool) -> contextlib.AbstractContextManager:
    """Return the context of a micro-batch whose gradients only accumulate if `enabled`, else a null context.

    A sharded model always reduces them: to accumulate them locally would take the memory of the full model.
    """
    return model.no_sync() if enabled and isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


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
