"""Images before they are cropped, and the options by which their files are decoded."""

from typing import NamedTuple

import torch

Buffer = bytes | bytearray | memoryview


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
