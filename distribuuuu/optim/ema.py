"""A second set of weights: the exponential moving average of those that are trained (Polyak and Juditsky, 1992)."""

import copy

import torch
from torch import nn


class Ema:
    """The average of a model's weights, in which each image seen counts half after so many more of them.

    Every step moves each averaged number to `decay * average + (1 - decay) * current` with
    `decay = 0.5 ** (images of the step / half-life)`, so that the average means the same at any batch size. What is not
    a floating-point number (batch norm's counts) is copied.

    Args:
        model: the model, on its device, as it is at the start; the average begins there.
        half_life: in images.
        ramp_up: the half-life is at most this share of the images seen so far, so that the random weights of the start
            are soon forgotten (Karras et al., arXiv 2206.00364, appendix F); 0: the half-life is always the same.
        buffers: "average" them like weights, or "copy" them as they are.
    """

    def __init__(self, model: nn.Module, half_life: float, ramp_up: float = 0.0, buffers: str = "average"):
        self.half_life = half_life
        self.ramp_up = ramp_up
        self.buffers = buffers
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.pair_with(model)

    def pair_with(self, model: nn.Module) -> None:
        """Average a model from now on: call it when the tensors of either have been replaced, e.g. on another device.

        Of sharded tensors each process averages its part.
        """
        pairs = list(zip(self.model.parameters(), model.parameters(), strict=True))
        copied = []
        for pair in zip(self.model.buffers(), model.buffers(), strict=True):
            averaged = self.buffers == "average" and pair[0].is_floating_point()
            (pairs if averaged else copied).append(pair)
        self._averages, self._currents = [_local(a) for a, _ in pairs], [_local(b) for _, b in pairs]
        self._copies, self._originals = [a for a, _ in copied], [b for _, b in copied]

    def decay(self, num_images: int, images_seen: int) -> float:
        """Return the share of the average that a step of `num_images` leaves, the last of `images_seen` in the run."""
        half_life = min(self.half_life, self.ramp_up * images_seen) if self.ramp_up else self.half_life
        return 0.5 ** (num_images / half_life)

    @torch.no_grad()
    def update(self, num_images: int, images_seen: int) -> None:
        """Take in the weights after a step; waits for nothing."""
        share = 1 - self.decay(num_images, images_seen)
        if self._averages:
            torch._foreach_lerp_(self._averages, self._currents, share)
        if self._copies:
            torch._foreach_copy_(self._copies, self._originals)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process has of a tensor, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def build_ema(cfg, model: nn.Module) -> Ema | None:
    """Return the average of EMA.HALF_LIFE; None when it is 0."""
    settings = cfg.EMA
    return Ema(model, settings.HALF_LIFE, settings.RAMP_UP, settings.BUFFERS) if settings.HALF_LIFE else None
