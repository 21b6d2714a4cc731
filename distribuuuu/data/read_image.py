"""Images as a data set returns them: files, arrays, tensors and images of PIL, before they are cropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from distribuuuu.data.lazy_image import DEFAULTS, Buffer, DecodeOptions, LazyImage, check_size

if TYPE_CHECKING:
    from PIL.Image import Image


def open_lazy_image(
    item: Buffer | np.ndarray | torch.Tensor | Image, decoder: str, options: DecodeOptions = DEFAULTS
) -> LazyImage:
    """Return the result of `ImageDataset.read` as a LazyImage.

    Raises:
        ValueError: an array that is no image, or more pixels than the options allow.
    """
    if isinstance(item, (bytes, bytearray, memoryview)):
        from distribuuuu.data.decode import EncodedImage

        return EncodedImage(item, decoder, options)
    if isinstance(item, torch.Tensor):
        pixels = item
        if item.ndim != 3 or len(item) != options.channels or item.dtype != options.dtype or not item.numel():
            expected = f"expected {options.dtype} ({options.channels}, H, W)"
            raise ValueError(f"got a tensor of {item.dtype} and shape {tuple(item.shape)}; {expected}")
    elif isinstance(item, np.ndarray) and options.is_rgb:
        pixels = _array_to_tensor(item)
    elif isinstance(item, np.ndarray):
        from distribuuuu.data.raster import to_pixels

        pixels = to_pixels(item, options)
    else:
        from distribuuuu.data.decode import pil_to_pixels

        pixels = pil_to_pixels(item, options)
    check_size(pixels.shape[2], pixels.shape[1], options.max_pixels)
    return LazyImage(pixels)


def _array_to_tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or array.shape[2:] not in ((), (1,), (3,)) or not array.size:
        raise ValueError(f"got an array of {array.dtype} and shape {array.shape}; expected uint8 (H, W) or (H, W, 3)")
    # A tensor can share neither read-only memory nor negative strides.
    pixels = torch.from_numpy(array if array.flags.writeable and min(array.strides) >= 0 else array.copy())
    return pixels.expand(3, -1, -1) if array.ndim == 2 else pixels.permute(2, 0, 1).expand(3, -1, -1)
