"""Duplicate images: equal contents, and perceptual hashes that differ in few bits, without comparing all pairs."""

import functools
import itertools
from collections.abc import Callable, Iterator
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
# Images that share a key are compared with the next ones only, up to this number: the time stays bounded if the hashes
# of most images are alike. Groups are still found by way of others.
MAX_NEIGHBORS = 256
# Thumbnails in memory, of 12 KiB each.
_CACHED = 1024
# Hashes that are processed at a time, and the bits of a sort key that hold the index of a hash.
_ROWS, _INDEX = 1 << 16, np.uint64(0xFFFFFFFF)


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


def find_near_pairs(
    hashes: np.ndarray,
    progress: Callable[[int], object] = lambda num: None,
    is_compared: np.ndarray | None = None,
) -> np.ndarray:
    """Return the pairs of hashes that differ in at most RADIUS bits.

    Hashes with an equal triple of bytes are neighbors after sorting; these are compared bit by bit. Of several equal
    hashes, the first stands for all others. Besides the pairs, the search needs about 10 bytes per hash.

    Args:
        hashes: uint8 (N, 16), which may be a column of records.
        progress: called after each of the triples of `key_bytes`.
        is_compared: the hashes to compare, bool (N,); None: all.

    Returns:
        int64 (pairs, 3): two indices, the smaller one first, and the number of different bits.
    """
    is_first = np.ones(len(hashes), bool) if is_compared is None else is_compared.copy()
    equal = _find_equal(hashes, is_first)
    is_first[equal[:, 1]] = False
    found = np.zeros(0, np.uint64)
    for triple in key_bytes():
        keys = _sort_keys(hashes, is_first, functools.partial(_join_bytes, triple))
        new = [one << np.uint64(32) | other for one, other in _compare_neighbors(keys, hashes)]
        found = np.unique(np.concatenate([found, *new])) if new else found
        progress(1)
    near = np.sort(np.stack([found >> np.uint64(32), found & _INDEX], 1).astype(np.int64), axis=1)
    distances = np.concatenate([np.zeros(len(equal), np.int64), _distances(hashes, *near.T)])
    return np.column_stack([np.concatenate([equal, near]), distances])


def _sort_keys(hashes: np.ndarray, is_used: np.ndarray, shorten: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return ascending uint64 of the hashes in use: 32 bits of `shorten` above the index, so that 8 bytes move."""
    keys, end = np.empty(np.count_nonzero(is_used), np.uint64), 0
    for start in range(0, len(hashes), _ROWS):
        chosen = np.flatnonzero(is_used[start : start + _ROWS])
        short = shorten(hashes[start : start + _ROWS])[chosen]
        keys[end : end + len(chosen)] = short << np.uint64(32) | (chosen + start).astype(np.uint64)
        end += len(chosen)
    keys.sort()
    return keys


def _join_bytes(triple: tuple[int, ...], hashes: np.ndarray) -> np.ndarray:
    first, second, third = (hashes[:, byte].astype(np.uint64) for byte in triple)
    return first << np.uint64(16) | second << np.uint64(8) | third


def _mix(hashes: np.ndarray) -> np.ndarray:
    """Return 32 bits that depend on all bits of a hash."""
    words = np.ascontiguousarray(hashes).view(np.uint64)
    return (words * np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)).sum(1) >> np.uint64(32)


def _find_equal(hashes: np.ndarray, is_used: np.ndarray) -> np.ndarray:
    """Return the pairs of equal hashes, the first one of them with each other one: int64 (pairs, 2).

    Of hashes with the same `_mix` that are not equal, some copies may be left out; the later search finds them.
    """
    keys = _sort_keys(hashes, is_used, _mix)
    parts = [np.zeros((0, 2), np.int64)]
    for start in range(0, len(keys), _ROWS):
        at = _find_neighbors(keys, start) + 1
        at = at[(hashes[keys[at] & _INDEX] == hashes[keys[at - 1] & _INDEX]).all(1)]
        parts.append(np.stack([at, (keys[at] & _INDEX).astype(np.int64)], 1))
    places, others = np.concatenate(parts).T
    starts = np.diff(places, prepend=-1) != 1  # of each run of equal hashes, the second place
    firsts = keys[places[starts] - 1] & _INDEX
    return np.stack([firsts.astype(np.int64)[np.cumsum(starts) - 1], others], 1)


def _find_neighbors(keys: np.ndarray, start: int) -> np.ndarray:
    """Return the places from `start` on, up to _ROWS, of keys that are equal to the next one above the index."""
    part = keys[start : start + _ROWS + 1]
    return start + np.flatnonzero((part[1:] ^ part[:-1]) >> np.uint64(32) == 0)


def _compare_neighbors(keys: np.ndarray, hashes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the indices of pairs within RADIUS among the sorted keys that are equal above the index."""
    for begin in range(0, len(keys), _ROWS):
        start = _find_neighbors(keys, begin)
        for gap in range(1, MAX_NEIGHBORS + 1):
            if not len(start):
                break
            one, other = keys[start] & _INDEX, keys[start + gap] & _INDEX
            is_near = _distances(hashes, one, other) <= RADIUS
            yield one[is_near], other[is_near]
            start = start[start + gap + 1 < len(keys)]
            start = start[(keys[start] ^ keys[start + gap + 1]) >> np.uint64(32) == 0]


def _distances(hashes: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return count_bits((hashes[one] ^ hashes[other]).view(np.uint64))


@functools.cache
def _bits_of_words() -> np.ndarray:
    """Return the number of ones of each 16-bit number; numpy counts bits from version 2 on only."""
    return np.unpackbits(np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2), axis=1).sum(1, np.uint8)


def count_bits(words: np.ndarray) -> np.ndarray:
    """Return the number of ones in each row of uint64 (N, 2), as int64 (N,)."""
    return _bits_of_words()[np.ascontiguousarray(words).view(np.uint16)].sum(1, np.int64)


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
    is_usable = records["flags"] & UNUSABLE == 0
    contents = records["content"][is_usable]
    contents.sort()
    repeated = np.unique(contents[1:][contents[1:] == contents[:-1]])
    starts = range(0, len(records) if len(repeated) else 0, _ROWS)
    parts = [start + np.flatnonzero(np.isin(records["content"][start : start + _ROWS], repeated)) for start in starts]
    copies = np.concatenate([np.zeros(0, np.int64), *parts])
    copies = copies[is_usable[copies]]
    order = copies[np.argsort(records["content"][copies], kind="stable")]
    return [(one, other) for one, other in itertools.pairwise(order.tolist()) if records[one] == records[other]]


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
