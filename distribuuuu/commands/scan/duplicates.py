"""Duplicate images: equal contents, and perceptual hashes that differ in few bits, found by an index of their bands."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from distribuuuu.commands.scan.disjoint_sets import DisjointSets
from distribuuuu.commands.scan.scan import FLAT, UNUSABLE, Scan, make_thumbnail
from distribuuuu.data.decode import DecodeOptions

# Hashes of near-duplicates differ in at most this many of their 128 bits. On 1,564 photographs of clothes, copies at
# JPEG quality 30, at a quarter of the size, in gray or 20 % brighter are within 12; no two photographs are within 18.
RADIUS = 12
# Similarity that confirms a pair: correlation of the gray thumbnails; where both are colored, cosine of the colors.
MIN_CORRELATION, MIN_COLOR_COSINE = 0.97, 0.6
# Objects of one kind look alike at 28 px, e.g. the shoes of Fashion-MNIST. Below this shorter side, the correlation has
# to be higher.
SMALL_SIDE, MIN_CORRELATION_OF_SMALL = 64, 0.995
# Weights of R, G and B in the gray level (ITU-R BT.601), as in PIL.
LUMA = np.array([0.299, 0.587, 0.114], np.float32)
# Root mean square of the difference between the channels and the gray level above which a thumbnail is colored.
COLORED = 6.0
# Images that share a band are compared with the next ones only, up to this number: the time stays bounded if the hashes
# of most images are alike. Groups are still found by way of others.
MAX_NEIGHBORS = 256
# Thumbnails in memory, of 12 KiB each.
_CACHED = 1024
# Bands of 16 bits of a hash.
NUM_BANDS = 8


class DuplicateGroup(NamedTuple):
    """Images that are copies of each other.

    Attributes:
        images: their indices in the scan, ascending.
        identical: whether the contents of all are equal.
        distance: the largest difference, in bits, of the hashes by which two of them were found.
    """

    images: list[int]
    identical: bool
    distance: int


def find_near_pairs(
    hashes: np.ndarray,
    progress: Callable[[int], object] = lambda num: None,
    is_compared: np.ndarray | None = None,
) -> np.ndarray:
    """Return pairs of hashes that differ in at most RADIUS bits.

    Hashes that are equal in one of NUM_BANDS bands of 16 bits are compared: all pairs of up to 7 different bits, and
    most of more.

    Args:
        hashes: uint8 (N, 16), which may be a column of records.
        progress: called after each band.
        is_compared: the hashes to compare, bool (N,); None: all.

    Returns:
        int64 (pairs, 3): two indices, the smaller one first, and the number of different bits.
    """
    rows = np.arange(len(hashes)) if is_compared is None else np.flatnonzero(is_compared)
    words = np.ascontiguousarray(hashes[rows]).view(np.uint16)
    found = [np.zeros((0, 3), np.int64)]
    for band in range(NUM_BANDS):
        order = np.argsort(words[:, band], kind="stable")
        keys = words[order, band]
        for gap in range(1, min(MAX_NEIGHBORS, len(rows) - 1) + 1):
            places = np.flatnonzero(keys[gap:] == keys[:-gap])
            if not len(places):
                break
            one, other = order[places], order[places + gap]
            distances = count_bits(words[one] ^ words[other])
            is_near = distances <= RADIUS
            found.append(np.stack([one[is_near], other[is_near], distances[is_near]], 1))
        progress(1)
    pairs = np.unique(np.concatenate(found), axis=0)
    return np.column_stack([rows[pairs[:, 0]], rows[pairs[:, 1]], pairs[:, 2]])


@functools.cache
def _bits_of_words() -> np.ndarray:
    """Return the number of ones of each 16-bit number; numpy counts bits from version 2 on only."""
    return np.unpackbits(np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2), axis=1).sum(1, np.uint8)


def count_bits(words: np.ndarray) -> np.ndarray:
    """Return the number of ones in each row of uint16 (N, 8), as int64 (N,)."""
    return _bits_of_words()[words].sum(1, np.int64)


def find_groups(
    scan: Scan, options: DecodeOptions, progress: Callable[[int], object] = lambda num: None
) -> list[DuplicateGroup]:
    """Return the groups of duplicates among the images of a scan, in the order of their first images.

    Near-duplicates are confirmed on the pixels of both images.
    """
    sets = DisjointSets()
    distances: dict[int, int] = {}
    flags, is_copy = scan.records["flags"], np.zeros(len(scan.records), bool)
    for one, other in _find_identical(scan.records):
        sets.join(one, other)
        is_copy[other] = True
    pairs = find_near_pairs(scan.records["hash"], progress, (flags & (UNUSABLE | FLAT) == 0) & ~is_copy)
    confirm = Confirm(scan, options)
    for one, other, distance in pairs[np.lexsort((pairs[:, 1], pairs[:, 0], pairs[:, 2]))].tolist():
        if sets.find(one) != sets.find(other) and confirm(one, other):
            sets.join(one, other)
            distances[one] = distance
    groups = []
    for images in sets.groups():
        identical = all(scan.records[index] == scan.records[images[0]] for index in images)
        groups.append(DuplicateGroup(images, identical, max(distances.get(index, 0) for index in images)))
    return groups


def _find_identical(records: np.ndarray) -> list[tuple[int, int]]:
    """Return pairs of images with equal contents: each copy with the one before it."""
    usable = np.flatnonzero(records["flags"] & UNUSABLE == 0)
    order = usable[np.argsort(records["content"][usable], kind="stable")]
    is_equal = records["content"][order[1:]] == records["content"][order[:-1]]
    pairs = zip(order[:-1][is_equal].tolist(), order[1:][is_equal].tolist(), strict=True)
    return [(one, other) for one, other in pairs if records[one] == records[other]]


class Confirm:
    """Decides whether two images show the same, by their thumbnails.

    Args:
        scan: the images.
        options: see `decode`.
    """

    def __init__(self, scan: Scan, options: DecodeOptions):
        self._scan, self._options = scan, options
        self._thumbnail = functools.lru_cache(_CACHED)(self._make)

    def __call__(self, one: int, other: int) -> bool:
        """Return whether images with similar hashes are near-duplicates."""
        first, second = self._thumbnail(one), self._thumbnail(other)
        if first is None or second is None:
            return False
        sides = [self._scan.records[index][name] for index in (one, other) for name in ("width", "height")]
        least = MIN_CORRELATION if min(sides) >= SMALL_SIDE else MIN_CORRELATION_OF_SMALL
        gray = [pixels @ LUMA for pixels in (first, second)]
        if _cosine(*(pixels - pixels.mean() for pixels in gray)) < least:
            return False
        # A copy in gray has no color to compare.
        colors = [pixels - level[..., None] for pixels, level in zip((first, second), gray, strict=True)]
        is_colored = all(np.sqrt((color**2).mean()) > COLORED for color in colors)
        return not is_colored or _cosine(*colors) >= MIN_COLOR_COSINE

    def _make(self, index: int) -> np.ndarray | None:
        _, images, local = self._scan.locate(index)
        try:
            return make_thumbnail(images.read(local), self._options)
        except Exception:  # changed since the scan; decoders raise nearly anything
            return None


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float((one * other).sum() / max(np.sqrt((one**2).sum() * (other**2).sum()), 1e-9))
