"""Mixed precision and clipping: autocast, loss scaling for float16, and what happens to gradients before a step."""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from distribuuuu.distributed.sharding import clip_grad_norm, to_local, whole_norms

logger = logging.getLogger(__name__)

AUTOCAST_DTYPES: dict[str, torch.dtype | None] = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast of forward passes and, for float16, loss scaling (Micikevicius et al., arXiv 1710.03740).

    Small gradients would underflow in float16, so the loss is multiplied by a scale, which is halved after a step whose
    gradients are not finite; that step is skipped.

    Args:
        name: one of AUTOCAST_DTYPES.
        device: the device of the model.
        cache: keep the cast copy of a weight for the whole forward pass, in case it is used again.
    """

    def __init__(self, name: str = "none", device: torch.device | str = "cpu", cache: bool = True):
        self._dtype = AUTOCAST_DTYPES[name]
        self._device_type = torch.device(device).type
        self._cache = cache
        self._scaler = torch.amp.GradScaler(self._device_type) if name == "fp16" else None

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context of a forward pass."""
        if not self._dtype:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, self._dtype, cache_enabled=self._cache)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a loss (), scaled."""
        (self._scaler.scale(loss) if self._scaler else loss).backward()

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[Iterable[torch.Tensor]], None]) -> None:
        """Unscale the gradients, clip them with `clip(parameters)`, and take the optimizer's step.

        Waits for the device only with float16 and an optimizer that is not fused.
        """
        if self._scaler:
            self._scaler.unscale_(optimizer)
        clip(parameter for group in optimizer.param_groups for parameter in group["params"])
        if self._scaler:
            self._scaler.step(optimizer)
            self._scaler.update()
        else:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scaling; empty without float16."""
        return self._scaler.state_dict() if self._scaler else {}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Load the state of the loss scaling; an empty one, of a run without float16, is ignored."""
        if content and self._scaler:
            self._scaler.load_state_dict(content)


def build_precision(cfg, device: torch.device) -> Precision:
    """Return the precision TRAIN.AMP for training and evaluation."""
    if cfg.TRAIN.AMP == "fp16" and device.type == "cpu":
        logger.warning("TRAIN.AMP: fp16 on a CPU is many times slower than none; fix: set none or bf16")
    # FSDP frees the gathered weights of a block after its forward pass.
    return Precision(cfg.TRAIN.AMP, device, cache=cfg.DIST.SHARD != "fsdp")


def build_clipper(cfg, head: Collection[torch.Tensor] = ()) -> Callable[[Iterable[torch.Tensor]], None]:
    """Return clip(parameters): clip their gradients as OPTIM.CLIP says; OPTIM.CLIP_NORM 0: do nothing.

    It never waits for the device. A gradient that is NaN stays so.

    Args:
        cfg: the config.
        head: parameters that agc leaves out.
    """
    kind, max_norm, limit = cfg.OPTIM.CLIP, cfg.OPTIM.CLIP_NORM, cfg.OPTIM.CLIP_LIMIT
    left_out = {id(parameter) for parameter in head}

    def clip(parameters: Iterable[torch.Tensor]) -> None:
        if kind == "agc":
            clip_adaptively((parameter for parameter in parameters if id(parameter) not in left_out), limit)
        elif kind == "value":
            grads = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
            torch._foreach_clamp_min_(grads, -limit)
            torch._foreach_clamp_max_(grads, limit)
        elif max_norm > 0:
            clip_grad_norm(parameters, max_norm)

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
