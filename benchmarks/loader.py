#!/usr/bin/env python3
"""Throughput of our data loader and those of torchvision, timm, ffcv, DALI and webdataset, in images per second.

Each loader runs in its own process (bench_support/loader_contestants.py) with one warm-up pass. Then the loaders
alternate, one pass each; a rate is the median over the passes, and a ratio the median of the ratios within a round.
"One core" counts images per second of CPU time in one thread, up to the output of a worker. "Two workers" counts images
per second up to the batch of the training loop. Both ratios are relative to the most common pipeline: torchvision's
ImageFolder, PIL and v1 transforms. "Small images" are 10 KB each and cropped to 64 px; their ratios are relative to
torchvision's decoder and v2 transforms. Below the table are the ratios that have a bar of their own.

ffcv and DALI need other package versions: install them in a virtual environment and pass its Python with
--peers-python. Loaders that cannot be imported are reported and skipped.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from bench_support.loader_images import SMALL, make_jpegs
from bench_support.machine import describe_run, show_spread

HERE = Path(__file__).resolve().parent
CONTESTANT = str(HERE / "bench_support" / "loader_contestants.py")
REFERENCE, REFERENCE_OF_SMALL, WEBDATASET = "torchvision v1, PIL", "torchvision v2, uint8", "webdataset, v2, uint8"
# Of one core: two loaders, and the least ratio of their rates; 0: no bar.
RATIOS = (
    ("ours, packed JPEG 256", "floor, packed JPEG 256", 0.95),
    ("ours", REFERENCE_OF_SMALL, 1.4),
    ("floor", REFERENCE_OF_SMALL, 0.0),
    ("ours, packed JPEG 256", "ffcv, JPEG 256", 1.0),
    ("ours, packed raw 256", "ffcv, raw 256", 1.0),
)
RATIOS_OF_SMALL = tuple(
    (ours, other, 1.0) for ours in ("ours", "ours, packed files") for other in (REFERENCE_OF_SMALL, WEBDATASET)
)


@dataclass
class Contestant:
    """A loader: its title, the function that builds it, the arguments, and the measurements."""

    title: str
    function: str
    arguments: dict
    bar: float = 0.0
    versus: str = ""
    taken: list[dict] = field(default_factory=list)
    process: subprocess.Popen | None = None
    memory_mb: float = 0.0
    errors: TextIO = field(default_factory=lambda: tempfile.TemporaryFile("w+"))

    def start(self, python: str) -> bool:
        """Start the process and wait for its warm-up pass; return whether it succeeded."""
        command = [python, CONTESTANT, self.function, json.dumps(self.arguments)]
        threads = {"OMP_NUM_THREADS": "1"} if self.arguments.get("one_core") else {}
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **threads}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)
        for line in self.process.stdout:  # skip the output of other packages
            if line == "ready\n":
                return True
        print(f"skipped: {self.title}: {self.last_error()}")
        return False

    def last_error(self) -> str:
        """Return the last line of the standard error of the process."""
        self.errors.seek(0)
        return ([line for line in self.errors.read().splitlines() if line.strip()] or ["the process ended"])[-1]

    def measure(self) -> None:
        """Make one pass."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        line = next((line for line in self.process.stdout if line.startswith("{")), None)
        if line is None:
            raise RuntimeError(f"{self.title}: {self.last_error()}")
        self.taken.append(json.loads(line))
        self.memory_mb = max(self.memory_mb, memory_of(self.process.pid))

    def rate(self, clock: str) -> float:
        """Return the median images per second of `clock` (cpu_s or wall_s)."""
        return statistics.median(taken["images"] / taken[clock] for taken in self.taken)

    def ratios(self, other: "Contestant", clock: str) -> list[float]:
        """Return the rate relative to that of another loader in each round."""
        return [
            mine["images"] / mine[clock] / (its["images"] / its[clock])
            for mine, its in zip(self.taken, other.taken, strict=True)
        ]

    def stop(self) -> None:
        """Stop the process."""
        self.process.stdin.close()
        self.process.wait()


def memory_of(pid: int) -> float:
    """Return the MB of a process and its children, with shared memory counted once (Linux; otherwise 0)."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return own / 1000 + sum(memory_of(int(child)) for child in children)


def one_core(folder: Path) -> list[Contestant]:
    """Return the loaders for the single-thread measurement."""
    originals, small, raw = str(folder / "images"), str(folder / "jpeg256"), str(folder / "raw256")
    kept, classes = str(folder / "kept"), ("MODEL.NUM_CLASSES", count_classes(folder))

    def ours(title: str, where: str, *overrides, bar: float = 0.0, train: bool = True, versus: str = "") -> Contestant:
        arguments = {"folder": where, "overrides": (*classes, *overrides), "train": train, "one_core": True}
        return Contestant(title, "ours", arguments, bar, versus)

    def other(title: str, function: str, **arguments) -> Contestant:
        return Contestant(title, function, {"folder": originals, "one_core": True, **arguments})

    def floor(title: str, where: str, *overrides) -> Contestant:
        return other(title, "floor", folder=where, overrides=(*classes, *overrides))

    packed = ("DATA.NAME", "packed")
    return [
        other(REFERENCE, "torchvision_v1"),
        other(REFERENCE_OF_SMALL, "torchvision_v2"),
        other("timm", "timm"),
        other("webdataset, PIL", "webdataset"),
        other("DALI, one CPU thread", "dali"),
        ours("ours", originals, bar=1.6),
        floor("floor", originals),
        ours("ours, tar archive", str(folder / "archive"), "DATA.NAME", "archive", bar=0.97, versus="ours"),
        ours("ours, deflated ZIP archive", str(folder / "zipped"), "DATA.NAME", "archive", versus="ours"),
        ours("ours, nvimgcodec", originals, "DATA.DECODER", "nvimgcodec", bar=2.4),
        floor("floor, nvimgcodec", originals, "DATA.DECODER", "nvimgcodec"),
        ours("ours, packed files", kept, *packed),
        ours("ours, packed JPEG 256", small, *packed, bar=4.0),
        floor("floor, packed JPEG 256", small, *packed),
        ours("ours, packed JPEG 256, nvimgcodec", small, *packed, "DATA.DECODER", "nvimgcodec", bar=6.0),
        floor("floor, packed JPEG 256, nvimgcodec", small, *packed, "DATA.DECODER", "nvimgcodec"),
        ours("ours, packed raw 256", raw, *packed, bar=10.0),
        other("ffcv, JPEG 256", "ffcv", folder=str(folder), mode="jpg"),
        other("ffcv, raw 256", "ffcv", folder=str(folder), mode="raw"),
        other(f"eval: {REFERENCE}", "torchvision_v1", train=False),
        ours("eval: ours", originals, bar=1.8, train=False, versus=f"eval: {REFERENCE}"),
    ]


def small_images(folder: Path) -> list[Contestant]:
    """Return the loaders for the single-thread measurement of small images."""

    def one(title: str, function: str, **arguments) -> Contestant:
        arguments = {"folder": str(folder / "small"), "one_core": True, "size": 64, **arguments}
        return Contestant(title, function, arguments, versus=REFERENCE_OF_SMALL)

    overrides = ("MODEL.NUM_CLASSES", 10, "TRAIN.IM_SIZE", 64)
    packed = {"folder": str(folder / "small_kept"), "overrides": (*overrides, "DATA.NAME", "packed")}
    return [
        one(REFERENCE_OF_SMALL, "torchvision_v2"),
        one("webdataset, PIL", "webdataset"),
        one(WEBDATASET, "webdataset", uint8=True),
        one("ours", "ours", overrides=overrides),
        one("ours, packed files", "ours", **packed),
        one("floor, packed files", "floor", **packed),
    ]


def two_workers(folder: Path) -> list[Contestant]:
    """Return the loaders for the measurement with two workers."""
    originals, small, raw = str(folder / "images"), str(folder / "jpeg256"), str(folder / "raw256")
    classes = ("MODEL.NUM_CLASSES", count_classes(folder))

    def ours(title: str, where: str, *overrides, bar: float = 0.0, versus: str = "") -> Contestant:
        arguments = {"folder": where, "overrides": (*classes, *overrides), "workers": 2, "to_loop": True}
        return Contestant(title, "ours", arguments, bar, versus)

    packed, thread = ("DATA.NAME", "packed"), ("DATA.WORKER_KIND", "thread")
    return [
        Contestant(REFERENCE, "torchvision_v1", {"folder": originals, "workers": 2}),
        Contestant("timm", "timm", {"folder": originals, "workers": 2}),
        ours("ours, processes", originals, bar=1.75),
        ours(
            "ours, tar archive, processes",
            str(folder / "archive"),
            "DATA.NAME",
            "archive",
            bar=0.97,
            versus="ours, processes",
        ),
        ours("ours, threads", originals, *thread),
        ours("ours, nvimgcodec, processes", originals, "DATA.DECODER", "nvimgcodec", bar=2.4),
        ours("ours, nvimgcodec, threads", originals, *thread, "DATA.DECODER", "nvimgcodec", bar=2.8),
        Contestant(
            "floor, nvimgcodec, threads",
            "floor",
            {"folder": originals, "overrides": (*classes, "DATA.DECODER", "nvimgcodec"), "workers": 2},
        ),
        ours("ours, packed JPEG 256, threads", small, *packed, *thread),
        ours("ours, packed raw 256, threads", raw, *packed, *thread),
    ]


def count_classes(folder: Path) -> int:
    """Return the number of classes of the images."""
    return sum(path.is_dir() for path in (folder / "images" / "train").iterdir())


def prepare(folder: Path, images: str | None, num: int) -> None:
    """Create the images, unless a folder is given, the packed data sets, and the pixels for ffcv."""
    import numpy as np

    if images:
        (folder / "images").symlink_to(Path(images).resolve())
    else:
        make_jpegs(folder / "images", num)
    make_jpegs(folder / "small", num, SMALL)
    for split in ("train", "val"):
        (folder / "archive").mkdir(exist_ok=True)
        with tarfile.open(folder / "archive" / f"{split}.tar", "w") as archive:
            archive.add(folder / "images" / split, "")
        shutil.make_archive(str(folder / "zipped" / split), "zip", folder / "images" / split)
    tool = [sys.executable, str(HERE.parent / "tools" / "pack_dataset.py")]
    for name, flags in {
        "kept": [],
        "jpeg256": ["--shorter-side", "256", "--quality", "90"],
        "raw256": ["--shorter-side", "256", "--format", "raw"],
        "small_kept": [],
    }.items():
        source = ["TRAIN.DATASET", str(folder / ("small" if name == "small_kept" else "images"))]
        subprocess.run([*tool, str(folder / name), *flags, *source], check=True, capture_output=True)
    from distribuuuu.config import load_cfg
    from distribuuuu.data.packed.dataset import Packed

    packed = Packed.from_cfg(load_cfg(None, ["TRAIN.DATASET", str(folder / "raw256")]), train=True)
    np.savez(folder / "pixels.npz", **{str(index): packed.read(index) for index in range(len(packed))})


def describe_jpegs(folder: Path) -> str:
    """Return the number and the mean size of the training images."""
    sizes = [path.stat().st_size for path in (folder / "train").rglob("*.jpg")]
    return f"{len(sizes)} JPEGs of {statistics.mean(sizes) / 1000:.0f} KB on average"


def select(contestants: list[Contestant], words: list[str]) -> list[Contestant]:
    """Return the loaders whose title contains one of some words, and the references."""
    chosen = [one for one in contestants if any(word in one.title for word in words)]
    needed = {REFERENCE, *(one.title for one in chosen), *(one.versus for one in chosen)}
    return [one for one in contestants if one.title in needed]


def compete(contestants: list[Contestant], repeats: int, peers_python: str, clock: str, ratios: tuple = ()) -> None:
    """Measure all loaders in alternation; print the table, and those of some ratios whose two loaders ran."""
    peers = ("ffcv", "dali", "webdataset")
    running = [one for one in contestants if one.start(peers_python if one.function in peers else sys.executable)]
    try:
        for _ in range(repeats):
            for one in running:
                one.measure()
    finally:
        for one in running:
            one.stop()
    by_title = {one.title: one for one in running}
    unit = "img/cpu-s" if clock == "cpu_s" else "img/s"
    print(f"{'':<36}{unit:>10}{'x':>8}{'memory MB':>11}   bar   (median of {repeats})")
    for one in running:
        ratio = statistics.median(one.ratios(by_title[one.versus or REFERENCE], clock))
        verdict = f"{one.bar:5.2f} {'holds' if ratio >= one.bar else 'MISSED'}" if one.bar else ""
        print(f"{one.title:<36}{one.rate(clock):>10.0f}{ratio:>8.2f}{one.memory_mb:>11.0f}   {verdict}")
    for title, other, bar in ratios:
        if title in by_title and other in by_title:
            found = by_title[title].ratios(by_title[other], clock)
            verdict = f"; bar {bar:.2f} {'holds' if statistics.median(found) >= bar else 'MISSED'}" if bar else ""
            print(f"{title} / {other}: {show_spread(found)}{verdict}")


def main() -> None:
    """Run the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", help="folder with train/CLASS/*.jpg and val/CLASS/*.jpg; default: generated images")
    parser.add_argument("--num", type=int, default=600, help="number of generated images")
    parser.add_argument("--repeats", type=int, default=5, help="passes per loader")
    parser.add_argument("--peers-python", default=sys.executable, help="Python with ffcv, DALI and webdataset")
    parser.add_argument("--only", nargs="+", default=[""], help="measure the loaders with one of these in their name")
    args = parser.parse_args()
    print(describe_run())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        prepare(folder, args.images, args.num)
        print(f"{describe_jpegs(folder / 'images')}, to 224 px\n\none core, train")
        compete(select(one_core(folder), args.only), args.repeats, args.peers_python, "cpu_s", RATIOS)
        print(f"\n{describe_jpegs(folder / 'small')}, to 64 px\n\none core, train, small images")
        compete(select(small_images(folder), args.only), args.repeats, args.peers_python, "cpu_s", RATIOS_OF_SMALL)
        print("\ntwo workers, to the training loop's batch")
        compete(select(two_workers(folder), args.only), args.repeats, args.peers_python, "wall_s")


if __name__ == "__main__":
    main()
