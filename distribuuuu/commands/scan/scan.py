"""Measurements of every image from one decode each: content hash, perceptual hash, size, color, damage."""

import contextlib
import functools
import hashlib
import warnings
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from distribuuuu.commands.scan.pool import map_in_order
from distribuuuu.config.errors import DataError
from distribuuuu.data.datasets.base import ImageDataset, is_file
from distribuuuu.data.decode import DecodeOptions, open_image, open_lazy_image
from distribuuuu.data.image_faults import explain_fault
from distribuuuu.data.raster import pil_to_tensor, read_orientation

# What is kept of an image: 33 bytes. The content hash decides together with the perceptual hash and the size.
RECORD = np.dtype([("content", "u8"), ("hash", "u1", 16), ("width", "u4"), ("height", "u4"), ("flags", "u1")])
# Flags of a record. FLAT: of one color, so without a perceptual hash; INTACT: BROKEN, but its bytes are not damaged.
BROKEN, FLAT, ROTATED, INTACT = (1 << number for number in range(4))

# JPEGs are scaled down while they are decoded, by 2, 4 or 8, but not below this shorter side.
DECODED_SIDE = 128
# Side of the gray thumbnail, whose lowest frequencies are hashed.
SIDE, BITS = 32, 128
# A coefficient below this counts as zero. Symmetric images have many zeros, which compression turns into small values
# of either sign; the mean over the thumbnail of a gray level of 4 / 32 is far below a visible difference.
MIN_COEFFICIENT = 4.0
# Standard deviation in gray levels below which a thumbnail has no structure to compare.
FLAT_STD = 2.0
# Images per task of a worker process.
CHUNK = 64
# Sides that networks are trained at, and the usual ratio of the crop to the resized image.
USUAL_SIDE, CROP_RATIO, SIDE_MULTIPLE, SMALL_SIDE = 224, 0.875, 32, 64
# Shorter side for which 128 px are suggested, about the least at which weights of 224 px work.
LEAST_SIDE = 147


@dataclass
class Scan:
    """Measurements of all images of all splits, RECORD (N,), and why some cannot be used, by index."""

    splits: dict[str, ImageDataset]
    records: np.ndarray
    reasons: dict[int, str] = field(default_factory=dict)

    def __post_init__(self):
        self.names = tuple(self.splits)
        # Index of the first image of each split, and the number of all images.
        self.bounds = np.cumsum([0, *map(len, self.splits.values())]).tolist()

    def locate(self, index: int) -> tuple[str, ImageDataset, int]:
        """Return the split, its data set and the index in it of image `index`."""
        number = bisect_right(self.bounds, index) - 1
        return self.names[number], self.splits[self.names[number]], index - self.bounds[number]

    def name(self, index: int) -> str:
        """Return the file of image `index`, or 'SPLIT: image K'."""
        split, images, local = self.locate(index)
        return images.describe(local) if images.has_files else f"{split}: {images.describe(local)}"


def scan_images(
    splits: dict[str, ImageDataset], options: DecodeOptions, num_workers: int, progress: Callable[[int], object]
) -> Scan:
    """Return the measurements of all images, made by worker processes (0: by this one).

    `progress` is called with the number of newly measured images. A ConfigError is raised if a worker was killed or a
    file cannot be read.
    """
    scan = Scan(splits, np.zeros(sum(map(len, splits.values())), RECORD))
    for number, images in enumerate(splits.values()):
        first, measure = scan.bounds[number], functools.partial(_measure, images, options)
        with contextlib.closing(map_in_order(measure, range(len(images)), num_workers, CHUNK)) as results:
            for indices, measured in results:
                for index, (record, reason) in zip(indices, measured, strict=True):
                    scan.records[first + index] = record
                    if reason:
                        scan.reasons[first + index] = reason
                progress(len(indices))
    return scan


def _measure(images: ImageDataset, options: DecodeOptions, index: int) -> tuple[np.ndarray, str]:
    """Return the record of an image, and the reason if it cannot be used."""
    record = np.zeros((), RECORD)
    try:
        with warnings.catch_warnings():  # damage is in the records
            warnings.simplefilter("ignore")
            measure_image(images.read(index), options, record)
            return record, ""
    except DataError:  # the disk fails, which is no damage of the image
        raise
    except Exception as error:  # decoders raise nearly anything for a damaged file; the report names each
        fault = explain_fault("", error)
        record["flags"] = BROKEN if fault.is_damaged else BROKEN | INTACT
        return record, fault.reason


