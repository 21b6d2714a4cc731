"""Duplicate images: equal contents, and perceptual hashes that differ in few bits, found by an index of their bands."""

import functools

import numpy as np

from distribuuuu.commands.scan.scan import BROKEN, FLAT, Scan, make_thumbnail
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


def find_near_pairs(hashes: np.ndarray) -> np.ndarray:
    """Return pairs of hashes, uint8 (N, 16), that differ in at most RADIUS bits.

    Hashes that are equal in one of their bands of 16 bits are compared: all pairs of up to 7 different bits are found,
    and most of more. A pair, int64 (pairs, 3), is two indices, the smaller one first, and the number of different bits.
    """
    words = np.ascontiguousarray(hashes).view(np.uint16)
    found = [np.zeros((0, 3), np.int64)]
    for band in words.T:
        order = np.argsort(band, kind="stable")
        keys = band[order]
        for gap in range(1, min(MAX_NEIGHBORS, len(hashes) - 1) + 1):
            places = np.flatnonzero(keys[gap:] == keys[:-gap])
            if not len(places):
                break
            one, other = order[places], order[places + gap]
            distances = np.unpackbits(hashes[one] ^ hashes[other], axis=1).sum(1, np.int64)
            pairs = np.stack([one, other, distances], 1)
            found.append(pairs[distances <= RADIUS])
    return np.unique(np.concatenate(found), axis=0)


def find_groups(scan: Scan, options: DecodeOptions) -> list[list[int]]:
    """Return the groups of copies among the images of a scan, as ascending indices, in the order of their first images.

    Near-duplicates are confirmed on the pixels of both images.
    """
    group_of: dict[int, list[int]] = {}

    def join(one: int, other: int) -> None:
        small, large = sorted((group_of.setdefault(index, [index]) for index in (one, other)), key=len)
        large += small
        group_of.update(dict.fromkeys(small, large))

    flags, is_copy = scan.records["flags"], np.zeros(len(scan.records), bool)
    for one, other in _find_identical(scan.records):
        join(one, other)
        is_copy[other] = True
    rows = np.flatnonzero((flags & (BROKEN | FLAT) == 0) & ~is_copy)
    pairs = find_near_pairs(scan.records["hash"][rows])
    thumbnail = functools.lru_cache(_CACHED)(functools.partial(_make_thumbnail, scan, options))
    for first, second, _ in pairs[np.lexsort((pairs[:, 1], pairs[:, 0], pairs[:, 2]))].tolist():
        one, other = int(rows[first]), int(rows[second])
        if group_of.setdefault(one, [one]) is not group_of.setdefault(other, [other]):
            sides = [scan.records[index][name] for index in (one, other) for name in ("width", "height")]
            if are_alike(thumbnail(one), thumbnail(other), min(sides)):
                join(one, other)
    found = {id(group): group for group in group_of.values() if len(group) > 1}
    return sorted(map(sorted, found.values()))


def _find_identical(records: np.ndarray) -> list[tuple[int, int]]:
    """Return pairs of images with equal contents: each copy with the one before it."""
    usable = np.flatnonzero(records["flags"] & BROKEN == 0)
    order = usable[np.argsort(records["content"][usable], kind="stable")]
    is_equal = records["content"][order[1:]] == records["content"][order[:-1]]
    pairs = zip(order[:-1][is_equal].tolist(), order[1:][is_equal].tolist(), strict=True)
    return [(one, other) for one, other in pairs if records[one] == records[other]]


def are_alike(one: np.ndarray | None, other: np.ndarray | None, side: int) -> bool:
    """Return whether two images show the same, by their thumbnails; `side`: the shortest side of both, in pixels."""
    if one is None or other is None:
        return False
    gray = [pixels @ LUMA for pixels in (one, other)]
    correlation = _cosine(*(pixels - pixels.mean() for pixels in gray))
    if correlation < (MIN_CORRELATION if side >= SMALL_SIDE else MIN_CORRELATION_OF_SMALL):
        return False
    # A copy in gray has no color to compare.
    colors = [pixels - level[..., None] for pixels, level in zip((one, other), gray, strict=True)]
    is_colored = all(np.sqrt((color**2).mean()) > COLORED for color in colors)
    return not is_colored or _cosine(*colors) >= MIN_COLOR_COSINE


def _make_thumbnail(scan: Scan, options: DecodeOptions, index: int) -> np.ndarray | None:
    _, images, local = scan.locate(index)
    try:
        return make_thumbnail(images.read(local), options)
    except Exception:  # the file has changed since the scan, which decoded it; decoders raise nearly anything
        return None


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float((one * other).sum() / max(np.sqrt((one**2).sum() * (other**2).sum()), 1e-9))
