"""LOG.LAYER_NORMS: the norms of each parameter, of its gradient and of its update."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distribuuuu.distributed.comm import to_local
from distribuuuu.optim.clipping import whole_norms


class LayerNorms:
    """L2 norms of each trained parameter before a step, of its gradient and of its update, for LOG.LAYER_NORMS.

    The gradient is what the optimizer gets: averaged over the processes, without loss scaling, and clipped. The norms
    stay on the device until they are read. A step that is due takes the memory of a copy of the parameters; one that
    the optimizer skips has no norms. The model may be sharded, and has no wrapper.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, is_due: Callable[[], bool]):
        self._named, self._is_due, self._norms = dict(model.named_parameters()), is_due, torch.empty(0)
        self._trained: dict[str, torch.Tensor] = {}
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    @torch.no_grad()
    def _begin(self, *_: Any) -> None:
        named = self._named if self._is_due() else {}
        self._trained = {name: weight for name, weight in named.items() if weight.grad is not None}
        if self._trained:
            self._weights = [to_local(weight) for weight in self._trained.values()]
            grads = [to_local(weight.grad) for weight in self._trained.values() if weight.grad is not None]
            self._updates = list(torch._foreach_neg(self._weights))
            self._norms = torch.stack([*torch._foreach_norm(self._weights), *torch._foreach_norm(grads)])

    @torch.no_grad()
    def _end(self, *_: Any) -> None:
        if self._trained:
            torch._foreach_add_(self._updates, self._weights)
            norms = torch.cat([self._norms, torch.stack(torch._foreach_norm(self._updates))])
            self._norms, self._updates = whole_norms(norms, next(iter(self._trained.values()))), []

    def pop(self) -> dict[str, dict[str, list[float]]]:
        """Return {"layer_norms": {name: [weight, gradient, update]}} of the last due step; empty if it was skipped.

        Waits for the device.
        """
        trained, self._trained = self._trained, {}
        if not self._norms.isfinite().all():  # a fused optimizer skips it in its kernel
            return {}
        rows = [[float(f"{norm:.6g}") for norm in row] for row in self._norms.view(3, -1).T.tolist()] if trained else []
        return {"layer_norms": dict(zip(trained, rows, strict=True))} if trained else {}


def build_layer_norms(cfg, state: Any, steps_of: Callable[[int], int]) -> LayerNorms:
    """Return the norms of a run, due before each row of metrics; `steps_of` returns the number of steps of an epoch."""
    every = cfg.TRAIN.PRINT_FREQ
    is_due = lambda: (state.step + 1) % every == 0 or state.step + 1 == steps_of(state.epoch)  # noqa: E731
    return LayerNorms(state.model, state.optimizer, is_due)
