"""DistributedDataParallel: gradients are averaged by an all-reduce of each bucket during the backward pass."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distribuuuu.distributed.comm import all_reduce_max, is_distributed
from distribuuuu.distributed.sharding import is_sharded, restored, sum_output

# Compiled shapes of a model or of the normalization, after which torch would run eagerly, with other bits: more than
# any progressive resizing has sizes.
MAX_GRAPHS = 4096


def wrap_model(
    model: nn.Module, device: torch.device, example: torch.Tensor, unused: Sequence[str] = (), find_unused: bool = False
) -> nn.Module:
    """Return the model wrapped in DDP; the model itself if there is one process or it is sharded.

    Buffers (running statistics of batch norm) are not synchronized in a step: see replicas.py.

    Args:
        example: images (N, 3, H, W) on `device`, of the size of training.
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
    with restored(model):  # of a run that is resumed, each process has its own buffers
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=25,
            gradient_as_bucket_view=True,
            find_unused_parameters=bool(all_reduce_max([find_unused])[0]),
            **settings,
        )
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


def compile_model(model: nn.Module, mode: str) -> None:
    """Compile a model in place at its first forward pass, for each shape separately; names and weights stay.

    With dynamic shapes, the code of a step would depend on the shapes that this process has computed before, so a
    resumed run would differ from an uninterrupted one in the last bits. `mode` is one of torch.compile. With the result
    of `wrap_model`, the compiler splits the backward pass at the all-reduces.
    """
    model.compile(mode=mode, dynamic=False)
    known = torch._dynamo.config
    prefix = "recompile" if hasattr(known, "recompile_limit") else "cache_size"  # torch < 2.7
    for name in (f"{prefix}_limit", f"accumulated_{prefix}_limit"):
        setattr(known, name, MAX_GRAPHS)
