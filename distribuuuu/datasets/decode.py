"""From the bytes of an image file to pixels; the one place that knows decoders."""

import functools
import io
import re
import warnings
from collections.abc import Callable

import numpy as np
import torch

from distribuuuu.datasets.jpeg import Buffer, JpegHeader, read_jpeg_header

# Width x height above which an image is refused: PIL's own limit, twice its MAX_IMAGE_PIXELS.
MAX_PIXELS = 178_956_970


def decode(data: Buffer, decoder: str = "auto") -> torch.Tensor:
    """Return the pixels of an image file: uint8 (3, H, W) in RGB, of an animation the first frame; EXIF is not applied.

    Args:
        data: the whole file.
        decoder: "auto": torchvision's for the JPEGs that it decodes as PIL does, PIL for the rest; "torchvision": its
            own decoders, but for PNG; "pil"; "simplejpeg": for JPEGs, PIL for the rest.

    Raises:
        ValueError, RuntimeError, OSError: it is no image, is cut, or has more than MAX_PIXELS.
    """
    if not len(data):
        raise ValueError("the file is empty")
    _quieten()
    return _DECODERS[decoder](data)


def decode_scaled(data: Buffer, header: JpegHeader, factor: int) -> torch.Tensor:
    """Return the pixels of a JPEG made smaller by 1, 2, 4 or 8 while it is decoded (simplejpeg): uint8 (3, H', W').

    H' and W' are the size of the file divided by `factor`, rounded up.
    """
    import simplejpeg

    least = {"min_height": -(-header.height // factor), "min_width": -(-header.width // factor)}
    pixels = simplejpeg.decode_jpeg(data, "RGB", min_factor=factor, **(least if factor > 1 else {}))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def is_common_jpeg(header: JpegHeader | None) -> bool:
    """Tell whether all decoders read a JPEG alike: 8 bits, grey or colour; each converts CMYK in its own way.

    Raises:
        ValueError: it has more than MAX_PIXELS.
    """
    if header is None:
        return False
    if header.height * header.width > MAX_PIXELS:
        raise ValueError(f"{header.width} x {header.height} pixels are too many, more than {MAX_PIXELS}")
    return header.channels in (1, 3) and header.bits == 8


def pixels_of(image) -> torch.Tensor:
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
    """Silence what decoders say of every image: that torchvision's will move one day, that one is large."""
    warnings.filterwarnings("ignore", message="The image decoding and encoding capabilities")
    warnings.filterwarnings("ignore", message="Image size .* exceeds limit")


def _decode_auto(data: Buffer) -> torch.Tensor:
    if not is_common_jpeg(read_jpeg_header(data)):
        return _decode_pil(data)
    try:
        from torchvision.io import ImageReadMode, decode_jpeg

        return decode_jpeg(_as_tensor(data), mode=ImageReadMode.RGB)
    except (RuntimeError, ImportError):  # refused, or a torchvision without decoders
        return _decode_pil(data)


def _decode_torchvision(data: Buffer) -> torch.Tensor:
    from torchvision.io import ImageReadMode, decode_image

    if bytes(data[:4]) == b"\x89PNG":  # one wrong byte in a PNG can end the process in torchvision's decoder
        return _decode_pil(data)
    is_common_jpeg(read_jpeg_header(data))
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


def _decode_simplejpeg(data: Buffer) -> torch.Tensor:
    header = read_jpeg_header(data)
    if not is_common_jpeg(header):
        return _decode_pil(data)
    try:
        return decode_scaled(data, header, 1)
    except ValueError:  # it refuses stray bytes between the parts of a file, which others pass over
        return _decode_pil(data)


def _decode_pil(data: Buffer) -> torch.Tensor:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            return pixels_of(image)
    except UnidentifiedImageError:
        raise ValueError("not an image of a known format") from None


_DECODERS: dict[str, Callable[[Buffer], torch.Tensor]] = {
    "auto": _decode_auto,
    "torchvision": _decode_torchvision,
    "pil": _decode_pil,
    "simplejpeg": _decode_simplejpeg,
}
