#!/usr/bin/env python3
"""Measure the cost of a checkpoint at every step, compared with no checkpoint within an epoch.

Both run the real `train_epoch` on one batch in memory, in alternating blocks of a few steps. A block with checkpoints
ends when its last file is on disk. The time of a synchronous save is measured too.
"""

import argparse
import os
import statistics
import tempfile
import time

import torch
from bench_support.machine import describe_run
from step import CLASSES, MemoryLoader, build_memory_run

from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.config import load_cfg
from distribuuuu.data.batch import Batch
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.trainer import train_epoch

# Limit of the ratio of step times, with a checkpoint to without.
BAR = 1.10


class Training:
    """A training whose epochs are blocks of a few steps."""

    def __init__(self, args: argparse.Namespace, out_dir: str):
        overrides = f"MODEL.ARCH {args.arch} MODEL.NUM_CLASSES {CLASSES} TRAIN.IM_SIZE {args.im_size} DATA.NAME dummy "
        overrides += f"TRAIN.BATCH_SIZE {args.batch} TRAIN.PRINT_FREQ {args.steps} TEST.IM_SIZE {args.im_size} "
        overrides += f"OPTIM.BASE_LR 1e-6 RNG_SEED 1 LOG.TENSORBOARD False CHECKPOINT.EVERY_STEPS 1 OUT_DIR {out_dir}"
        self.cfg = load_cfg(None, overrides.split())
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        images = torch.randn(args.batch, 3, args.im_size, args.im_size, device=device)
        labels = torch.arange(args.batch, device=device) % CLASSES
        self.loader = MemoryLoader(Batch(images, labels), BatchPlan(args.batch, 1, 1), device)
        self.loader.num_steps = args.steps
        self.run = build_memory_run(self.cfg, self.loader)
        self.state, self.saving = self.run.state, self.run.checkpoints
        self.silent = CheckpointManager(out_dir)

    def time_block(self, checkpoints: CheckpointManager) -> float:
        """Return the seconds per step of one block."""
        start, self.state.step = time.perf_counter(), 0
        self.run.checkpoints = checkpoints
        train_epoch(self.run)
        checkpoints.finish()
        return (time.perf_counter() - start) / self.loader.num_steps

    def time_save(self) -> float:
        """Return the seconds of one synchronous save."""
        start = time.perf_counter()
        self.run.checkpoints = self.saving
        self.run.save()
        self.saving.finish()
        return time.perf_counter() - start


def main() -> None:
    """Measure and print the times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="resnet18", help="MODEL.ARCH")
    parser.add_argument("--batch", type=int, default=32, help="images per step")
    parser.add_argument("--im-size", type=int, default=224, help="side of the images in pixels")
    parser.add_argument("--steps", type=int, default=4, help="steps per block")
    parser.add_argument("--blocks", type=int, default=7, help="blocks of each kind")
    args = parser.parse_args()
    print(describe_run())
    with tempfile.TemporaryDirectory() as out_dir:
        training = Training(args, out_dir)
        training.time_block(training.silent)
        none, every, saves = [], [], []
        for number in range(args.blocks):
            kinds = [(none, training.silent), (every, training.saving)]
            for seconds, checkpoints in kinds[:: 1 if number % 2 else -1]:
                seconds.append(training.time_block(checkpoints))
            saves.append(training.time_save())
        size_mb = max(os.path.getsize(path) for path in training.saving.list()) / 1e6
    ratio = statistics.median(pair[0] / pair[1] for pair in zip(every, none, strict=True))
    print(f"{args.arch}, {args.batch} images of {args.im_size} px: a checkpoint of {size_mb:.0f} MB")
    print(f"a step without a save: {1e3 * statistics.median(none):.0f} ms")
    print(
        f"a step with a save:    {1e3 * statistics.median(every):.0f} ms, {ratio:.3f} x (median of the blocks' ratios)"
    )
    print(f"a save that is waited for: {1e3 * statistics.median(saves):.0f} ms")
    print(f"the bar of {BAR:.2f} {'holds' if ratio <= BAR else 'DOES NOT HOLD'}")


if __name__ == "__main__":
    main()
