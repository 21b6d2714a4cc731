"""Duplicate images: equal contents, and perceptual hashes that differ in few bits, without comparing all pairs."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from distribuuuu.data.decode import DecodeOptions
from distribuuuu.data.doctor.scan import FLAT, UNUSABLE, Scan, make_thumbnail

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
# Images that share a key are compared with the next ones only, up to this number: the time stays bounded if the hashes
# of most images are alike. Groups are still found by way of others.
MAX_NEIGHBORS = 256
# Thumbnails in memory, of 12 KiB each.
_CACHED = 1024


class Group(NamedTuple):
    """Images that are copies of each other.

    Attributes:
        images: their indices in the scan, ascending.
        identical: whether the contents of all are equal.
        distance: the largest difference, in bits, of the hashes by which two of them were found.
    """

    images: list[int]
    identical: bool
    distance: int


def key_bytes() -> list[tuple[int, ...]]:
    """Return triples of the 16 bytes of a hash: any four of the bytes include one of the triples.

    Hashes that differ in at most 12 bits are equal in at least four bytes, so in a triple. The bytes are divided into
    three groups; a triple is inside of a group, or has two bytes of one and one of the next (Turan, 1941).
    """
    chosen: list[tuple[int, ...]] = []
    for triple in itertools.combinations(range(16), 3):
        counts = [sum(byte % 3 == group for byte in triple) for group in range(3)]
        if 3 in counts or any(counts[group] == 2 and counts[(group + 1) % 3] == 1 for group in range(3)):
            chosen.append(triple)
    return chosen


def find_near_pairs(hashes: np.ndarray, progress: Callable[[int], object] = lambda num: None) -> np.ndarray:
    """Return the pairs of hashes that differ in at most RADIUS bits.

    Hashes with an equal triple of bytes are neighbors after sorting; these are compared bit by bit. Of several equal
    hashes, the first stands for all others.

    Args:
        hashes: uint8 (N, 16).
        progress: called after each of the triples of `key_bytes`.

    Returns:
        int64 (pairs, 3): two indices, the smaller one first, and the number of different bits.
    """
    words = np.ascontiguousarray(hashes).view(np.uint64)
    order = np.lexsort((words[:, 1], words[:, 0]))
    is_first = np.ones(len(order), bool)
    is_first[1:] = (words[order[1:]] != words[order[:-1]]).any(1)
    # The sort is stable, so the first of equal hashes has the smallest index.
    firsts = order[is_first]
    equal = np.stack([firsts[np.cumsum(is_first)[~is_first] - 1], order[~is_first]], 1)
    words = words[firsts]
    del hashes, order, is_first
    columns = words.view(np.uint8)
    found = np.zeros(0, np.uint64)
    for triple in key_bytes():
        # The sort moves one number for each image: the key above the position.
        keys = np.arange(len(firsts), dtype=np.uint64)
        for shift, byte in zip((48, 40, 32), triple, strict=True):
            keys |= columns[:, byte].astype(np.uint64) << np.uint64(shift)
        keys.sort()
        new = [one << np.uint64(32) | other for one, other in _compare_neighbors(keys, words)]
        found = np.unique(np.concatenate([found, *new])) if new else found
        progress(1)
    one, other = (found >> np.uint64(32)).astype(np.int64), (found & np.uint64(0xFFFFFFFF)).astype(np.int64)
    near = np.sort(np.stack([firsts[one], firsts[other]], 1), axis=1)
    distance = np.concatenate([np.zeros(len(equal), np.int64), count_bits(words[one] ^ words[other])])
    return np.column_stack([np.concatenate([equal, near]), distance])


def _compare_neighbors(keys: np.ndarray, words: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the positions of pairs within RADIUS among the sorted keys that are equal above bit 32."""
    shift, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    start = np.flatnonzero((keys[1:] ^ keys[:-1]) >> shift == 0)
    for gap in range(1, MAX_NEIGHBORS + 1):
        if not len(start):
            return
        one, other = keys[start] & mask, keys[start + gap] & mask
        is_near = count_bits(words[one] ^ words[other]) <= RADIUS
        yield one[is_near], other[is_near]
        start = start[start + gap + 1 < len(keys)]
        start = start[(keys[start] ^ keys[start + gap + 1]) >> shift == 0]


@functools.cache
def _bits_of_words() -> np.ndarray:
    """Return the number of ones of each 16-bit number; numpy counts bits from version 2 on only."""
    return np.unpackbits(np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2), axis=1).sum(1, np.uint8)


def count_bits(words: np.ndarray) -> np.ndarray:
    """Return the number of ones in each row of uint64 (N, 2), as int64 (N,)."""
    return _bits_of_words()[np.ascontiguousarray(words).view(np.uint16)].sum(1, np.int64)


def find_groups(
    scan: Scan, options: DecodeOptions, progress: Callable[[int], object] = lambda num: None
) -> list[Group]:
    """Return the groups of duplicates among the images of a scan, in the order of their first images.

    Near-duplicates are confirmed on the pixels of both images.
    """
    parents: dict[int, int] = {}
    distances: dict[int, int] = {}
    flags, is_copy = scan.records["flags"], np.zeros(len(scan.records), bool)
    for one, other in _find_identical(scan.records):
        _join(parents, one, other)
        is_copy[other] = True
    compared = np.flatnonzero((flags & (UNUSABLE | FLAT) == 0) & ~is_copy)
    pairs = find_near_pairs(scan.records["hash"][compared], progress)
    confirm = Confirm(scan, options)
    for one, other, distance in pairs[np.lexsort((pairs[:, 1], pairs[:, 0], pairs[:, 2]))].tolist():
        one, other = int(compared[one]), int(compared[other])
        if _root(parents, one) != _root(parents, other) and confirm(one, other):
            _join(parents, one, other)
            distances[one] = distance
    return _collect(parents, distances, scan.records)


def _find_identical(records: np.ndarray) -> list[tuple[int, int]]:
    """Return pairs of images with equal contents: each copy with the one before it."""
    usable = np.flatnonzero(records["flags"] & UNUSABLE == 0)
    order = usable[np.argsort(records["content"][usable], kind="stable")]
    before, after = order[:-1], order[1:]
    is_equal = records["content"][before] == records["content"][after]
    pairs = np.stack([before[is_equal], after[is_equal]], 1)
    return [(one, other) for one, other in pairs.tolist() if records[one] == records[other]]


def _root(parents: dict[int, int], index: int) -> int:
    while (parent := parents.get(index, index)) != index:
        parents[index] = parents.get(parent, parent)
        index = parent
    return index


def _join(parents: dict[int, int], one: int, other: int) -> None:
    first, second = sorted((_root(parents, one), _root(parents, other)))
    parents[second] = parents.setdefault(first, first)


def _collect(parents: dict[int, int], distances: dict[int, int], records: np.ndarray) -> list[Group]:
    members: dict[int, list[int]] = {}
    for index in sorted(parents):
        members.setdefault(_root(parents, index), []).append(index)
    groups = []
    for images in members.values():
        identical = all(records[index] == records[images[0]] for index in images)
        groups.append(Group(images, identical, max((distances.get(index, 0) for index in images), default=0)))
    return groups


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
