"""Exponential moving average of the weights (Polyak and Juditsky, 1992)."""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.distributed.comm import to_local


@dataclass(eq=False)
class Ema:
    """Average of a model's weights with a half-life in images, so that it means the same at any batch size.

    A step sets each weight of the average to `decay * average + (1 - decay) * current`, with
    `decay = 0.5 ** (images of the step / half-life)`. Buffers that are not floating-point (counts) are copied.

    Attributes:
        model: the average; at the construction the model on its device, with whose weights the average starts.
        half_life: in images.
        ramp_up: maximum of the half-life as a share of the images seen, to forget the random initial weights soon
            (Karras et al., arXiv 2206.00364, appendix F); 0: no maximum.
        every_steps: steps from one update to the next, counted from the first step of an epoch.
        start_epoch: epoch at which averaging starts; until its first step, updates copy the weights.
    """

    model: nn.Module
    half_life: float
    ramp_up: float = 0.0
    every_steps: int = 1
    start_epoch: int = 0

    def __post_init__(self):
        model, self.model = self.model, copy.deepcopy(self.model).eval().requires_grad_(False)
        self.pair_with(model)

    def pair_with(self, model: nn.Module) -> None:
        """Average `model` from now on; call it after tensors of either model have been replaced, e.g. by a move.

        Of sharded tensors each process averages its shard.
        """
        averaged: list[tuple[torch.Tensor, torch.Tensor]] = []
        averaged += zip(self.model.parameters(), model.parameters(), strict=True)
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        for pair in zip(self.model.buffers(), model.buffers(), strict=True):
            (averaged if pair[0].is_floating_point() else copied).append(pair)
        self._averages, self._currents = [to_local(own) for own, _ in averaged], [to_local(new) for _, new in averaged]
        self._copies, self._originals = [own for own, _ in copied], [new for _, new in copied]

    def share(self, epoch: int, step: int, images_seen: int, global_batch: int) -> float:
        """Return the share that the weights after the step at (epoch, step), both from 0, get in the average."""
        if self.start_epoch > 0 and (epoch, step) <= (self.start_epoch, 0):
            return 1.0
        half_life = min(self.half_life, self.ramp_up * images_seen) if self.ramp_up else self.half_life
        return 1 - 0.5 ** (global_batch * self.every_steps / half_life)

    def finish_step(self, epoch: int, step: int, images_seen: int, global_batch: int) -> None:
        """Update the average if it is due after the step at (epoch, step)."""
        if step % self.every_steps == 0:
            self.update(self.share(epoch, step, images_seen, global_batch))

    def update(self, share: Any) -> None:
        """Give the weights a share of the average, a number or a tensor () on the device, without waiting for it."""
        with torch.set_grad_enabled(False):  # half the calls of no_grad
            if self._averages:
                if isinstance(share, torch.Tensor):  # one kernel for all weights takes tensors of their shapes
                    share = torch._foreach_mul(torch._foreach_pow(self._averages, 0), share)
                torch._foreach_lerp_(self._averages, self._currents, share)
            if self._copies:
                torch._foreach_copy_(self._copies, self._originals)


def build_averages(cfg, model: nn.Module, further: Mapping[str, Any]) -> dict[str, Any]:
    """Return the averages of a run's weights by kind, the last one taking precedence; `further` are those of the task.

    Raises:
        ConfigError: a name of the task is not that of a kind.
    """
    if wrong := [name for name in further if not re.fullmatch("[a-z0-9]+", name) or name in ("raw", "ema")]:
        message = f"got {wrong[0]!r} from averages; expected a name of a-z and 0-9 other than raw and ema"
        raise ConfigError(Problem("TASK.NAME", message, cfg.origins))
    ema = cfg.EMA
    own = (model, ema.HALF_LIFE, ema.RAMP_UP, ema.EVERY_STEPS, ema.START_EPOCH)
    return {**({"ema": Ema(*own)} if ema.HALF_LIFE else {}), **dict(sorted(further.items(), reverse=True))}
