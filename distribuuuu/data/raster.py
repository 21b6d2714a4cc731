"""Images other than JPEGs: those that PIL opens, arrays, and pixels of other channels or depths than 8-bit RGB."""

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from distribuuuu.config.options import PIXEL_RANGES
from distribuuuu.data.image_faults import TIFF, IntactImageError, check_depth, other_channels, read_tiff

_EXIF_ORIENTATION = 0x0112
# Dimensions of (3, H, W) to flip for each EXIF orientation; from 5 on, height and width are swapped first.
_FLIPS = {2: (2,), 3: (1, 2), 4: (1,), 5: (), 6: (2,), 7: (1, 2), 8: (1,)}
NPY = b"\x93NUMPY"
# Bytes that contain the header of an .npy file.
_HEADER = 1 << 14
_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def decode_other(data: Any, options: Any, open_image: Callable[..., Image.Image]) -> torch.Tensor:
    """Return the pixels of an image file: uint8 (3, H, W), or as the options say, see `to_pixels`.

    `open_image` opens it by PIL, within the options (`DecodeOptions`). A file that is no image, is truncated or too
    large, or has other channels or pixels raises ValueError, RuntimeError or OSError.
    """
    if options.is_rgb:
        with open_image(data, options) as image:
            return pil_to_tensor(image)
    head = bytes(data[:6])
    if head == NPY:
        return to_pixels(_read_npy(data), options)
    if head[:4] in TIFF and options.channels != 1:
        return to_pixels(read_tiff(io.BytesIO(bytes(data)), options), options)
    with open_image(data, options) as image:
        is_reduced = bytes(data[:4]) == b"\x89PNG" and data[24] == 16 and not image.mode.startswith("I")
        if is_reduced and options.pixels != "uint8":
            raise IntactImageError("16-bit color PNG, of which PIL reads 8 bits; fix: convert it to TIFF or .npy")
        return to_pixels(pil_to_array(image, options), options)


def pixels_of(item: Any, options: Any) -> torch.Tensor:
    """Return a tensor, an array or a PIL image as (C, H, W) of the type of the options; see `open_lazy_image`."""
    if isinstance(item, torch.Tensor):
        if item.ndim != 3 or len(item) != options.channels or item.dtype != options.dtype or not item.numel():
            expected = f"expected {options.dtype} ({options.channels}, H, W)"
            raise ValueError(f"got a tensor of {item.dtype} and shape {tuple(item.shape)}; {expected}")
        return item
    if isinstance(item, np.ndarray):
        is_gray = options.is_rgb and item.shape[2:] in ((), (1,))
        pixels = to_pixels(item, options._replace(channels=1) if is_gray else options)
        return pixels.expand(options.channels, -1, -1)
    options.check_size(*item.size)
    pixels = pil_to_tensor(item) if options.is_rgb else to_pixels(pil_to_array(item, options), options)
    return rotate(pixels, read_orientation(item, Image.open) if options.exif_rotate else 1)


def pil_to_tensor(image: Image.Image) -> torch.Tensor:
    """Return a PIL image of any mode as uint8 (3, H, W); transparency is dropped, 16 bits become 8."""
    if image.mode[0] in "FI":
        check_depth(image)  # 16 bits, which convert("RGB") would clip to white
        gray = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return torch.from_numpy(gray).expand(3, -1, -1)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def read_orientation(data: Any, open_image: Callable[..., Image.Image]) -> int:
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


def pil_to_array(image: Image.Image, options: Any) -> np.ndarray:
    """Return a PIL image as an array (H, W) or (H, W, C); 8 bits are converted to gray, RGB or RGBA."""
    if options.is_gray:
        if image.mode.startswith("I"):  # 16 bits, which convert("L") would clip
            return (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        image.draft("L", None)  # of a JPEG, the luminance
    if image.mode == "F" or image.mode.startswith("I"):
        array = np.asarray(image)
        is_16_bit = array.dtype == np.int32 and 0 <= array.min() and array.max() < 1 << 16
        return array.astype(np.uint16) if is_16_bit else array
    mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(options.channels)
    return np.array(image.convert(mode) if mode else image)


def to_pixels(array: np.ndarray, options: Any) -> torch.Tensor:
    """Return an array (H, W), (H, W, C) or (C, H, W) as (C, H, W): uint8, else float32 in the units of the array."""
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or not array.size:
        raise ValueError(f"got an array of shape {array.shape}; expected (H, W), (H, W, C) or (C, H, W)")
    if options.is_gray and array.dtype == np.uint8 and array.shape[2] == 3:
        array = np.asarray(Image.fromarray(array).convert("L"))[:, :, None]
    is_planar = array.shape[2] != options.channels and array.shape[0] == options.channels
    planes = array if is_planar else array.transpose(2, 0, 1)
    if len(planes) != options.channels:
        raise other_channels(array.shape, options)
    options.check_size(planes.shape[2], planes.shape[1])
    if options.pixels == "float32" and array.dtype.kind in "iuf":
        planes = planes.astype(np.float32)
        if not np.isfinite(planes).all():
            raise ValueError("has pixels that are NaN or infinite")
    elif array.dtype.newbyteorder("=") != options.pixels:
        other = array.dtype.name if array.dtype.name in PIXEL_RANGES else "float32"
        expected = f"expected {options.pixels} (DATA.PIXELS); fix: set DATA.PIXELS {other}"
        raise IntactImageError(f"got {array.dtype.name} pixels; {expected}")
    # The channels of a pixel are adjacent in memory, as in other images.
    values = np.ascontiguousarray(planes.transpose(1, 2, 0), np.uint8 if options.pixels == "uint8" else np.float32)
    return torch.from_numpy(values if values.flags.writeable else values.copy()).permute(2, 0, 1)


def _read_npy(data: Any) -> np.ndarray:
    """Return the array of an .npy file: numbers only; no size in its header is trusted."""
    stream = io.BytesIO(bytes(data[:_HEADER]))
    read_header = _READ_HEADER.get(np.lib.format.read_magic(stream))
    if read_header is None:
        raise ValueError("an .npy file of an unknown version")
    shape, is_fortran, dtype = read_header(stream)
    if dtype.kind not in "iuf" or len(shape) not in (2, 3):
        raise ValueError(f"got {dtype} of shape {shape}; expected numbers (H, W), (H, W, C) or (C, H, W)")
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes != len(data) - stream.tell():
        raise ValueError(f"got {len(data) - stream.tell()} bytes for shape {shape}; expected {num_bytes}: truncated")
    array = np.frombuffer(data, dtype, offset=stream.tell())
    return array.reshape(shape, order="F" if is_fortran else "C")
