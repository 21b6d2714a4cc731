"""Grad-CAM (Selvaraju et al., arXiv 1610.02391): which regions of an image speak for a class."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Tokens of a transformer that stand for no region: the class token and registers.
_MAX_PREFIX = 8


def _as_map(output: torch.Tensor) -> torch.Tensor | None:
    """Return activations as (N, channels, height, width); None if they have no grid of more than one region.

    Args:
        output: (N, channels, height, width); (N, height, width, channels); or tokens (N, tokens, channels), the last
            of which form a square grid.
    """
    if output.ndim == 4:
        _, first, second, last = output.shape
        is_channels_last = first == second and last != second
        grid = output.permute(0, 3, 1, 2) if is_channels_last else output
        return grid if min(grid.shape[2:]) > 1 else None
    side = math.isqrt(output.shape[1]) if output.ndim == 3 else 0
    if side < 2 or output.shape[1] - side * side > _MAX_PREFIX:
        return None
    return output[:, -side * side :].transpose(1, 2).unflatten(2, (side, side))


def compute_saliency(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
    """Return how much each region speaks for a class: float32 (N, height, width), 0 to 1, in the size of the images.

    The activations are those of the last layer, in the order of the forward pass, with a grid of regions that all reach
    the output: the last feature map of a convolutional net; the tokens after the last norm layer before an attention
    layer, or before the pooling, of a transformer. Their gradients, averaged over the regions, are the weights of the
    channels.

    Args:
        model: in evaluation mode: images (N, 3, H, W) -> logits (N, classes).
        images: normalized (N, 3, H, W).
        targets: the class of each image, int64 (N,).

    Returns:
        None if no layer has such activations, or the output is not one row of scores for each image, e.g. a dict.
    """
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, _: Any, output: Any) -> Any:
        is_tensor = isinstance(output, torch.Tensor) and output.requires_grad
        # Of the layers of a transformer, those after a norm layer have comparable channels.
        if not is_tensor or _as_map(output) is None or output.ndim == 3 and "Norm" not in type(module).__name__:
            return None
        kept.append(output)
        return output.clone()  # the next layer may change its input in place

    hooks = [module.register_forward_hook(keep) for module in model.modules() if module is not model]
    try:
        with torch.enable_grad():
            logits = model(images.detach().requires_grad_())
            if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
                return None
            score = logits.float().gather(1, targets[:, None]).sum()
            gradients = torch.autograd.grad(score, kept, allow_unused=True) if kept else ()
    finally:
        for hook in hooks:
            hook.remove()
    has_tokens = any(output.ndim == 3 for output in kept)
    for output, gradient in reversed(list(zip(kept, gradients, strict=True))):
        if gradient is None or has_tokens and output.ndim == 4:  # queries and keys of the heads are (N, heads, ...)
            continue
        activations, slopes = _as_map(output.detach()), _as_map(gradient)
        assert activations is not None and slopes is not None
        if slopes.ne(0).any(dim=1).flatten(1).sum(dim=1).min() > 1:
            weighted = (activations * slopes.mean(dim=(2, 3), keepdim=True)).sum(dim=1).relu()
            scaled = F.interpolate(weighted[:, None], images.shape[2:], mode="bilinear", align_corners=False)[:, 0]
            return scaled / scaled.amax(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(scaled.dtype).tiny)
    return None
