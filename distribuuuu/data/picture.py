"""An image of a data set before it is cropped: decoded no further than the crop needs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from distribuuuu.data.decode import (
    DEFAULTS,
    DecodeOptions,
    check_size,
    decode,
    decode_scaled,
    is_common_jpeg,
    pixels_of,
    read_orientation,
    rotate,
)
from distribuuuu.data.jpeg import Buffer, cut_rows, read_jpeg_header

if TYPE_CHECKING:
    from PIL.Image import Image


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int

    def of(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the part of (3, H, W), without a copy."""
        return pixels[:, self.top : self.top + self.height, self.left : self.left + self.width]


class LazyImage:
    """Pixels in memory: uint8 (3, H, W)."""

    def __init__(self, pixels: torch.Tensor | None):
        self._pixels = pixels

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return tuple(self.pixels().shape[1:])

    def pixels(self) -> torch.Tensor:
        """Return the whole image: uint8 (3, H, W)."""
        return self._pixels

    def crop(self, box: Box, size: int) -> torch.Tensor:
        """Return the pixels of a box that will be resized to `size`: uint8 (3, H, W), perhaps made smaller already."""
        return box.of(self.pixels())


class EncodedPicture(LazyImage):
    """The bytes of an image file.

    Args:
        data: the whole file.
        decoder, options: see `decode`.
    """

    def __init__(self, data: Buffer, decoder: str, options: DecodeOptions = DEFAULTS):
        super().__init__(None)
        self._data = data
        self._decoder = decoder
        if options.exif_rotate and read_orientation(data) == 1:
            options = options._replace(exif_rotate=False)
        self._options = options
        # An image that has to be rotated is decoded as a whole.
        header = read_jpeg_header(data) if decoder in ("auto", "simplejpeg") and not options.exif_rotate else None
        self._header = header if is_common_jpeg(header, options.max_pixels) else None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels, from the header of a JPEG, else from the pixels."""
        return (self._header.height, self._header.width) if self._header else super().size

    def pixels(self) -> torch.Tensor:
        """Return the whole image: uint8 (3, H, W)."""
        if self._pixels is None:
            self._pixels = decode(self._data, self._decoder, self._options)
        return self._pixels

    def crop(self, box: Box, size: int) -> torch.Tensor:
        """Return the pixels of a box, decoding the rows around it only where the file allows that.

        simplejpeg makes a box that is much larger than `size` two or four times smaller while it decodes, its borders
        moved to multiples of that.
        """
        if not self._header:
            return super().crop(box, size)
        factor = _scale_factor(box, size) if self._decoder == "simplejpeg" else 1
        if factor > 1:
            snapped = Box(*(value // factor for value in box))
            with contextlib.suppress(ValueError):  # it refuses some files that others read
                return snapped.of(decode_scaled(self._data, self._header, factor))
        data, first_row = cut_rows(self._data, self._header, box.top, box.top + box.height)
        return box._replace(top=box.top - first_row).of(decode(data, self._decoder, self._options))


def open_lazy_image(
    item: Buffer | np.ndarray | torch.Tensor | Image, decoder: str, options: DecodeOptions = DEFAULTS
) -> LazyImage:
    """Return what an ImageDataset has read as a picture.

    Raises:
        ValueError: an array that is no image, or more pixels than the options allow.
    """
    if isinstance(item, (bytes, bytearray, memoryview)):
        return EncodedPicture(item, decoder, options)
    picture = _picture_of(item, options)
    height, width = picture.size
    check_size(width, height, options.max_pixels)
    return picture


def _picture_of(item: np.ndarray | torch.Tensor | Image, options: DecodeOptions) -> LazyImage:
    if isinstance(item, torch.Tensor):
        if item.dtype != torch.uint8 or item.ndim != 3 or len(item) != 3 or not item.numel():
            raise ValueError(f"a tensor of {item.dtype} and shape {tuple(item.shape)} is no image: uint8 (3, H, W) is")
        return LazyImage(item)
    if not isinstance(item, np.ndarray):
        check_size(*item.size, options.max_pixels)
        return LazyImage(rotate(pixels_of(item), read_orientation(item) if options.exif_rotate else 1))
    if item.dtype != np.uint8 or item.ndim not in (2, 3) or item.shape[2:] not in ((), (1,), (3,)) or not item.size:
        raise ValueError(f"an array of {item.dtype} and shape {item.shape} is no image: uint8 (H, W) or (H, W, 3) is")
    # A tensor takes neither read-only memory nor steps back through it.
    pixels = torch.from_numpy(item if item.flags.writeable and min(item.strides) >= 0 else item.copy())
    return LazyImage(pixels.expand(3, -1, -1) if item.ndim == 2 else pixels.permute(2, 0, 1).expand(3, -1, -1))


def _scale_factor(box: Box, size: int) -> int:
    """Return the largest of 1, 2 and 4 that leaves a box at least three times as large as `size`.

    Decoders shrink with another filter than resizing does. What is resized three times afterwards is, on the average of
    photographs, within a quarter of a grey level of what it would be without; at once to `size`, two thirds.
    """
    return next(factor for factor in (4, 2, 1) if factor == 1 or min(box.height, box.width) >= 3 * factor * size)
