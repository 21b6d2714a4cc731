"""Synchronized batch norm over the images of all processes, on any device.

torch.nn.SyncBatchNorm refuses CPU tensors and waits for the device in each layer. `ProcessBatchNorm` computes the same:
on CUDA with the kernels of torch, elsewhere with one differentiable sum, so that every config can run and be tested
anywhere.
"""

from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from distribuuuu.config import ConfigError
from distribuuuu.distributed import comm as dist


class ProcessBatchNorm(_BatchNorm):
    """Batch norm with training statistics of all processes (Ioffe and Szegedy, arXiv 1502.03167).

    Input and output: (N, C, ...), where N may differ between processes. `drop` and `act` of a converted layer follow.
    """

    def __init__(self, *args: Any, drop: nn.Module | None = None, act: nn.Module | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.drop = drop or nn.Identity()
        self.act = act or nn.Identity()

    def _check_input_dim(self, images: torch.Tensor) -> None:
        if images.dim() < 2:
            raise ValueError(f"batch norm takes (N, C, ...), not {images.dim()} dimensions")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Normalize (N, C, ...) by the statistics of all processes in training, by the running ones in evaluation."""
        out = self._synchronize(images) if self.training and dist.is_distributed() else super().forward(images)
        return self.act(self.drop(out))

    @torch.compiler.disable  # with the collective in a graph, two processes got other outputs from the compiler
    def _synchronize(self, images: torch.Tensor) -> torch.Tensor:
        if not images.is_cuda:
            return self._normalize(images)
        statistics = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        settings = (self.eps, self._next_momentum(), torch_dist.group.WORLD, dist.world_size())
        return _FusedNorm.apply(images, self.weight, self.bias, *statistics, *settings)

    def _next_momentum(self) -> float:
        """Count a batch; return the weight of its statistics in the running ones, if there are any."""
        if self.num_batches_tracked is None:
            return 0.0
        self.num_batches_tracked += 1
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def _normalize(self, images: torch.Tensor) -> torch.Tensor:
        axes, dtype = [0, *range(2, images.dim())], images.dtype
        # As in torch's batch norm, half precision (autocast) is input and output, but nothing is summed in it.
        images = images.to(torch.promote_types(dtype, torch.float32))
        mean, var, total = _global_statistics(images, axes)
        if self.running_mean is not None and self.running_var is not None:
            momentum = self._next_momentum()
            self.running_mean.lerp_(mean.detach(), momentum)
            self.running_var.lerp_(var.detach() * total / (total - 1), momentum)
        scale = torch.rsqrt(var + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        shape = [1, -1] + [1] * (images.dim() - 2)
        return (images * scale.view(shape) + shift.view(shape)).to(dtype)


class _FusedNorm(SyncBatchNorm):
    """torch's function of SyncBatchNorm, whose forward pass waits for the device to search for empty batches."""

    @staticmethod
    def forward(ctx, images, weight, bias, running_mean, running_var, eps, momentum, group, num_processes):
        """Return normalized images and update the running statistics; every process has at least one image."""
        layout = torch.channels_last if images.dim() == 4 else torch.contiguous_format
        images = images if images.is_contiguous(memory_format=layout) else images.contiguous()
        mean, invstd = torch.batch_norm_stats(images, eps)
        own = torch.cat([mean, invstd, mean.new_full((1,), images.numel() / images.shape[1])])
        gathered = own.new_empty(num_processes, len(own))
        dist.all_gather_single(gathered.view(-1), own, group)
        parts = gathered.split([len(mean), len(mean), 1], dim=1)
        means, invstds, counts = (part.contiguous() for part in parts)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            images, means, invstds, running_mean, running_var, momentum, eps, counts.flatten()
        )
        ctx.save_for_backward(images, weight, mean, invstd, counts.int())
        ctx.process_group = group
        return torch.batch_norm_elemt(images, weight, bias, mean, invstd, eps)


def _global_statistics(images: torch.Tensor, axes: list[int]) -> tuple[torch.Tensor, ...]:
    """Return mean (C,), biased variance (C,) and count () of all processes' images, by one differentiable sum.

    Each process computes its variance around its own mean (Chan et al., 1979): sums of squares around 0 would cancel
    for a variance that is small beside the mean. The remaining differences of squares are computed in float64.
    """
    wide = torch.float32 if images.device.type == "mps" else torch.float64
    own_var, own_mean = (value.to(wide) for value in torch.var_mean(images, axes, correction=0))
    count = own_mean.new_full((1,), images.numel() / images.shape[1])
    sums = dist.differentiable_sum(torch.cat([own_mean * count, (own_var + own_mean.square()) * count, count]))
    total = sums[-1].detach()
    mean, mean_of_squares = (sums[:-1] / total).chunk(2)
    var = (mean_of_squares - mean.square()).clamp_min(0)
    return mean.to(images.dtype), var.to(images.dtype), total.to(images.dtype)


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Return the model with every batch norm synchronized; raise ConfigError for one that cannot be converted."""
    if not dist.is_distributed():
        return module
    for name, child in module.named_children():
        setattr(module, name, convert_sync_batchnorm(child))
    if not isinstance(module, _BatchNorm):
        return module
    is_fused = hasattr(module, "act") and hasattr(module, "drop")
    if type(module) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) and not is_fused:
        raise ConfigError(f"MODEL.SYNCBN: {type(module).__name__} cannot be synchronized; set it False")
    after: dict[str, Any] = {"drop": module.drop, "act": module.act} if is_fused else {}
    settings = (module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
    converted = ProcessBatchNorm(*settings, **after)
    converted._parameters.update(module._parameters)
    converted._buffers.update(module._buffers)
    return converted.train(module.training)
