#!/usr/bin/env python3
"""Measure how long it takes to list a folder of many images, and the memory that a loader worker needs.

A tree of empty files with names like ImageNet's is listed in turns by a bare walk, by distribuuuu, and by the readers
of torchvision and timm. It is in the file cache, so the work is compared, not the disk. The bare walk uses as many
threads as distribuuuu and only collects names.
"""

import argparse
import gc
import os
import pickle
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench_support.machine import describe_run
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from distribuuuu.data.datasets import index
from distribuuuu.data.datasets.array_file import NUM_THREADS
from distribuuuu.data.datasets.folder_scan import scan_folder
from distribuuuu.data.datasets.imagefolder import ImageFolder
from distribuuuu.data.datasets.index import YOUNG_NS

NUM_CLASSES = 1000
MOST_SCAN_RATIO, MOST_START_S, MOST_WORKER_MB = 1.5, 1.0, 60
# Number of random images that a worker accesses before it accesses all.
SOME = 51_200
BARE, SCAN, FIRST, LATER = "bare parallel walk, names only", "our scan", "our first start", "our later start"
TORCHVISION, TIMM = "torchvision ImageFolder", "timm ReaderImageFolder"


def make_tree(root: Path, num_files: int) -> None:
    """Create the classes of root/train with empty files, and wait until their modification times count."""
    noise = random.Random(0)
    for number in range(NUM_CLASSES):
        folder = root / "train" / f"n{1440764 + 137 * number:08d}"
        folder.mkdir(parents=True)
        count = num_files // NUM_CLASSES + (number < num_files % NUM_CLASSES)
        for image in noise.sample(range(1, 20 * count + 1), count):
            os.close(os.open(folder / f"{folder.name}_{image}.JPEG", os.O_CREAT | os.O_WRONLY))
    time.sleep(YOUNG_NS / 1e9 + 0.5)


def walk(folder: str) -> list[list[str]]:
    """Return the names of the files in each folder with as little work as possible in Python."""

    def look(path: str) -> tuple[list[str], list[str]]:
        names, folders = [], []
        with os.scandir(path) as entries:
            for entry in entries:
                (folders if entry.is_dir() else names).append(entry.name)
        return names, [os.path.join(path, name) for name in folders]

    found, waiting = [], [folder]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        while waiting:
            listings = list(pool.map(look, waiting))
            found += [names for names, _ in listings]
            waiting = [path for _, folders in listings for path in folders]
    return found


def list_ways(root: Path) -> dict[str, Callable]:
    """Return the functions to measure, in order."""
    folder = str(root / "train")

    def start():
        index._opened.clear()  # as in a new process
        return ImageFolder(root, "train", cache_dir=str(root))

    def start_first():
        shutil.rmtree(root / "index", ignore_errors=True)
        return start()

    ways = {
        BARE: lambda: walk(folder),
        SCAN: lambda: scan_folder(folder),
        FIRST: start_first,
        LATER: start,
        TORCHVISION: lambda: make_dataset(folder, find_classes(folder)[1], IMG_EXTENSIONS),
    }
    try:
        from timm.data.readers.reader_image_folder import ReaderImageFolder
    except ImportError:
        print("timm is not installed")
    else:
        ways[TIMM] = lambda: ReaderImageFolder(folder).samples
    return ways


def measure(ways: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each function; the first round, which fills the file cache, is discarded."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1 + repeats):
        for name, way in ways.items():
            if number == 0 and name in (TORCHVISION, TIMM):
                continue
            gc.collect()
            start = time.perf_counter()
            result = way()
            taken = time.perf_counter() - start
            del result
            if number:
                seconds[name].append(taken)
    return seconds


def private_mb() -> float:
    """Return the private memory of this process in MB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def grow_worker(num: int, look: Callable[[int], object]) -> tuple[float, float]:
    """Return the growth in MB of a forked process that accesses SOME random images, and then all."""
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:
        before = private_mb()
        for _ in range(min(SOME, num)):
            look(random.randrange(num))
        some = private_mb() - before
        for index in range(num):
            look(index)
        os.write(writing, pickle.dumps((some, private_mb() - before)))
        os._exit(0)
    os.waitpid(worker, 0)
    answer = pickle.loads(os.read(reading, 1000))
    os.close(reading)
    os.close(writing)
    return answer


def measure_memory(ways: dict[str, Callable]) -> Iterator[tuple[str, float, float, float]]:
    """Yield name, bytes per item, and the growth of a worker in MB: after some images and after all."""
    images = ways[LATER]()
    size = sum(array.nbytes for array in images.index.arrays.values()) / len(images)
    yield LATER, size, *grow_worker(len(images), lambda number: (images.describe(number), images.label(number)))
    samples = ways[TORCHVISION]()
    size = sum(8 + sys.getsizeof(sample) + sys.getsizeof(sample[0]) for sample in samples) / len(samples)
    yield TORCHVISION, size, *grow_worker(len(samples), lambda number: (samples[number][0], samples[number][1]))


def report(seconds: dict[str, list[float]], memory: list[tuple[str, float, float, float]]) -> None:
    """Print both tables, and whether the limits hold."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"\n{'':<32} seconds    from      to  x bare walk   (median of {len(seconds[BARE])})")
    for name, values in seconds.items():
        ratio = medians[name] / medians[BARE]
        print(f"{name:<32} {medians[name]:>7.3f} {min(values):>7.3f} {max(values):>7.3f} {ratio:>12.2f}")
    print(f"\n{'':<32} bytes per image   a worker grows by, MB: {SOME} images      all")
    for name, size, some, growth in memory:
        print(f"{name:<32} {size:>14.0f} {some:>37.1f} {growth:>8.1f}")
    limits = [
        (f"{FIRST} / {BARE}", medians[FIRST] / medians[BARE], MOST_SCAN_RATIO, "x"),
        (LATER, medians[LATER], MOST_START_S, "s"),
        ("growth of our worker", memory[0][3], MOST_WORKER_MB, "MB"),
    ]
    print()
    for name, value, most, unit in limits:
        print(f"{name}: {value:.2f} {unit}; the limit of {most} {'holds' if value <= most else 'is exceeded'}")


def main() -> None:
    """Create the tree, measure, print, and delete the tree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=1_280_000, help="images in all")
    parser.add_argument("--folder", type=Path, help="new folder for the tree, deleted afterwards")
    parser.add_argument("--repeats", type=int, default=5, help="number of measurements")
    args = parser.parse_args()
    if args.folder and args.folder.exists():
        parser.error(f"--folder {args.folder}: exists; use a new folder")
    print(describe_run())
    root = args.folder or Path(tempfile.mkdtemp())
    try:
        make_tree(root, args.files)
        print(f"{args.files} files in {NUM_CLASSES} folders; {NUM_THREADS} threads")
        ways = list_ways(root)
        seconds = measure(ways, args.repeats)
        report(seconds, list(measure_memory(ways)))
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
