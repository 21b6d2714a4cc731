"""Image files before they are decoded: the options of all decoders, and headers, read within limits."""

from __future__ import annotations

import functools
import io
import re
import warnings
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, NamedTuple, TypeGuard

import torch

if TYPE_CHECKING:
    from PIL.Image import Image

Buffer = bytes | bytearray | memoryview
# The formats that PIL may read, whatever a file's extension. PIL runs external programs for some formats, e.g.
# Ghostscript for EPS, so no other format is tried.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

_START, _RESTART_INTERVAL, _START_OF_SCAN = 0xD8, 0xDD, 0xDA
# Markers C0 to CF start a frame, except these three: Huffman tables, an extension, arithmetic conditioning.
_NO_FRAME = (0xC4, 0xC8, 0xCC)
_BASELINE = (0xC0, 0xC1)


class Box(NamedTuple):
    """A region of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int

    def crop(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return a view of the region of (3, H, W)."""
        return pixels[:, self.top : self.top + self.height, self.left : self.left + self.width]


class DecodeOptions(NamedTuple):
    """Options of all decoders.

    Attributes:
        max_pixels: images of more pixels (width x height) are rejected; by default PIL's limit, twice its
            MAX_IMAGE_PIXELS.
        exif_rotate: apply the EXIF orientation.
        channels, pixels: DATA.CHANNELS and DATA.PIXELS.
    """

    max_pixels: int = 178_956_970
    exif_rotate: bool = False
    channels: int = 3
    pixels: str = "uint8"

    @property
    def is_rgb(self) -> bool:
        """Whether images are 8-bit RGB."""
        return self.channels == 3 and self.pixels == "uint8"

    @property
    def is_gray(self) -> bool:
        """Whether images are 8-bit gray."""
        return self.channels == 1 and self.pixels == "uint8"

    @property
    def dtype(self) -> torch.dtype:
        """The type of decoded pixels."""
        return torch.uint8 if self.pixels == "uint8" else torch.float32


DEFAULTS = DecodeOptions()


def build_decode_options(cfg) -> DecodeOptions:
    """Return the options of a config."""
    return DecodeOptions(cfg.DATA.MAX_PIXELS, cfg.DATA.EXIF_ROTATE, cfg.DATA.CHANNELS, cfg.DATA.PIXELS)


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Raise ValueError if an image has more than `max_pixels`."""
    if width * height > max_pixels:
        raise ValueError(f"{width} x {height} pixels are more than DATA.MAX_PIXELS {max_pixels}")


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


@dataclass
class JpegHeader:
    """The frame of a JPEG, and the positions of its parts in the file.

    Attributes:
        height, width: in pixels.
        bits: per sample.
        sampling: (horizontal, vertical) sampling factors of each channel.
        frame_at: position of the frame's marker.
        is_baseline: sequential Huffman coding.
        restart_interval: blocks between two restart markers; 0: none.
        scan_at: position of the first scan's data; 0: not read yet.
        scan_channels: channels in the first scan.
    """

    height: int
    width: int
    bits: int
    sampling: list[tuple[int, int]]
    frame_at: int
    is_baseline: bool
    restart_interval: int = 0
    scan_at: int = 0
    scan_channels: int = 0

    @property
    def channels(self) -> int:
        """Number of channels: 1 gray, 3 color, 4 CMYK."""
        return len(self.sampling)


def read_jpeg_header(data: Buffer) -> JpegHeader | None:
    """Return the header up to the first scan; None if the data is no JPEG or ends before it."""
    if bytes(data[:2]) != bytes((0xFF, _START)):
        return None
    header, restart_interval, position, length = None, 0, 2, len(data)
    while position + 4 <= length:
        if data[position] != 0xFF:
            return None
        marker = data[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        end = position + 2 + (data[position + 2] << 8 | data[position + 3])
        if end > length:
            return None
        if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAME:
            header = _read_frame(data, position)
        elif marker == _RESTART_INTERVAL:
            restart_interval = data[position + 4] << 8 | data[position + 5]
        elif marker == _START_OF_SCAN:
            if header:
                header.restart_interval = restart_interval
                header.scan_at, header.scan_channels = end, data[position + 4]
            return header
        position = end
    return None


def _read_frame(data: Buffer, at: int) -> JpegHeader:
    height, width = (data[at + i] << 8 | data[at + i + 1] for i in (5, 7))
    factors = [data[at + 11 + 3 * channel] for channel in range(data[at + 9])]
    sampling = [(factor >> 4, factor & 15) for factor in factors]
    return JpegHeader(height, width, data[at + 4], sampling, at, data[at + 1] in _BASELINE)
