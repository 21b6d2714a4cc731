#!/usr/bin/env python3
"""Measure the check of a data set: images per second on one core, the search for near-duplicates, and its memory.

The search gets synthetic hashes: random bits, and hashes with correlated bits, as images of one kind have. Copies with
up to as many different bits as the search allows are planted among both; all must be found.
"""

import argparse
import time
import tracemalloc
from pathlib import Path

import numpy as np
from bench_support.machine import describe_run

from distribuuuu.commands.doctor.findings import examine
from distribuuuu.commands.doctor.layout import open_folder
from distribuuuu.commands.scan.duplicates import RADIUS, find_groups, find_near_pairs
from distribuuuu.commands.scan.scan import BITS, RECORD, Scan, scan_images
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import DEFAULTS

MIN_IMAGES_PER_S, MAX_SEARCH_S, MAX_BYTES = 700, 60, 100
# Dimensions of the space that correlated hashes are projected from.
DIMENSIONS = 40


def make_hashes(num: int, correlated: bool, random: np.random.Generator) -> np.ndarray:
    """Return synthetic hashes, uint8 (num, 16)."""
    if not correlated:
        return random.integers(0, 256, (num, BITS // 8), np.uint8)
    directions = random.normal(size=(DIMENSIONS, BITS)).astype(np.float32)
    parts = [random.normal(size=(min(50_000, num - start), DIMENSIONS)) for start in range(0, num, 50_000)]
    return np.concatenate([np.packbits(part.astype(np.float32) @ directions > 0, axis=1) for part in parts])


def plant_copies(hashes: np.ndarray, num: int, random: np.random.Generator) -> np.ndarray:
    """Replace the last `num` hashes by copies of the first ones with 0 to RADIUS changed bits; return the pairs."""
    for copy in range(num):
        bits = np.unpackbits(hashes[copy])
        bits[random.choice(BITS, copy % (RADIUS + 1), replace=False)] ^= 1
        hashes[len(hashes) - num + copy] = np.packbits(bits)
    return np.stack([np.arange(num), len(hashes) - num + np.arange(num)], 1)


class Unreadable(ImageDataset):
    """Images that are not there, so that no pair of hashes is confirmed.

    Args:
        num: number of images.
    """

    classes = ("any",)

    def __init__(self, num: int):
        self.labels = np.zeros(num, np.uint8)

    def read(self, index: int) -> bytes:
        """Raise OSError."""
        raise OSError(f"no image {index}")


def measure_memory(hashes: np.ndarray) -> float:
    """Return the peak of the search and of the findings in bytes per image, with the records, without the index."""
    records = np.zeros(len(hashes), RECORD)
    records["hash"], records["content"], records["width"], records["height"] = hashes, np.arange(len(hashes)), 400, 300
    scan = Scan({"all": Unreadable(len(hashes))}, records, np.ones((1, 7)))
    tracemalloc.start()
    examine(scan, find_groups(scan, DEFAULTS), DEFAULTS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return RECORD.itemsize + peak / len(hashes)


def measure_search(name: str, num: int, correlated: bool) -> bool:
    """Print time, memory and recall of one search; return whether the limits hold."""
    random = np.random.default_rng(0)
    hashes = make_hashes(num, correlated, random)
    planted = plant_copies(hashes, min(10_000, num // 4), random)
    start = time.process_time()
    pairs = find_near_pairs(hashes)
    seconds = time.process_time() - start
    peak = measure_memory(hashes)
    found = {*map(tuple, pairs[:, :2].tolist())}
    num_found = sum(tuple(pair) in found for pair in planted.tolist())
    print(f"{name:<18} {num:>9,} hashes  {seconds:6.1f} s  {len(pairs):>9,} pairs  "
          f"{num_found:,} of {len(planted):,} planted copies  {peak:.0f} bytes per image at most")  # fmt: skip
    return seconds <= MAX_SEARCH_S and num_found == len(planted) and peak <= MAX_BYTES


def measure_folder(folder: Path) -> bool:
    """Print the images per second of one core, and the memory of a folder; return whether the limits hold."""
    tracemalloc.start()
    splits = open_folder(folder)
    index = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    num = sum(map(len, splits.values()))
    mean_size = (
        sum(Path(split.describe(i)).stat().st_size for split in splits.values() for i in range(len(split))) / num
    )
    scan_images(splits, DEFAULTS, 0, lambda num: None)  # fills the file cache
    start = time.process_time()
    scan_images(splits, DEFAULTS, 0, lambda num: None)
    rate = num / (time.process_time() - start)
    kept = RECORD.itemsize + index / num
    print(f"{folder}: {num:,} images of {mean_size / 1000:.0f} kB, {rate:,.0f} images/s on one core")
    print(f"memory: {RECORD.itemsize} bytes of measurements and {index / num:.0f} bytes of the folder index per image")
    return rate >= MIN_IMAGES_PER_S and kept <= MAX_BYTES


def main() -> None:
    """Measure, print, and say whether the limits hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="image folder to measure the scan on")
    parser.add_argument("--hashes", type=int, default=1_000_000, help="number of synthetic hashes")
    args = parser.parse_args()
    print(describe_run())
    holds = [measure_search("random bits", args.hashes, False), measure_search("correlated bits", args.hashes, True)]
    if args.folder:
        holds.append(measure_folder(args.folder))
    print("the limits hold" if all(holds) else "a limit is exceeded")


if __name__ == "__main__":
    main()
