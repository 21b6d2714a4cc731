"""Decoding of JPEGs within limits, and no further than their crop needs.

Other images are read by raster.py; decoders of optional packages are in optional_decoders.py.
"""

from __future__ import annotations

import functools
import io
import re
import struct
import warnings
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import torch

from distribuuuu.config.options import OPTIONAL_DECODERS

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

Buffer = bytes | bytearray | memoryview
# The formats that PIL may read, whatever a file's extension. PIL runs external programs for some formats, e.g.
# Ghostscript for EPS, so no other format is tried.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

_START, _RESTART_INTERVAL, _START_OF_SCAN = 0xD8, 0xDD, 0xDA
# Markers C0 to CF start a frame, except these three: Huffman tables, an extension, arithmetic conditioning.
_NO_FRAME = (0xC4, 0xC8, 0xCC)
_BASELINE = (0xC0, 0xC1)
# The marker of a segment and its size, after which it has two bytes less.
_SEGMENT = struct.Struct(">BBH")


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
    """Options of all decoders, see DATA.MAX_PIXELS (by default PIL's limit), EXIF_ROTATE, CHANNELS and PIXELS."""

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

    def check_size(self, width: int, height: int) -> None:
        """Raise ValueError if an image has more than `max_pixels`."""
        if width * height > self.max_pixels:
            from distribuuuu.data.image_faults import too_large

            raise too_large(f"{width} x {height}", width * height, self.max_pixels)


DEFAULTS = DecodeOptions()


def build_decode_options(cfg) -> DecodeOptions:
    """Return the options of a config."""
    return DecodeOptions(cfg.DATA.MAX_PIXELS, cfg.DATA.EXIF_ROTATE, cfg.DATA.CHANNELS, cfg.DATA.PIXELS)


