"""From an image of any set to the record that is packed, and back to see whether it is sound."""

import io
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# The decoder imports it when it is first called; here it is imported once, before the workers are forked.
import torchvision.io  # noqa: F401

from distribuuuu.config.errors import counted
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.datasets.packed_format import COLUMNS, image_name, shard_name
from distribuuuu.data.decode import DEFAULTS, DecodeOptions, decode, open_lazy_image
from distribuuuu.data.packing.writer import Record


@dataclass(frozen=True)
class Encoder:
    """Makes the record of an image, or says why it cannot.

    Args:
        images: the set.
        root: the folder that the names of its images begin with, to be left out of them.
        raw: store pixels, not files.
        shorter_side: what a larger image is scaled down to; None: its own size.
        quality: of the JPEGs (1 to 100); None: files are kept byte by byte.
        check: decode the files that are kept.
        options: see `decode`.
    """

    images: ImageDataset
    root: str
    raw: bool
    shorter_side: int | None
    quality: int | None
    check: bool
    options: DecodeOptions

    def name(self, index: int) -> str:
        """Return what to call image `index`."""
        return self.images.describe(index).removeprefix(os.path.join(self.root, ""))

    def __call__(self, index: int) -> tuple[Record | str, tuple[int, ...]]:
        """Return the record of image `index`, or why it is broken; and its stamp from before it was read."""
        stamp = self.images.stamp(index)
        try:
            data, height, width = self._encode(self.images.read(index))
        except Exception as error:  # decoders raise nearly anything; the message names the image and the cause
            return f"{self.images.describe(index)}: {type(error).__name__}: {error}", stamp
        name = os.fsencode(self.name(index))
        return Record(data, zlib.crc32(data), self.images.label(index), height, width, name), stamp

    def _encode(self, image) -> tuple[bytes, int, int]:
        if not self.raw and self.quality is None:
            if not is_file(image):
                raise ValueError("has pixels and no file that could be kept")
            if self.check:
                decode(image, options=self.options)
            return bytes(image), 0, 0
        pixels = open_lazy_image(image, "auto", self.options).pixels().permute(1, 2, 0).contiguous().numpy()
        pixels = scale_down(pixels, self.shorter_side)
        if self.raw:
            return pixels.tobytes(), *pixels.shape[:2]
        return encode_jpeg(pixels, self.quality), 0, 0


def is_file(image: object) -> bool:
    """Tell whether what a set has read is the bytes of an image file; else it has pixels."""
    return isinstance(image, (bytes, bytearray, memoryview))


def scale_down(pixels: np.ndarray, shorter_side: int | None) -> np.ndarray:
    """Return uint8 (H, W, 3) with the shorter side of that many pixels, the aspect kept; a smaller image as it is."""
    height, width = pixels.shape[:2]
    least = min(height, width)
    if shorter_side is None or least <= shorter_side:
        return pixels
    from PIL import Image

    size = [max(1, round(side * shorter_side / least)) for side in (width, height)]
    # Bicubic over all the pixels that fall on one: sharper than bilinear, without the rings of Lanczos.
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def encode_jpeg(pixels: np.ndarray, quality: int) -> bytes:
    """Return uint8 (H, W, 3) as a baseline JPEG, 4:2:0, with a restart marker after each row of blocks.

    With the markers, a decoder that wants some rows can begin in the middle of the file.
    """
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality, subsampling="4:2:0", restart_marker_rows=1)
    return buffer.getvalue()


class Checker:
    """Says what is wrong with a stored image, None when it is sound; of a shard that is not there it says nothing.

    Args:
        folder: of the pack.
        meta, columns: its index.
    """

    def __init__(self, folder: Path, meta: Mapping[str, Any], columns: Mapping[str, np.ndarray]):
        self.folder, self.meta, self.columns = folder, meta, columns
        self._files: dict[int, int | None] = {}

    def __call__(self, index: int) -> str | None:
        """Return what is wrong with image `index`, and its name."""
        row = {name: int(self.columns[name][index]) for name in COLUMNS}
        file = self._open(row["shard"])
        if file is None:
            return None
        try:
            data = os.pread(file, row["length"], row["offset"])
            problem = self._problem_of(data, row)
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        name = f"{image_name(self.columns, index)} (image {index} of {self.folder})"
        return f"{name}, in {shard_name(row['shard'])}: {problem}" if problem else None

    def _open(self, number: int) -> int | None:
        if number not in self._files:
            try:
                self._files[number] = os.open(self.folder / shard_name(number), os.O_RDONLY)
            except OSError:
                self._files[number] = None
        return self._files[number]

    def _problem_of(self, data: bytes, row: Mapping[str, int]) -> str | None:
        num_classes, expected = len(self.meta["classes"]), row["height"] * row["width"] * 3
        if len(data) != row["length"]:
            return f"{len(data):,} of its {counted(row['length'], 'byte')} are there"
        if zlib.crc32(data) != row["crc32"]:
            return "its checksum does not match: bytes were changed"
        if not 0 <= row["label"] < num_classes:
            return f"label {row['label']} is outside the {counted(num_classes, 'class')}"
        if self.meta["options"]["format"] == "raw":
            return None if len(data) == expected else f"{counted(len(data), 'byte')} in place of {expected:,}"
        try:
            decode(data, options=DecodeOptions(self.meta.get("max_pixels", DEFAULTS.max_pixels)))
        except Exception as error:  # decoders raise nearly anything
            return f"{type(error).__name__}: {error}"
        return None
