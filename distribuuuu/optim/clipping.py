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
        if sharded:  # so far, it is that of the shards of this process
            [square] = dist.scaled_all_reduce([norm.square()], scale=1.0)
            norm = square.sqrt()
        factor = ((norm + 1e-6).reciprocal() * max_norm).clamp(max=1.0)  # a division by a tensor calls Python
        torch._foreach_mul_(grads, factor)
