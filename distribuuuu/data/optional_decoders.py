"""JPEG decoders of optional packages: simplejpeg downscales while it decodes, nvimgcodec decodes a region only.

Each function returns uint8 (3, H, W), or None if the package refuses the file; another decoder may read it.
"""

import importlib
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from distribuuuu.data.image_file import Box, Buffer, JpegHeader
from distribuuuu.data.jpeg_rows import END, cut_rows

_decoders = threading.local()


def _decode_simplejpeg(data: Buffer, header: JpegHeader, factor: int = 1) -> torch.Tensor | None:
    """Return the pixels, downscaled by 1, 2, 4 or 8: the size of the file divided by `factor`, rounded up."""
    import simplejpeg

    least = {"min_height": -(-header.height // factor), "min_width": -(-header.width // factor)}
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_factor=factor, **(least if factor > 1 else {}))
    except ValueError:  # it rejects stray bytes between the parts of a file, which others skip
        return None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _crop_simplejpeg(data: Buffer, header: JpegHeader, box: Box, size: int) -> torch.Tensor | None:
    """Return a region, downscaled by 2 or 4, whose borders are rounded to multiples of that; None for 1."""
    factor = scale_factor(box, size)
    pixels = _decode_simplejpeg(data, header, factor) if factor > 1 else None
    return None if pixels is None else Box(*(value // factor for value in box)).crop(pixels)


def scale_factor(box: Box, size: int) -> int:
    """Return the largest of 1, 2 and 4 that leaves a box at least three times as large as `size`.

    Decoders downscale with another filter than resizing does. With a factor of three left to resize, the mean
    difference on photographs is within a quarter of a gray level; with none left, two thirds.
    """
    return next(factor for factor in (4, 2, 1) if factor == 1 or min(box.height, box.width) >= 3 * factor * size)


def _decode_nvimgcodec(data: Buffer, header: JpegHeader) -> torch.Tensor | None:
    codec, decoder, params = _open_nvimgcodec()
    image = decoder.decode(codec.CodeStream(bytes(data)), params=params)
    return None if image is None else torch.from_numpy(np.asarray(image)).permute(2, 0, 1)


def _crop_nvimgcodec(data: Buffer, header: JpegHeader, box: Box, size: int) -> torch.Tensor | None:
    """Return a region, as libjpeg-turbo decodes it; None for a file that is cut, even if its region is complete."""
    if bytes(data[-2:]) != END:
        return None
    codec, decoder, params = _open_nvimgcodec()
    data, first_row = cut_rows(data, header, box.top, box.top + box.height)
    region = codec.Region(top := box.top - first_row, box.left, top + box.height, box.left + box.width)
    image = decoder.decode(codec.CodeStream(bytes(data)).get_sub_code_stream(region=region), params=params)
    return None if image is None else torch.from_numpy(np.asarray(image)).permute(2, 0, 1)


def _open_nvimgcodec() -> tuple[Any, Any, Any]:
    """Return the module, the decoder of this thread, and its parameters; a decoder does not survive a fork."""
    if getattr(_decoders, "pid", None) != os.getpid():
        codec: Any = importlib.import_module("nvidia.nvimgcodec")
        backends = [codec.Backend(codec.BackendKind.CPU_ONLY)]
        decoder = codec.Decoder(codec.NVIMGCODEC_DEVICE_CPU_ONLY, max_num_cpu_threads=1, backends=backends)
        _decoders.pid, _decoders.opened = os.getpid(), (codec, decoder, codec.DecodeParams(False))
    return _decoders.opened


DECODE: dict[str, Callable[[Buffer, JpegHeader], torch.Tensor | None]] = {
    "simplejpeg": _decode_simplejpeg,
    "nvimgcodec": _decode_nvimgcodec,
}
CROP: dict[str, Callable[[Buffer, JpegHeader, Box, int], torch.Tensor | None]] = {
    "simplejpeg": _crop_simplejpeg,
    "nvimgcodec": _crop_nvimgcodec,
}
