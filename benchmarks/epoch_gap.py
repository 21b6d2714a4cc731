#!/usr/bin/env python3
"""Waits at the ends of an epoch with and without batches made ahead across them, in one training run.

Two waits are measured: from the last step to the first evaluation batch, and from the end of the evaluation to the next
epoch's first batch, checkpoints and results included. In every second epoch, the workers do not know what follows.
A step takes 1.5 times as long as the loader needs for a batch: it sleeps, as if it waited for an accelerator.
"""

import argparse
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from bench_support.loader_images import make_jpegs
from bench_support.machine import describe_run

from distribuuuu.config import load_cfg
from distribuuuu.data.loader import build_loaders
from distribuuuu.engine.build import build_run
from distribuuuu.engine.resume import capture
from distribuuuu.launch.detect import Launch
from distribuuuu.trainer import evaluate_epoch, finish_epoch, train_epoch

# Duration of a step relative to the time in which the loader makes a batch.
STEP = 1.5
SETS = {
    "shapes": ("configs/shapes/resnet14.yaml", ()),
    "clothing10": ("configs/clothing10/resnet14.yaml", ()),
    "imagenet": (None, ("MODEL.NUM_CLASSES", 10, "TRAIN.BATCH_SIZE", 32, "TEST.BATCH_SIZE", 32)),
}


def make_cfg(name: str, folder: Path, args: argparse.Namespace, workers: int):
    """Return the config of a data set, with a tiny model."""
    config, overrides = SETS[name]
    data = {"imagenet": folder / "imagenet", "clothing10": args.clothing10, "shapes": folder / "shapes"}[name]
    overrides = [*overrides, "MODEL.ARCH", "resnet8", "MODEL.KWARGS", "{width: 2, stem_stride: 4}",
                 "TRAIN.DATASET", data, "TRAIN.WORKERS", workers, "DATA.WORKER_KIND", args.kind,
                 "OPTIM.MAX_EPOCH", 2 * args.pairs + 1, "OUT_DIR", folder / f"{name}_{workers}"]  # fmt: skip
    return load_cfg(config and Path(__file__).resolve().parents[1] / config, [str(word) for word in overrides])


def after(function: Callable, action: Callable) -> Callable:
    """Return a function that calls another one, then an action."""
    return lambda *args, **kwargs: (function(*args, **kwargs), action())[0]


def stamped(function: Callable[[], Iterator], arrivals: list[float]) -> Iterator:
    """Yield the items of an iteration; append the time of the first one to a list."""
    for number, item in enumerate(function()):
        if number == 0:
            arrivals.append(time.perf_counter())
        yield item


def measure(cfg, num_epochs: int) -> dict[str, dict[bool, list[float]]]:
    """Return the seconds of each kind of wait, with and without batches made ahead."""
    Path(cfg.OUT_DIR).mkdir()
    train_loader, val_loader = build_loaders(cfg, Launch("benchmark"), torch.device("cpu"))
    run = build_run(cfg, train_loader, val_loader)
    expect = train_loader.expect
    for _ in range(2):  # the first time, the files are read from the disk
        start = time.perf_counter()
        num = sum(1 for _ in itertools.chain(train_loader.host_batches(), val_loader.host_batches()))
        step_s = STEP * (time.perf_counter() - start) / num
    trained, evaluated, steps = [], [], []  # the times of first batches, and of the ends of steps
    for loader, arrivals in ((train_loader, trained), (val_loader, evaluated)):
        loader.host_batches = functools.partial(stamped, loader.host_batches, arrivals)
    for name in ("train_step", "eval_step"):
        setattr(run.task, name, after(getattr(run.task, name), lambda: time.sleep(step_s)))
    run.state.finish_step = after(run.state.finish_step, lambda: steps.append(time.perf_counter()))
    waits: dict[str, dict[bool, list[float]]] = {name: {False: [], True: []} for name in ("evaluation", "next epoch")}
    end = 0.0
    for epoch in range(num_epochs):
        ahead = epoch % 2 == 0
        # Two passes: the evaluation and the next epoch, at whose end nothing is made ahead.
        train_loader.expect = lambda passes, num=2 * ahead: expect([*itertools.islice(passes, num)])
        train_epoch(run)
        if epoch:
            waits["next epoch"][not ahead].append(trained[-1] - end)
        run.checkpoints.save(capture(run))
        evaluations = evaluate_epoch(run)
        end = time.perf_counter()
        waits["evaluation"][ahead].append(evaluated[-1] - steps[-1])
        finish_epoch(run, evaluations)
        run.checkpoints.save(capture(run))
    run.checkpoints.finish()
    return waits


def main() -> None:
    """Measure each data set with each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", default=["shapes", "imagenet"], choices=SETS)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kind", default="process", choices=["process", "thread"], help="DATA.WORKER_KIND")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of epochs with and without batches made ahead")
    parser.add_argument("--images", type=int, default=512, help="of imagenet")
    parser.add_argument("--clothing10", default="data/clothing10", help="its folder")
    args = parser.parse_args()
    print(describe_run())
    print("data        workers  wait for     without ms  with ms  ratio of medians")
    with tempfile.TemporaryDirectory() as folder:
        if "imagenet" in args.sets:
            make_jpegs(Path(folder) / "imagenet", args.images)
        for name, workers in itertools.product(args.sets, args.workers):
            waits = measure(make_cfg(name, Path(folder), args, workers), 2 * args.pairs + 1)
            for kind, seconds in waits.items():
                without, ahead = (1e3 * statistics.median(seconds[key]) for key in (False, True))
                print(f"{name:<12}{workers:>7}  {kind:<11}{without:>12.1f}{ahead:>9.1f}{ahead / without:>8.2f}")


if __name__ == "__main__":
    main()
