"""Decoding of 8-bit RGB images, no further than their crop needs; others in raster.py and optional_decoders.py."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from distribuuuu.config.options import OPTIONAL_DECODERS
from distribuuuu.data.image_file import (
    DEFAULTS,
    Box,
    Buffer,
    DecodeOptions,
    bytes_to_tensor,
    check_size,
    is_common_jpeg,
    open_image,
    read_jpeg_header,
    silence_decoders,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_EXIF_ORIENTATION = 0x0112
# Dimensions of (3, H, W) to flip for each EXIF orientation; from 5 on, height and width are swapped first.
_FLIPS = {2: (2,), 3: (1, 2), 4: (1,), 5: (), 6: (2,), 7: (1, 2), 8: (1,)}


def decode(data: Buffer, decoder: str = "auto", options: DecodeOptions = DEFAULTS) -> torch.Tensor:
    """Return the pixels of an image file: uint8 (3, H, W) in RGB, or as the options say (`decode_raster`).

    Of an animation, it is the first frame.

    Args:
        data: the file's bytes.
        decoder: "auto", or "torchvision": torchvision for the JPEGs that it decodes as PIL does, else PIL; "pil";
            "simplejpeg", "nvimgcodec": for JPEGs, else PIL.
        options: the size limit, and whether EXIF applies.

    Raises:
        ValueError, RuntimeError, OSError: it is no image, is truncated, or has too many pixels.
    """
    if not len(data):
        raise ValueError("the file is empty")
    silence_decoders()
    if options.is_rgb:
        pixels = _decode_rgb(data, decoder, options.max_pixels)
    else:
        from distribuuuu.data.raster import decode_raster

        pixels = decode_raster(data, decoder, options)
    return rotate(pixels, read_orientation(data)) if options.exif_rotate else pixels


class LazyImage:
    """An image before it is cropped. This class has its pixels in memory; EncodedImage decodes on demand."""

    def __init__(self, pixels: torch.Tensor):
        self._pixels = pixels

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        _, height, width = self.pixels().shape
        return height, width

    def pixels(self) -> torch.Tensor:
        """Return the full image: uint8 (3, H, W)."""
        return self._pixels

    def crop(self, box: Box, size: int) -> torch.Tensor:
        """Return a region that will be resized to `size`: uint8 (3, H, W), possibly downscaled already."""
        return box.crop(self.pixels())


class EncodedImage(LazyImage):
    """An image file in memory, decoded on demand; for the arguments see `decode`."""

    def __init__(self, data: Buffer, decoder: str, options: DecodeOptions = DEFAULTS):
        self._data = data
        self._decoder = decoder
        if options.exif_rotate and read_orientation(data) == 1:
            options = options._replace(exif_rotate=False)
        self._options = options
        self._decoded: torch.Tensor | None = None
        # An image that has to be rotated is decoded in full.
        is_cut = decoder != "pil" and not options.exif_rotate
        header = read_jpeg_header(data) if is_cut and (options.is_rgb or options.is_gray) else None
        self._header = header if is_common_jpeg(header, options.max_pixels) else None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels, from the header of a JPEG, else from the pixels."""
        return (self._header.height, self._header.width) if self._header else super().size

    def pixels(self) -> torch.Tensor:
        """Return the full image: uint8 (3, H, W)."""
        if self._decoded is None:
            self._decoded = decode(self._data, self._decoder, self._options)
        return self._decoded

    def crop(self, box: Box, size: int) -> torch.Tensor:
        """Return the pixels of a region, decoding only the rows around it where the file allows that."""
        if not self._header:
            return super().crop(box, size)
        if self._decoder in OPTIONAL_DECODERS and self._options.is_rgb:
            from distribuuuu.data import optional_decoders

            pixels = optional_decoders.CROP[self._decoder](self._data, self._header, box, size)
            if pixels is not None:
                return pixels
        data: Buffer = self._data
        if self._header.restart_interval:
            from distribuuuu.data.optional_decoders import cut_rows

            data, first_row = cut_rows(data, self._header, box.top, box.top + box.height)
            box = box._replace(top=box.top - first_row)
        return box.crop(decode(data, self._decoder, self._options))


