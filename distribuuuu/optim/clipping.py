"""OPTIM.CLIP_NORM: clipping of gradients by their norm."""

from collections.abc import Iterable
from typing import Any

import torch

from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.comm import to_local


def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float) -> None:
    """Scale the gradients of parameters, all sharded or none, as one vector down to the norm `max_norm`.

    The bits are those of `torch.nn.utils.clip_grad_norm_`, without its calls for each gradient. Every process must call
    it. It never waits for the device, unless the gradients are in host memory.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if not parameters:
        return
    grads: Any = [parameter.grad for parameter in parameters]
    sharded = hasattr(parameters[0], "to_local")
    grads = [to_local(grad) for grad in grads] if sharded else grads
    with torch.set_grad_enabled(False):  # half the calls of no_grad
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        norm = _whole_norm(norm) if sharded else norm
        factor = ((norm + 1e-6).reciprocal() * max_norm).clamp(max=1.0)  # a division by a tensor calls Python
        torch._foreach_mul_(grads, factor)


def _whole_norm(norm: torch.Tensor) -> torch.Tensor:
    """Return the norm of whole gradients from that of this process's shards; every process must call it."""
    square = norm.square()
    dist.scaled_all_reduce([square], scale=1.0)
    return square.sqrt()
