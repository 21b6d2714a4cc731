"""Resizing as OpenCV does it: INTER_LINEAR and INTER_AREA."""

import torch
from torch.nn.functional import embedding_bag, interpolate


def resize_as_opencv(pixels: torch.Tensor, height: int, width: int, interpolation: str) -> torch.Tensor:
    """Return float32 (..., C, height, width), by "opencv_linear" or "opencv_area"."""
    if interpolation == "opencv_area":
        return _average(_average(pixels.float(), height, -2), width, -1)
    batch = pixels if pixels.ndim == 4 else pixels.movedim(0, -1).unsqueeze(0).movedim(-1, 1)
    resized = interpolate(batch.float(), (height, width), mode="bilinear")  # of uint8, torch would round down
    return resized if pixels.ndim == 4 else resized[0]


def _average(values: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Return float32 with `size` means along a dimension, each over an equal part, to which pixels count in part.

    E.g. from 5 pixels to 2 means, over [0, 2.5) and [2.5, 5): the pixels that each part may touch, and their shares.

        index   0    1    2    3        shares  0.4  0.4  0.2  0
                2    3    4    4 (5)            0.2  0.4  0.4  0
    """
    num = values.shape[dim]
    edges = torch.arange(size + 1, dtype=torch.float64) * num / size
    first, last = edges[:-1, None], edges[1:, None]
    index = first.floor() + torch.arange(num // size + 2)
    shares = (torch.minimum(last, index + 1) - torch.maximum(first, index)).clamp_(min=0) * size / num
    parts = (index.long().clamp_(max=num - 1), shares.float())
    index, shares = (part.to(values.device, non_blocking=True) for part in parts)
    rows = values.movedim(dim, 0)
    means = embedding_bag(index, rows.reshape(num, -1), mode="sum", per_sample_weights=shares)
    return means.view(size, *rows.shape[1:]).movedim(0, dim)
