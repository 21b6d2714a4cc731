"""OPTIM.CLIP: clipping of gradients by their norm, and of each unit by the norm of its weights."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.comm import to_local


def choose_clipper(
    kind: str, norm: float, limit: float, head: Collection[torch.Tensor]
) -> Callable[[Iterable[torch.Tensor]], None]:
    """Return clip(parameters) of an OPTIM.CLIP, see `build_clipper`."""
    if kind == "norm":
        return lambda parameters: clip_grad_norm(parameters, norm)
    if kind == "agc":
        return lambda parameters: clip_adaptively(parameters, limit, head)
    return lambda parameters: torch.nn.utils.clip_grad_value_(parameters, limit)


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
        norm = whole_norms(norm, parameters[0]) if sharded else norm
        factor = ((norm + 1e-6).reciprocal() * max_norm).clamp(max=1.0)  # a division by a tensor calls Python
        torch._foreach_mul_(grads, factor.to(grads[0].device))


def whole_norms(norms: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return the L2 norms of whole tensors from those of this process's rows, if they are sharded like a parameter.

    Every process must call it.
    """
    if not hasattr(parameter, "to_local"):
        return norms
    from distribuuuu.distributed.fsdp import mesh_device

    squares = norms.square().to(mesh_device(parameter))
    dist.scaled_all_reduce([squares], scale=1.0)
    return squares.sqrt()


@torch.no_grad()
def clip_adaptively(parameters: Iterable[torch.Tensor], limit: float, head: Collection[torch.Tensor]) -> None:
    """Scale the gradient of each unit, but for the head's, down to `limit` times the norm of its weights, 1e-3 or more.

    A unit is a row (the first dimension) of a weight, or a whole vector (Brock et al., arXiv 2102.06171). Every process
    must call it.
    """
    left_out = {id(parameter) for parameter in head}
    parameters = [weight for weight in parameters if weight.grad is not None and id(weight) not in left_out]
    pairs = [(to_local(weight), to_local(weight.grad)) for weight in parameters if weight.grad is not None]
    parts = [tensor.norm() for pair in pairs for tensor in pair if tensor.ndim <= 1]
    # The rows of a vector may be those of several processes.
    vectors = iter(whole_norms(torch.stack(parts), parameters[0]).to(parts[0].device) if parts else ())
    for weight, grad in pairs:
        dims = tuple(range(1, weight.ndim))
        own, norm = (
            torch.linalg.vector_norm(tensor, dim=dims, keepdim=True) if dims else next(vectors)
            for tensor in (weight, grad)
        )
        most = own.clamp(min=1e-3) * limit
        grad.mul_((most / norm.clamp(min=1e-6)).masked_fill_(norm < most, 1.0))
