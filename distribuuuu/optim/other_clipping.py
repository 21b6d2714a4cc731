"""OPTIM.CLIP value and agc: clipping of each value, and of each unit by the norm of its weights."""

from collections.abc import Callable, Collection, Iterable

import torch

from distribuuuu.distributed.sharding import to_local, whole_norms


def build_other_clipper(
    kind: str, limit: float, head: Collection[torch.Tensor]
) -> Callable[[Iterable[torch.Tensor]], None]:
    """Return clip(parameters); arguments as of `build_clipper`."""
    left_out = {id(parameter) for parameter in head}

    def clip(parameters: Iterable[torch.Tensor]) -> None:
        if kind == "agc":
            clip_adaptively((parameter for parameter in parameters if id(parameter) not in left_out), limit)
        else:
            grads = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
            torch._foreach_clamp_min_(grads, -limit)
            torch._foreach_clamp_max_(grads, limit)

    return clip


@torch.no_grad()
def clip_adaptively(parameters: Iterable[torch.Tensor], limit: float, eps: float = 1e-3) -> None:
    """Scale the gradient of each unit down to `limit` times the norm of its weights, `eps` or more.

    A unit is a row (the first dimension) of a weight, or a whole vector (Brock et al., arXiv 2102.06171). Every process
    must call it.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
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
        most = own.clamp(min=eps) * limit
        grad.mul_(torch.where(norm < most, 1.0, most / norm.clamp(min=1e-6)))