def open_lazy_image(
    item: Buffer | np.ndarray | torch.Tensor | Image, decoder: str, options: DecodeOptions = DEFAULTS
) -> LazyImage:
    """Return the result of `ImageDataset.read` as a LazyImage.

    Raises:
        ValueError: an array that is no image, or more pixels than the options allow.
    """
    if isinstance(item, (bytes, bytearray, memoryview)):
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
        check_size(*item.size, options.max_pixels)
        if options.is_rgb:
            pixels = pil_to_tensor(item)
        else:
            from distribuuuu.data.raster import pil_to_array, to_pixels

            pixels = to_pixels(pil_to_array(item, options), options)
        pixels = rotate(pixels, read_orientation(item) if options.exif_rotate else 1)
    check_size(pixels.shape[2], pixels.shape[1], options.max_pixels)
    return LazyImage(pixels)


def _array_to_tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or array.shape[2:] not in ((), (1,), (3,)) or not array.size:
        raise ValueError(f"got an array of {array.dtype} and shape {array.shape}; expected uint8 (H, W) or (H, W, 3)")
    # A tensor can share neither read-only memory nor negative strides.
    pixels = torch.from_numpy(array if array.flags.writeable and min(array.strides) >= 0 else array.copy())
    return pixels.expand(3, -1, -1) if array.ndim == 2 else pixels.permute(2, 0, 1).expand(3, -1, -1)


def read_orientation(data: Buffer | Image) -> int:
    """Return the EXIF orientation of an image file or of a PIL image, 1 to 8; 1 (upright) if it has none.

    It is 1 for a TIFF too, since PIL applies the orientation of those itself.
    """
    try:
        image = open_image(data) if isinstance(data, (bytes, bytearray, memoryview)) else data
        orientation = 1 if image.format == "TIFF" else image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # PIL raises nearly anything for damaged EXIF; the pixels may be intact
        return 1
    return orientation if orientation in _FLIPS else 1


def rotate(pixels: torch.Tensor, orientation: int) -> torch.Tensor:
    """Return (3, H, W) upright: rotated and flipped according to an EXIF orientation."""
    pixels = pixels.transpose(1, 2) if orientation >= 5 else pixels
    return pixels.flip(_FLIPS[orientation]) if _FLIPS.get(orientation) else pixels


def pil_to_tensor(image: Image) -> torch.Tensor:
    """Return a PIL image of any mode as uint8 (3, H, W); transparency is dropped, 16 bits become 8.

    Raises:
        ValueError: its pixels are floating-point numbers, whose range is unknown.
    """
    if image.mode == "F":
        raise ValueError("floating-point pixels: their range is not known")
    if image.mode.startswith("I"):  # 16 bits, which convert("RGB") would clip to white
        gray = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return torch.from_numpy(gray).expand(3, -1, -1)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _decode_rgb(data: Buffer, decoder: str, max_pixels: int) -> torch.Tensor:
    header, pixels = read_jpeg_header(data), None
    if decoder in OPTIONAL_DECODERS and is_common_jpeg(header, max_pixels):
        from distribuuuu.data import optional_decoders

        pixels = optional_decoders.DECODE[decoder](data, header)
    elif decoder != "pil" and is_common_jpeg(header, max_pixels):
        with contextlib.suppress(RuntimeError, ImportError):  # rejected, or a torchvision without decoders
            from torchvision.io import ImageReadMode, decode_jpeg

            pixels = decode_jpeg(bytes_to_tensor(data), mode=ImageReadMode.RGB)
    return _decode_pil(data, max_pixels) if pixels is None else pixels


def _decode_pil(data: Buffer, max_pixels: int) -> torch.Tensor:
    with open_image(data, max_pixels) as image:
        return pil_to_tensor(image)
