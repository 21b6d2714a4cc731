"""From the bytes of an image file to pixels; the one place that knows decoders."""

from __future__ import annotations

import functools
import io
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
import torch

from distribuuuu.data.jpeg import Buffer, JpegHeader, read_jpeg_header

if TYPE_CHECKING:
    from PIL.Image import Image

# The formats that PIL may read, whatever a file is called. PIL starts other programs for some formats, e.g. Ghostscript
# for EPS, so none is tried that is not named here.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_EXIF_ORIENTATION = 0x0112
# Dimensions of (3, H, W) to flip for each EXIF orientation; from 5 on, height and width are exchanged before.
_FLIPS = {2: (2,), 3: (1, 2), 4: (1,), 5: (), 6: (2,), 7: (1, 2), 8: (1,)}


class DecodeOptions(NamedTuple):
    """What applies to images whichever decoder reads them.

    Attributes:
        max_pixels: width x height above which an image is refused; by default PIL's limit, twice its MAX_IMAGE_PIXELS.
        exif_rotate: rotate and flip images as their EXIF orientation says.
    """

    max_pixels: int = 178_956_970
    exif_rotate: bool = False


DEFAULTS = DecodeOptions()


def build_decode_options(cfg) -> DecodeOptions:
    """Return the options of a config."""
    return DecodeOptions(cfg.DATA.MAX_PIXELS, cfg.DATA.EXIF_ROTATE)


def decode(data: Buffer, decoder: str = "auto", options: DecodeOptions = DEFAULTS) -> torch.Tensor:
    """Return the pixels of an image file: uint8 (3, H, W) in RGB, of an animation the first frame.

    Args:
        data: the whole file.
        decoder: "auto": torchvision's for the JPEGs that it decodes as PIL does, PIL for the rest; "torchvision": its
            own decoders, but for PNG; "pil"; "simplejpeg": for JPEGs, PIL for the rest.
        options: the limit of the size, and whether EXIF applies.

    Raises:
        ValueError, RuntimeError, OSError: it is no image, is cut, or has too many pixels.
    """
    if not len(data):
        raise ValueError("the file is empty")
    _quieten()
    pixels = _DECODERS[decoder](data, options.max_pixels)
    return rotate(pixels, read_orientation(data)) if options.exif_rotate else pixels