def open_image(file: Buffer | IO[bytes], options: DecodeOptions = DEFAULTS) -> Image:
    """Return a PIL image of which only the header has been read. All image files that PIL reads are opened here."""
    from PIL import Image, UnidentifiedImageError

    set_up_decoders()
    max_pixels = options.max_pixels
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > 2 * Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = -(-max_pixels // 2)  # PIL rejects more than twice this number
    try:
        stream = io.BytesIO(file) if isinstance(file, (bytes, bytearray, memoryview)) else file
        try:
            image: Image.Image = Image.open(stream, formats=FORMATS)
        except (UnidentifiedImageError, KeyError):  # KeyError: a compression of TIFF
            from distribuuuu.data.image_faults import open_rare

            image = open_rare(file, options, FORMATS)
    except Image.DecompressionBombError as error:
        from distribuuuu.data.image_faults import too_large

        num_pixels = re.findall(r"\d+", str(error))[0]
        raise too_large(num_pixels, int(num_pixels), max_pixels) from None
    options.check_size(*image.size)
    if image.mode in ("F", "I") and options.pixels == "uint8":
        from distribuuuu.data.image_faults import check_depth

        check_depth(image)
    return image


def find_common_header(data: Buffer, decoder: str, options: DecodeOptions) -> JpegHeader | None:
    """Return the header of a JPEG that all decoders read alike, 8 bits, gray or color; None: PIL decodes the file.

    Each decoder converts CMYK in its own way.
    """
    header = read_jpeg_header(data) if decoder != "pil" and (options.is_rgb or options.is_gray) else None
    if header is None:
        return None
    options.check_size(header.width, header.height)
    return header if header.channels in (1, 3) and header.bits == 8 else None


@functools.cache
def set_up_decoders() -> None:
    """Ignore decoders' warnings (torchvision's will move, an image is large, its EXIF is damaged); raise a limit."""
    from PIL import PngImagePlugin

    warnings.filterwarnings("ignore", message="The image decoding and encoding capabilities")
    warnings.filterwarnings("ignore", message="Image size .* exceeds limit")
    warnings.filterwarnings("ignore", message="Corrupt EXIF data")
    # The text and the color profile of a PNG are not the pixels: up to 64 MiB of them, PIL's limit for all texts.
    PngImagePlugin.MAX_TEXT_CHUNK = max(PngImagePlugin.MAX_TEXT_CHUNK, PngImagePlugin.MAX_TEXT_MEMORY)


# --------------------------------------------------------------------------------------- decoding


def decode(
    data: Buffer, decoder: str = "auto", options: DecodeOptions = DEFAULTS, header: JpegHeader | None = None
) -> torch.Tensor:
    """Return the pixels of an image file: uint8 (3, H, W) in RGB, or as the options say (`decode_other`).

    Of an animation, it is the first frame.

    Args:
        decoder: "auto", or "torchvision": torchvision for the JPEGs that it decodes as PIL does, else PIL; "pil";
            "nvimgcodec": for JPEGs, else PIL.
        header: the result of `find_common_header`; None: it is read.

    Raises:
        ValueError, RuntimeError, OSError: it is no image, is truncated, or has too many pixels.
    """
    if not len(data):
        raise ValueError("the file is empty")
    set_up_decoders()
    header = header or find_common_header(data, decoder, options)
    pixels = _decode_jpeg(data, decoder, options) if header else None
    if pixels is None or options.exif_rotate:
        from distribuuuu.data import raster

        pixels = raster.decode_other(data, options, open_image) if pixels is None else pixels
        if options.exif_rotate:
            pixels = raster.rotate(pixels, raster.read_orientation(data, open_image))
    return pixels


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

    def crop(self, box: Box) -> torch.Tensor:
        """Return a region: uint8 (3, H, W)."""
        return box.crop(self.pixels())


class EncodedImage(LazyImage):
    """An image file in memory, decoded on demand; for the arguments see `decode`."""

    def __init__(self, data: Buffer, decoder: str, options: DecodeOptions = DEFAULTS):
        self._data = data
        self._decoder = decoder
        if options.exif_rotate:
            from distribuuuu.data.raster import read_orientation

            options = options._replace(exif_rotate=read_orientation(data, open_image) != 1)
        self._options = options
        self._decoded: torch.Tensor | None = None
        # An image that has to be rotated is decoded in full.
        self._header = None if options.exif_rotate else find_common_header(data, decoder, options)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels, from the header of a JPEG, else from the pixels."""
        return (self._header.height, self._header.width) if self._header else super().size

    def pixels(self) -> torch.Tensor:
        """Return the full image: uint8 (3, H, W)."""
        if self._decoded is None:
            self._decoded = decode(self._data, self._decoder, self._options, self._header)
        return self._decoded

    def crop(self, box: Box) -> torch.Tensor:
        """Return the pixels of a region, decoding only the rows around it where the file allows that."""
        if not self._header:
            return super().crop(box)
        if self._decoder in OPTIONAL_DECODERS and self._options.is_rgb:
            from distribuuuu.data.optional_decoders import crop_nvimgcodec

            if (pixels := crop_nvimgcodec(self._data, self._header, box)) is not None:
                return pixels
        data: Buffer = self._data
        if self._header.restart_interval:
            from distribuuuu.data.optional_decoders import cut_rows

            data, first_row = cut_rows(data, self._header, box.top, box.top + box.height)
            box = Box(box.top - first_row, *box[1:])
        return box.crop(decode(data, self._decoder, self._options, self._header))


def open_lazy_image(
    item: Buffer | np.ndarray | torch.Tensor | Image, decoder: str, options: DecodeOptions = DEFAULTS
) -> LazyImage:
    """Return the result of `ImageDataset.read` as a LazyImage; raise ValueError for an array that is no image."""
    if isinstance(item, (bytes, bytearray, memoryview)):
        return EncodedImage(item, decoder, options)
    from distribuuuu.data.raster import pixels_of

    pixels = pixels_of(item, options)
    options.check_size(pixels.shape[2], pixels.shape[1])
    return LazyImage(pixels)


def _decode_jpeg(data: Buffer, decoder: str, options: DecodeOptions) -> torch.Tensor | None:
    """Return the pixels of a JPEG that all decoders read alike, of a gray one its luminance; None: PIL decodes it."""
    if decoder in OPTIONAL_DECODERS and options.is_rgb:
        from distribuuuu.data.optional_decoders import decode_nvimgcodec

        return decode_nvimgcodec(data)
    try:
        decode_jpeg, rgb, gray = _open_torchvision()
        # A tensor shares writable memory; read-only bytes are copied.
        shared = torch.frombuffer(bytearray(data) if memoryview(data).readonly else data, dtype=torch.uint8)
        return decode_jpeg(shared, rgb if options.is_rgb else gray)
    except (RuntimeError, ImportError, AttributeError):  # rejected, or a torchvision without decoders
        return None


@functools.cache
def _open_torchvision() -> tuple[Any, int, int]:
    """Return the JPEG operator of torchvision, whose Python wrapper issues a warning at each call, and its modes."""
    from torchvision.io import ImageReadMode

    return torch.ops.image.decode_jpeg.default, ImageReadMode.RGB.value, ImageReadMode.GRAY.value


# ------------------------------------------------------------------------------------ JPEG headers


@dataclass
class JpegHeader:
    """The frame of a JPEG, and the positions of its parts in the file.

    Attributes:
        sampling: (horizontal, vertical) sampling factors of each channel.
        is_baseline: sequential Huffman coding.
        restart_interval: blocks between two restart markers; 0: none.
        scan_at, scan_channels: position and channels of the first scan's data; 0: not read yet.
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
        prefix, marker, size = _SEGMENT.unpack_from(data, position)
        if prefix != 0xFF:
            return None
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        end = position + 2 + size
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
