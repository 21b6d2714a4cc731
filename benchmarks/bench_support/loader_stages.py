#!/usr/bin/env python3
"""Shares of the CPU time of one loader worker by what it does, from timers around each part.

    python benchmarks/bench_support/loader_stages.py TRAIN.DATASET my_images MODEL.NUM_CLASSES 10

The arguments are options of a config. A timer adds about 1 us to a call. No part contains the time of another one.
"""

import sys
import time
import warnings
from collections import Counter

import torch

from distribuuuu.config import load_cfg
from distribuuuu.data import batch, decode, optional_decoders, transforms
from distribuuuu.data.loader import build_loader
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.host import tune_malloc

EPOCHS = 5
PARTS = {
    "read the file": [],  # of the data set
    "parse the header": [(decode, "read_jpeg_header")],
    "cut the rows": [(optional_decoders, "cut_rows")],
    "draw flips and box": [(transforms, "draw_flips"), (transforms, "random_resized_box"), (batch, "SampleRNG")],
    "resize": [(transforms, "interpolate")],
    "flip": [(transforms, "flip_each")],
    "copy into the batch": [(torch.Tensor, "copy_")],
}
spent: Counter = Counter()
inner = [0]


def timed(part: str, function):
    """Return a function that adds its CPU time, without that of the parts that it calls, to a part."""

    def call(*args, **kwargs):
        start = time.thread_time_ns()
        inner.append(0)
        try:
            return function(*args, **kwargs)
        finally:
            taken = time.thread_time_ns() - start
            spent[part] += taken - inner.pop()
            inner[-1] += taken

    return call


def main() -> None:
    """Run the epochs and print the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tune_malloc()
    loader = build_loader(
        load_cfg(None, ["TRAIN.WORKERS", "0", *sys.argv[1:]]), Launch("alone"), torch.device("cpu"), True
    )
    for part, places in {**PARTS, "read the file": [(loader.images, "read")]}.items():
        for owner, name in places:
            setattr(owner, name, timed(part, getattr(owner, name)))
    operator, *modes = decode._open_torchvision()
    decode._open_torchvision = lambda: (timed("decode", operator), *modes)
    num = total = 0
    for epoch in range(1 + EPOCHS):
        if epoch == 1:
            spent.clear()
            num = total = 0
        loader.sampler.set_position(1, epoch, 0)
        start = time.thread_time_ns()
        num += sum(len(made.images) for made, _ in map(loader.samples.batch, loader.sampler))
        total += time.thread_time_ns() - start
    print(f"{total / num / 1000:.0f} us of CPU time per image, {num} images")
    spent["everything else"] = total - sum(spent.values())
    for part, taken in spent.most_common():
        print(f"{part:<22}{100 * taken / total:5.1f} %")


if __name__ == "__main__":
    main()