def open_image(file: Buffer | BinaryIO, max_pixels: int = DEFAULTS.max_pixels) -> Image:
    """Return a PIL image whose header only has been read. All image files that PIL reads are opened here.

    Raises:
        ValueError: it is not of FORMATS, or has more than `max_pixels`.
    """
    from PIL import Image, UnidentifiedImageError

    _quieten()
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > 2 * Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = -(-max_pixels // 2)  # PIL refuses more than twice this number
    try:
        image = Image.open(file if hasattr(file, "read") else io.BytesIO(file), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"not an image of a known format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError as error:
        found = re.search(r"\d+", str(error))[0]
        raise ValueError(f"{found} pixels are more than DATA.MAX_PIXELS {max_pixels}") from None
    check_size(*image.size, max_pixels)
    return image


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Check the size of an image.

    Raises:
        ValueError: it has more than `max_pixels`.
    """
    if width * height > max_pixels:
        raise ValueError(f"{width} x {height} pixels are more than DATA.MAX_PIXELS {max_pixels}")


def read_orientation(data: Buffer | Image) -> int:
    """Return the EXIF orientation of an image file or of a PIL image, 1 to 8; 1, upright, when it has none.

    It is 1 for a TIFF too: PIL applies the orientation of those itself.
    """
    try:
        image = data if hasattr(data, "getexif") else open_image(data)
        orientation = 1 if image.format == "TIFF" else image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # PIL raises nearly anything for damaged EXIF; the pixels may be sound
        return 1
    return orientation if orientation in _FLIPS else 1


def rotate(pixels: torch.Tensor, orientation: int) -> torch.Tensor:
    """Return (3, H, W) upright: rotated and flipped as an EXIF orientation says."""
    pixels = pixels.transpose(1, 2) if orientation >= 5 else pixels
    return pixels.flip(_FLIPS[orientation]) if _FLIPS.get(orientation) else pixels


def decode_scaled(data: Buffer, header: JpegHeader, factor: int) -> torch.Tensor:
    """Return the pixels of a JPEG made smaller by 1, 2, 4 or 8 while it is decoded (simplejpeg): uint8 (3, H', W').

    H' and W' are the size of the file divided by `factor`, rounded up.
    """
    import simplejpeg

    least = {"min_height": -(-header.height // factor), "min_width": -(-header.width // factor)}
    pixels = simplejpeg.decode_jpeg(data, "RGB", min_factor=factor, **(least if factor > 1 else {}))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def is_common_jpeg(header: JpegHeader | None, max_pixels: int) -> bool:
    """Tell whether all decoders read a JPEG alike: 8 bits, grey or colour; each converts CMYK in its own way.

    Raises:
        ValueError: it has more than `max_pixels`.
    """
    if header is None:
        return False
    check_size(header.width, header.height, max_pixels)
    return header.channels in (1, 3) and header.bits == 8


def pixels_of(image: Image) -> torch.Tensor:
    """Return a PIL image of any mode as uint8 (3, H, W); transparency is dropped, 16 bits become 8.

    Raises:
        ValueError: its pixels are floating-point numbers, whose range nobody knows.
    """
    if image.mode == "F":
        raise ValueError("floating-point pixels: their range is not known")
    if image.mode.startswith("I"):  # 16 bits, which convert("RGB") would clip to white
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return torch.from_numpy(grey).expand(3, -1, -1)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@functools.cache
def _quieten() -> None:
    """Silence what decoders say of images: that torchvision's will move, that one is large, or its EXIF is damaged."""
    warnings.filterwarnings("ignore", message="The image decoding and encoding capabilities")
    warnings.filterwarnings("ignore", message="Image size .* exceeds limit")
    warnings.filterwarnings("ignore", message="Corrupt EXIF data")


def _decode_auto(data: Buffer, max_pixels: int) -> torch.Tensor:
    if not is_common_jpeg(read_jpeg_header(data), max_pixels):
        return _decode_pil(data, max_pixels)
    try:
        from torchvision.io import ImageReadMode, decode_jpeg

        return decode_jpeg(_as_tensor(data), mode=ImageReadMode.RGB)
    except (RuntimeError, ImportError):  # refused, or a torchvision without decoders
        return _decode_pil(data, max_pixels)


def _decode_torchvision(data: Buffer, max_pixels: int) -> torch.Tensor:
    from torchvision.io import ImageReadMode, decode_image

    if bytes(data[:4]) == b"\x89PNG":  # one wrong byte in a PNG can end the process in torchvision's decoder
        return _decode_pil(data, max_pixels)
    header = read_jpeg_header(data)
    if header is None:
        open_image(data, max_pixels)  # its format and its size are checked
    else:
        check_size(header.width, header.height, max_pixels)
    try:
        pixels = decode_image(_as_tensor(data), mode=ImageReadMode.RGB)
    except RuntimeError as error:
        reason = re.split(r": |\.cpp:\d+, ", str(error).partition("\n")[0])[-1]
        raise ValueError(f"torchvision's decoders refuse it: {reason}; DATA.DECODER auto may read it") from error
    pixels = pixels if pixels.dtype == torch.uint8 else (pixels.int() >> 8).to(torch.uint8)
    return pixels[0] if pixels.ndim == 4 else pixels


def _as_tensor(data: Buffer) -> torch.Tensor:
    # A tensor shares memory that can be written to; read-only bytes are copied.
    return torch.frombuffer(bytearray(data) if memoryview(data).readonly else data, dtype=torch.uint8)


def _decode_simplejpeg(data: Buffer, max_pixels: int) -> torch.Tensor:
    header = read_jpeg_header(data)
    if not is_common_jpeg(header, max_pixels):
        return _decode_pil(data, max_pixels)
    try:
        return decode_scaled(data, header, 1)
    except ValueError:  # it refuses stray bytes between the parts of a file, which others pass over
        return _decode_pil(data, max_pixels)


def _decode_pil(data: Buffer, max_pixels: int) -> torch.Tensor:
    with open_image(data, max_pixels) as image:
        return pixels_of(image)


_DECODERS: dict[str, Callable[[Buffer, int], torch.Tensor]] = {
    "auto": _decode_auto,
    "torchvision": _decode_torchvision,
    "pil": _decode_pil,
    "simplejpeg": _decode_simplejpeg,
}
