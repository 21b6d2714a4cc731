"""Batch norm's statistics over many images instead of a moving average (Wu and Johnson, arXiv 2105.07576)."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from distribuuuu.distributed.comm import scaled_all_reduce


class _Moments:
    """Count, sum and sum of squares of what comes into a layer, for each channel, in float64."""

    def __init__(self, layer: _BatchNorm):
        dtype = torch.float32 if layer.running_mean.device.type == "mps" else torch.float64
        self.sums = torch.zeros(3, layer.num_features, dtype=dtype, device=layer.running_mean.device)

    def __call__(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """Take in a batch (N, C, ...), as a hook before the layer's forward pass."""
        values, dtype = inputs[0].float(), self.sums.dtype
        axes = [0, *range(2, values.dim())]
        self.sums[0] += values.numel() // values.shape[1]
        self.sums[1] += values.sum(axes, dtype=dtype)
        self.sums[2] += values.square().sum(axes, dtype=dtype)

    def write_to(self, layer: _BatchNorm) -> None:
        """Make the layer's running statistics those of all that was taken in; the variance is the unbiased one."""
        count, total, squares = self.sums
        seen = count > 0  # a layer may be out of use
        mean = total / count.clamp_min(1)
        variance = (squares / count.clamp_min(1) - mean.square()).clamp_min(0) * count / (count - 1).clamp_min(1)
        layer.running_mean.copy_(torch.where(seen, mean, layer.running_mean))
        layer.running_var.copy_(torch.where(seen, variance, layer.running_var))


@torch.no_grad()
def compute_precise_statistics(
    model: nn.Module, batches: Iterable[torch.Tensor], autocast: Callable = contextlib.nullcontext
) -> None:
    """Set the running statistics of the batch norm layers to those of the inputs they meet over some batches.

    Batch norm normalises by the batch meanwhile, as in training; all else is as in evaluation (no dropout). Layers that
    stay in evaluation when their model is trained keep their statistics. Every process must call it, each with its own
    images: the sums are those of all of them.

    Args:
        model: the bare model.
        batches: images (N, 3, H, W).
        autocast: the context of a forward pass.
    """
    layers = _trained_layers(model)
    moments = [_Moments(layer) for layer in layers]
    # A compiled model would be compiled again each time, with the new hooks.
    eager = torch.compiler.set_stance("force_eager") if model._compiled_call_impl else contextlib.nullcontext()
    with eager, _collecting(model, layers, moments):
        for images in batches:
            with autocast():
                model(images)
    scaled_all_reduce([moment.sums for moment in moments], scale=1.0)
    for layer, moment in zip(layers, moments, strict=True):
        moment.write_to(layer)


def _trained_layers(model: nn.Module) -> list[_BatchNorm]:
    model.train()
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    return [layer for layer in norms if layer.training]


@contextlib.contextmanager
def _collecting(model: nn.Module, layers: list[_BatchNorm], moments: list[_Moments]) -> Iterator[None]:
    """Normalise by the batch within the block, and leave no other trace of it on the model."""
    counts = [layer.num_batches_tracked.clone() for layer in layers]
    model.eval()
    handles = [layer.register_forward_pre_hook(hook) for layer, hook in zip(layers, moments, strict=True)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer, count in zip(layers, counts, strict=True):
            layer.num_batches_tracked.copy_(count)
        model.eval()
