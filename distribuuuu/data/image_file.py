"""Headers of image files, read by PIL within limits."""

from __future__ import annotations

import functools
import io
import re
import warnings
from typing import IO, TYPE_CHECKING, Any, TypeGuard

import torch

from distribuuuu.data.jpeg_header import JpegHeader
from distribuuuu.data.lazy_image import DEFAULTS, Buffer, check_size

if TYPE_CHECKING:
    from PIL.Image import Image

# The formats that PIL may read, whatever a file's extension. PIL runs external programs for some formats, e.g.
# Ghostscript for EPS, so no other format is tried.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


def open_image(file: Buffer | IO[bytes], max_pixels: int = DEFAULTS.max_pixels) -> Image:
    """Return a PIL image of which only the header has been read. All image files that PIL reads are opened here.

    Raises:
        ValueError: it is not of FORMATS, or has more than `max_pixels`.
    """
    from PIL import Image, UnidentifiedImageError

    silence_decoders()
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > 2 * Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = -(-max_pixels // 2)  # PIL rejects more than twice this number
    try:
        stream = io.BytesIO(file) if isinstance(file, (bytes, bytearray, memoryview)) else file
        image = Image.open(stream, formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"not an image of a known format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError as error:
        num_pixels = re.findall(r"\d+", str(error))[0]
        raise ValueError(f"{num_pixels} pixels are more than DATA.MAX_PIXELS {max_pixels}") from None
    check_size(*image.size, max_pixels)
    return image


def has_16_bits(image: Image, file: Buffer = b"") -> bool:
    """Return whether an opened image has more than 8 bits per channel; of a PNG by the bytes of its file."""
    if image.format == "PNG" and file:
        return bytes(file[24:25]) == b"\x10"  # the header: PIL opens colors of 16 bits as those of 8
    if image.format == "TIFF":
        bits: Any = getattr(image, "tag_v2", {}).get(258, (8,))  # BitsPerSample
        return max(bits) > 8
    return image.mode.startswith("I")


def is_transparent(image: Image) -> bool:
    """Return whether some pixels of an opened image are transparent."""
    if image.mode in ("RGBA", "LA", "PA"):
        least: Any = image.getchannel("A").getextrema()[0]
        return least < 255
    return "transparency" in image.info


def is_common_jpeg(header: JpegHeader | None, max_pixels: int) -> TypeGuard[JpegHeader]:
    """Tell whether all decoders read a JPEG alike: 8 bits, gray or color; each converts CMYK in its own way.

    Raises:
        ValueError: it has more than `max_pixels`.
    """
    if header is None:
        return False
    check_size(header.width, header.height, max_pixels)
    return header.channels in (1, 3) and header.bits == 8


def bytes_to_tensor(data: Buffer) -> torch.Tensor:
    """Return the bytes of a file as a uint8 tensor."""
    # A tensor shares writable memory; read-only bytes are copied.
    return torch.frombuffer(bytearray(data) if memoryview(data).readonly else data, dtype=torch.uint8)


@functools.cache
def silence_decoders() -> None:
    """Ignore decoders' warnings: torchvision's will move, an image is large, its EXIF is damaged."""
    warnings.filterwarnings("ignore", message="The image decoding and encoding capabilities")
    warnings.filterwarnings("ignore", message="Image size .* exceeds limit")
    warnings.filterwarnings("ignore", message="Corrupt EXIF data")
