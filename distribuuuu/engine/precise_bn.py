"""Batch-norm statistics over many images instead of a moving average (Wu and Johnson, arXiv 2105.07576)."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from distribuuuu.distributed.comm import marked, scaled_all_reduce
from distribuuuu.engine.run import Run


class _Moments:
    """Count, sum and sum of squares of a layer's inputs per channel, in float64 (float32 on MPS)."""

    def __init__(self, layer: _BatchNorm):
        device = layer.get_buffer("running_mean").device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.sums = torch.zeros(3, layer.num_features, dtype=dtype, device=device)

    def __call__(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """Add a batch (N, C, ...); a forward pre-hook of the layer."""
        values, dtype = inputs[0].float(), self.sums.dtype
        axes = [0, *range(2, values.dim())]
        self.sums[0] += values.numel() // values.shape[1]
        self.sums[1] += values.sum(axes, dtype=dtype)
        self.sums[2] += values.square().sum(axes, dtype=dtype)

    def write_to(self, layer: _BatchNorm) -> None:
        """Set the layer's running statistics to the mean and the unbiased variance."""
        count, total, squares = self.sums
        mean = total / count.clamp_min(1)
        variance = (squares / count.clamp_min(1) - mean.square()).clamp_min(0) * count / (count - 1).clamp_min(1)
        for name, value in (("running_mean", mean), ("running_var", variance)):
            buffer = layer.get_buffer(name)
            buffer.copy_(torch.where(count > 0, value, buffer))  # a layer that the model skips keeps its own


def recompute_statistics(run: Run, model: nn.Module) -> None:
    """Compute the statistics of a model of a run over MODEL.PRECISE_BN training images of its epoch."""
    images = run.train_loader.iter_images(run.state.stream_seed, run.state.epoch, run.cfg.MODEL.PRECISE_BN)
    compute_precise_statistics(model, marked(images, "precise batch norm"), run.state.precision.autocast)


@torch.no_grad()
def compute_precise_statistics(
    model: nn.Module, batches: Iterable[torch.Tensor], autocast: Callable = contextlib.nullcontext
) -> None:
    """Set the running statistics of batch-norm layers to those of their inputs over the given batches.

    Batch norm normalizes by the batch meanwhile, as in training; other layers are in evaluation mode (no dropout).
    Frozen batch norms keep their statistics. Every process must call it with its own images; all of them count.

    Args:
        model: the unwrapped model.
        batches: images (N, 3, H, W).
        autocast: the context of a forward pass.
    """
    model.train()
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    layers = [layer for layer in norms if layer.training]
    moments = [_Moments(layer) for layer in layers]
    # The hooks would make a compiled model compile again at every call.
    eager = torch.compiler.set_stance("force_eager") if model._compiled_call_impl else contextlib.nullcontext()
    with eager, _collecting(model, layers, moments):
        for images in batches:
            with autocast():
                model(images)
    scaled_all_reduce([moment.sums for moment in moments], scale=1.0)
    for layer, moment in zip(layers, moments, strict=True):
        moment.write_to(layer)


@contextlib.contextmanager
def _collecting(model: nn.Module, layers: list[_BatchNorm], moments: list[_Moments]) -> Iterator[None]:
    """Normalize by the batch and collect moments within the block; restore the batch counters after it."""
    counts = [layer.get_buffer("num_batches_tracked").clone() for layer in layers]
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
            layer.get_buffer("num_batches_tracked").copy_(count)
        model.eval()