def measure_image(item: Any, options: DecodeOptions, record: Any) -> None:
    """Write the measurements of the result of `ImageDataset.read` into its RECORD; raise what decoding it raises."""
    image = open_item(item, options)
    record["width"], record["height"] = image.size
    flags = ROTATED * (read_orientation(image, open_image) != 1)  # which training does not apply by default
    image = _load(image)
    data = item if is_file(item) else image.tobytes()
    record["content"] = np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint64)[0]
    gray = np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX), np.float32)
    spread = gray - gray.mean()
    if np.vdot(spread, spread) < FLAT_STD**2 * gray.size:
        flags |= FLAT
    else:
        record["hash"] = hash_thumbnail(gray)
    record["flags"] = flags


def open_item(item: Any, options: DecodeOptions) -> Image.Image:
    """Return the image of an item as PIL image; of a file, only the header has been read."""
    if is_file(item):
        if not len(item):
            raise ValueError("the file is empty")
        return open_image(item, options)
    pixels = open_lazy_image(item, "pil", options).pixels().expand(3, -1, -1)
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def _load(image: Image.Image) -> Image.Image:
    """Return the pixels of an opened image in RGB, of a JPEG at a fraction of its size."""
    scale = DECODED_SIDE / min(image.size)
    image.draft("RGB", (int(scale * image.width), int(scale * image.height)))
    image.load()
    if image.mode in ("RGB", "L"):
        return image.convert("RGB")
    return Image.fromarray(pil_to_tensor(image).permute(1, 2, 0).contiguous().numpy())


@functools.cache
def _transform() -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Return the matrix of the cosine transform, (SIDE, SIDE), and the rows and columns of the hashed coefficients.

    These are the BITS lowest frequencies except the mean. Bit k of the hash is in byte k // 8; the frequencies are
    dealt out to the bytes in turn, so that each byte has low and high ones.
    """
    numbers = np.arange(SIDE)
    matrix = np.cos(np.pi * np.outer(numbers, 2 * numbers + 1) / (2 * SIDE)) * np.sqrt(2 / SIDE)
    matrix[0] /= np.sqrt(2)
    places = sorted(((row, column) for row in numbers for column in numbers), key=lambda place: (sum(place), place))
    chosen = np.array(places[1 : BITS + 1]).reshape(8, BITS // 8, 2).transpose(1, 0, 2).reshape(BITS, 2)
    return matrix.astype(np.float32), (chosen[:, 0], chosen[:, 1])


def hash_thumbnail(gray: np.ndarray) -> np.ndarray:
    """Return the perceptual hash, uint8 (16,), of a gray thumbnail, float32 (32, 32), in levels of 0 to 255.

    A bit is the sign of a coefficient of the discrete cosine transform (pHash: Zauner, 2010, "Implementation and
    Benchmarking of Perceptual Image Hash Functions").
    """
    matrix, chosen = _transform()
    return np.packbits((matrix @ gray @ matrix.T)[chosen] > MIN_COEFFICIENT)


def make_thumbnail(item: Any, options: DecodeOptions) -> np.ndarray:
    """Return an image of `ImageDataset.read` as float32 (32, 32, 3) in levels of 0 to 255."""
    return np.asarray(_load(open_item(item, options)).resize((SIDE, SIDE), Image.Resampling.BOX), np.float32)


def suggest_sizes(shorter: int) -> dict[str, int]:
    """Return TRAIN.IM_SIZE and TEST.IM_SIZE, in pixels, for images of which 90 % have this shorter side or more."""
    train = test = shorter
    if shorter >= SMALL_SIDE:
        train = min(USUAL_SIDE, max(SIDE_MULTIPLE, int(shorter * CROP_RATIO) // SIDE_MULTIPLE * SIDE_MULTIPLE))
        test = round(train / CROP_RATIO)
    return {"TRAIN.IM_SIZE": train, "TEST.IM_SIZE": test}
