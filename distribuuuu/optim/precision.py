"""Mixed precision and clipping: autocast, loss scaling for float16, and what happens to gradients before a step."""

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

logger = logging.getLogger(__name__)

AUTOCAST_DTYPES: dict[str, torch.dtype | None] = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast of forward passes and, for float16, loss scaling (Micikevicius et al., arXiv 1710.03740).

    Small gradients would underflow in float16, so the loss is multiplied by a scale, which is halved after a step whose
    gradients are not finite; that step is skipped.

    Args:
        name: one of AUTOCAST_DTYPES.
        cache: keep the cast copy of a weight for the whole forward pass, in case it is used again.
    """

    def __init__(self, name: str = "none", device: torch.device | str = "cpu", cache: bool = True):
        self._dtype = AUTOCAST_DTYPES[name]
        self.device_type = torch.device(device).type
        self._cache = cache
        self._scaler = torch.amp.GradScaler(self.device_type) if name == "fp16" else None

    def autocast(self) -> contextlib.AbstractContextManager:
        if not self._dtype:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, self._dtype, cache_enabled=self._cache)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a loss (), scaled."""
        (self._scaler.scale(loss) if self._scaler else loss).backward()

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[Iterable[torch.Tensor]], None]) -> None:
        """Unscale the gradients, clip them with `clip(parameters)`, and take the optimizer's step.

        Waits for the device only with float16 and an optimizer that is not fused.
        """
        if self._scaler:
            self._scaler.unscale_(optimizer)
        clip([parameter for group in optimizer.param_groups for parameter in group["params"]])
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


def build_clipper(cfg) -> Callable[[Iterable[torch.Tensor]], None]:
    """Return clip(parameters): clip their gradients by their norm, OPTIM.CLIP_NORM.

    It never waits for the device. A gradient that is NaN stays so.
    """
    if not (norm := cfg.OPTIM.CLIP_NORM):
        return lambda parameters: None
    from distribuuuu.optim.clipping import clip_grad_norm

    return lambda parameters: clip_grad_norm(parameters, norm)
