"""Encoding of images of any data set as records."""

import io
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# The decoder imports it at its first call; importing it here does so once, before the workers are forked.
import torchvision.io  # noqa: F401

from distribuuuu.config import ConfigError
from distribuuuu.data.datasets.base import ImageDataset, is_file
from distribuuuu.data.decode import DecodeOptions, decode, open_lazy_image
from distribuuuu.data.image_faults import ImageFault, explain_fault
from distribuuuu.data.packed.format import MAX_RECORD


class Record(NamedTuple):
    """An image as it is stored; height and width are those of the pixels of format raw, else 0."""

    data: bytes
    crc32: int
    label: int
    height: int
    width: int
    name: bytes


@dataclass(frozen=True)
class Encoder:
    """Encodes image `index` as a record.

    Args:
        root: the folder to remove from the image names.
        pack: the options of the pack: format (raw: pixels instead of files); shorter_side, to which larger images are
            scaled down (None: keep the size); quality of the JPEGs (None: keep the files unchanged).
        options: see `decode`.
    """

    images: ImageDataset
    root: str
    pack: Mapping[str, Any]
    options: DecodeOptions

    def name(self, index: int) -> str:
        """Return the name of image `index`, relative to `root`."""
        return self.images.describe(index).removeprefix(os.path.join(self.root, ""))

    def __call__(self, index: int) -> Record | ImageFault:
        """Return the record of image `index`, or why it cannot be read."""
        try:
            data, height, width = self._encode(self.images.read(index))
            if len(data) > MAX_RECORD:
                raise ValueError(f"{len(data):,} bytes; a pack holds images of at most {MAX_RECORD:,}")
        except (ConfigError, MemoryError):  # the fault of the options, the network, the disk or the machine
            raise
        except Exception as error:  # decoders raise nearly anything; the message names the image and the cause
            return explain_fault(self.images.describe(index), error)
        label, name = int(self.images.label(index)), os.fsencode(self.name(index))
        return Record(data, zlib.crc32(data), label, height, width, name)

    def _encode(self, image: Any) -> tuple[bytes, int, int]:
        is_raw, quality = self.pack["format"] == "raw", self.pack["quality"]
        if not is_raw and quality is None:
            if not is_file(image):
                fix = "fix: add --quality 90, or use --format raw"
                raise ConfigError(f"--format jpeg: the data set has pixels but no files to keep unchanged; {fix}")
            decode(image, options=self.options)  # a damaged one is no record
            return bytes(image), 0, 0
        pixels = open_lazy_image(image, "auto", self.options).pixels().permute(1, 2, 0).contiguous().numpy()
        pixels = scale_down(pixels, self.pack["shorter_side"])
        return (pixels.tobytes(), *pixels.shape[:2]) if is_raw else (encode_jpeg(pixels, quality), 0, 0)


def scale_down(pixels: np.ndarray, shorter_side: int | None) -> np.ndarray:
    """Return uint8 (H, W, 3) scaled down to a shorter side, keeping the aspect ratio; smaller images are unchanged."""
    height, width = pixels.shape[:2]
    least = min(height, width)
    if shorter_side is None or least <= shorter_side:
        return pixels
    from PIL import Image

    size = [max(1, round(side * shorter_side / least)) for side in (width, height)]
    # Antialiased bicubic: sharper than bilinear, with less ringing than Lanczos.
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def encode_jpeg(pixels: np.ndarray, quality: int) -> bytes:
    """Return uint8 (H, W, 3) as a baseline JPEG, 4:2:0, with a restart marker after each row of blocks.

    The markers allow decoding a range of rows.
    """
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality, subsampling="4:2:0", restart_marker_rows=1)
    return buffer.getvalue()
