"""Batch-norm statistics over many images instead of a moving average (Wu and Johnson, arXiv 2105.07576)."""

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from distribuuuu.distributed.comm import marked, scaled_all_reduce
from distribuuuu.engine.run import Run


def recompute_statistics(run: Run, model: nn.Module) -> None:
    """Compute the statistics of a model of a run over MODEL.PRECISE_BN training images of its epoch."""
    images = run.train_loader.iter_images(run.state.seed, run.state.epoch, run.cfg.MODEL.PRECISE_BN)
    batches = marked(images, "precise batch norm")
    compute_precise_statistics(model, batches, run.state.precision.autocast, run.task.train_mode)
    run.train_loader.pop_data_time()  # no step has waited for it


@torch.no_grad()
def compute_precise_statistics(
    model: nn.Module,
    batches: Iterable[torch.Tensor],
    autocast: Callable = contextlib.nullcontext,
    train_mode: Callable[[nn.Module], object] = nn.Module.train,
) -> None:
    """Set the running statistics of batch-norm layers to those of their inputs over the given batches (N, 3, H, W).

    Batch norm normalizes by the batch meanwhile, as in training; other layers are in evaluation mode (no dropout).
    Batch norms that are frozen, or that `train_mode` keeps in evaluation mode, keep their statistics, and all layers
    their batch counters. Every process must call it with the unwrapped model and its own images; all of them count.
    `autocast` is the context of a forward pass.
    """
    train_mode(model)
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    sums = {layer: _zeros(layer) for layer in norms if layer.training}
    counters = {layer: layer.get_buffer("num_batches_tracked").clone() for layer in sums}
    model.eval()

    def add(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        values, own = inputs[0].float(), sums[layer]  # type: ignore[index]  # a batch norm
        axes = [0, *range(2, values.dim())]
        own[0] += values.numel() // values.shape[1]
        own[1] += values.sum(axes, dtype=own.dtype)
        own[2] += values.square().sum(axes, dtype=own.dtype)

    handles = [layer.register_forward_pre_hook(add) for layer in sums]
    try:
        for layer in sums:
            layer.training = True
        # The hooks would make a compiled model compile again at every call.
        with torch.compiler.set_stance("force_eager") if model._compiled_call_impl else contextlib.nullcontext():
            for images in batches if sums else ():
                with autocast():
                    model(images)
    finally:
        for handle in handles:
            handle.remove()
        for layer, counter in counters.items():
            layer.get_buffer("num_batches_tracked").copy_(counter)
        model.eval()
    scaled_all_reduce(list(sums.values()), scale=1.0)
    for layer, (count, total, squares) in sums.items():
        mean = total / count.clamp_min(1)
        variance = (squares / count.clamp_min(1) - mean.square()).clamp_min(0) * count / (count - 1).clamp_min(1)
        for name, value in (("running_mean", mean), ("running_var", variance)):
            buffer = layer.get_buffer(name)
            buffer.copy_(torch.where(count > 0, value, buffer))  # a layer that the model skips keeps its own


def _zeros(layer: _BatchNorm) -> torch.Tensor:
    """Return count, sum and sum of squares of a layer's inputs per channel, in float64 (float32 on MPS)."""
    device = layer.get_buffer("running_mean").device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.zeros(3, layer.num_features, dtype=dtype, device=device)
