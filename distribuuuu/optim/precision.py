"""The floating-point type that a step computes in: float32, or bfloat16 or float16 wherever that is safe (autocast)."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

TYPES: dict[str, torch.dtype | None] = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Runs forward passes under autocast and, for float16, scales the loss (Micikevicius et al., arXiv 1710.03740).

    Small gradients would vanish in float16, so the loss is multiplied by a factor that follows what the gradients
    bear: after a step whose gradients are not finite, which is left out, it is halved.

    Args:
        name: one of TYPES.
        device: the device that computes.
        cache: keep a weight's copy in the type for the whole forward pass, in case that it is used again.
    """

    def __init__(self, name: str = "none", device: torch.device | str = "cpu", cache: bool = True):
        self._dtype = TYPES[name]
        self._device_type = torch.device(device).type
        self._cache = cache
        # Without float16 it passes everything through.
        self._scaler = torch.amp.GradScaler(self._device_type, enabled=name == "fp16")

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context of a forward pass."""
        if not self._dtype:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, self._dtype, cache_enabled=self._cache)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss (), scaled, to those of the parameters."""
        self._scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[Iterable[torch.Tensor]], None]) -> None:
        """Bring the gradients back to their scale, clip them, and take the optimizer's step.

        `clip` gets all parameters. Waits for the device only with float16 and an optimizer that is not fused.
        """
        self._scaler.unscale_(optimizer)
        clip(parameter for group in optimizer.param_groups for parameter in group["params"])
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the scale of the loss and how long it has been borne; empty without float16."""
        return self._scaler.state_dict()

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Go on with a saved scale; a run that had none begins with a fresh one."""
        if content and self._scaler.is_enabled():
            self._scaler.load_state_dict(content)


def build_precision(cfg, device: torch.device) -> Precision:
    """Return the precision of TRAIN.AMP, for training and evaluation."""
    # With FSDP a weight is whole only while its block computes.
    return Precision(cfg.TRAIN.AMP, device, cache=cfg.DIST.SHARD != "fsdp")
