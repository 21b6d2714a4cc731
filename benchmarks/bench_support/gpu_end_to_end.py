"""End-to-end throughput for the GPU benchmark: the training loop with the real loader, and each of them alone.

Three contestants take turns on the same model, optimizer and batch size: "ours, no loader", `train_epoch` on one batch
on the device; "loader alone", the batches of the TrainLoader on the device without a model; "ours with loader",
`train_epoch` on the TrainLoader. If they overlap perfectly, the last one is as fast as the slower of the other two.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from bench_support.gpu_contestants import Contestant, speed_ratios, take_turns
from bench_support.loader_images import make_jpegs
from bench_support.machine import show_spread

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.data.loader import TrainLoader
from distribuuuu.data.workers import PREFETCH, Pass
from distribuuuu.engine.build import open_log
from distribuuuu.engine.run import Run
from distribuuuu.launch.host import count_cores
from distribuuuu.trainer import take_step, train_epoch

# Minimum ratio of ours with the loader to the slower of the two others, on a GPU.
BAR = 0.95
MODEL, LOADER, BOTH = "ours, no loader", "loader alone", "ours with loader"
SYNTHETIC = "synthetic"
PACKER = Path(__file__).resolve().parents[2] / "tools" / "pack_dataset.py"


class BlockLoader:
    """A TrainLoader in blocks of `num_steps` steps, with the interface of TrainLoader that the training loop uses.

    A block has PREFETCH batches per worker before the steps that are timed, and as many after them. It ends with an
    epoch, so no worker makes batches between two blocks, and none of the timed batches was made before its block.
    Within a block the workers run ahead across the epochs, as in a training run.
    """

    samples = sampler = None

    def __init__(self, loader: TrainLoader, num_workers: int, num_steps: int):
        self.num_steps = num_steps
        self.num_ahead = PREFETCH * num_workers
        self.plan, self.device, self.images = loader.plan, loader.device, loader.images
        self._loader = loader
        self._next_epoch = 0
        self._batches: Iterator = iter(())

    def steps_of(self, epoch: int) -> int:
        """Return the steps of an epoch."""
        return self.num_steps

    def batches_from(self, seed: int, epoch: int, first_step: int) -> Iterator:
        """Return an iterator over the next batches of the block; the position is ignored."""
        return self._batches

    def choose(self, indices) -> None:
        """Ignore which images the task chooses."""

    def expect(self, passes) -> None:
        """Ignore the passes that will follow."""

    def pop_data_time(self) -> float:
        """Return the seconds spent waiting for batches since the last call."""
        return self._loader.pop_data_time()

    def begin_block(self) -> None:
        """Begin a block at the first batch made by its workers."""
        self.finish_block()
        num_batches, num_steps = self.num_steps + 2 * self.num_ahead, self._loader.num_steps
        num_epochs = -(-num_batches // num_steps)
        epochs = range(self._next_epoch, self._next_epoch + num_epochs)
        self._next_epoch = epochs.stop
        self._batches = self._read(epochs, num_epochs * num_steps - num_batches)

    def finish_block(self) -> None:
        """Read the rest of the block; then the workers are idle."""
        deque(self._batches, maxlen=0)

    def skip_batches(self) -> None:
        """Read the batches before the steps that are timed."""
        deque(itertools.islice(self._batches, self.num_ahead), maxlen=0)

    def _read(self, epochs: range, first_step: int) -> Iterator:
        """Yield the batches of epochs from a step of the first one."""
        loader = self._loader
        later = [replace(loader.sampler, seed=0, epoch=epoch, first_step=0) for epoch in epochs[1:]]
        loader.expect([Pass(loader.samples, sampler) for sampler in later])
        for epoch in epochs:
            yield from loader.batches_from(0, epoch, first_step if epoch == epochs.start else 0)


def find_images(args: argparse.Namespace, folder: Path) -> list[str]:
    """Return the options of the data set; make synthetic images in `folder` if they are selected.

    Raises:
        ConfigError: the images cannot be packed.
    """
    name, source = "packed" if args.packed else "imagefolder", args.loader
    if args.loader == SYNTHETIC:
        source = folder / SYNTHETIC
        make_jpegs(source, args.images)
    if args.loader == SYNTHETIC and args.packed:
        flags = ["--split", "train", "--shorter-side", "256", "TRAIN.DATASET", str(source)]
        source = folder / "packed"
        packing = subprocess.run([sys.executable, PACKER, source, *flags], stderr=subprocess.PIPE, text=True)
        if packing.returncode:
            raise ConfigError(f"--packed: {packing.stderr.strip()}")
    return ["DATA.NAME", name, "TRAIN.DATASET", str(source), "MODEL.NUM_CLASSES", "0",
            "TRAIN.WORKERS", str(args.workers), "DATA.WORKER_KIND", args.worker_kind]  # fmt: skip


@dataclass
class EndToEnd:
    """The result of the end-to-end measurement.

    Attributes:
        contestants: the three contestants by name.
        num_images: images of the data set.
        waits: fractions of the time of each block that the log of ours with the loader counts as waiting for data.
    """

    contestants: dict[str, Contestant]
    num_images: int
    waits: list[float]


def measure_end_to_end(
    ours: Contestant, run: Run, cfg, loader: BlockLoader, num_blocks: int, device: torch.device
) -> EndToEnd:
    """Let the three contestants take turns.

    Args:
        ours: our loop on one batch on the device.
        run: the run of that loop.
        cfg: config with another OUT_DIR, for the log of ours with the loader.
        loader: the training loader.
        num_blocks: blocks per contestant.
        device: the device.
    """
    state, log = run.state, open_log(cfg, run.task, run.state, loader)
    with_loader = replace(run, train_loader=loader, log=log)

    def begin_loader() -> None:
        loader.begin_block()
        loader.skip_batches()

    def begin_both() -> None:
        loader.begin_block()
        run.model.train()
        for step in range(loader.num_ahead):
            take_step(with_loader, loader.batches_from(0, 0, 0), step)
        state.reset_row()
        loader.pop_data_time()

    def read_batches() -> None:
        deque(itertools.islice(loader.batches_from(0, 0, 0), loader.num_steps), maxlen=0)

    def train_with_loader() -> None:
        train_epoch(with_loader)
        state.finish_epoch()

    contestants = {
        MODEL: Contestant(ours.run, ours.optimizer, ours.held, prepare=loader.finish_block),
        LOADER: Contestant(read_batches, ours.optimizer, [], prepare=begin_loader),
        BOTH: Contestant(train_with_loader, ours.optimizer, ours.held, prepare=begin_both),
    }
    with log:
        take_turns(contestants, num_blocks, device)
    loader.finish_block()
    rows = [json.loads(line) for line in (Path(cfg.OUT_DIR) / "metrics.jsonl").read_text().splitlines()]
    return EndToEnd(contestants, len(loader.images), [row["wait"] for row in rows[-num_blocks:]])


def show_end_to_end(args: argparse.Namespace, result: EndToEnd, device: torch.device) -> None:
    """Print one line per contestant, the time spent waiting for data and the comparison with BAR."""
    contestants, step_images = result.contestants, args.batch * args.steps
    rates = {name: step_images / statistics.median(one.seconds) for name, one in contestants.items()}
    slower = min((MODEL, LOADER), key=rates.get)
    files = f"{result.num_images} {'packed ' if args.packed else ''}images{' (synthetic)' * (args.loader == SYNTHETIC)}"
    print(f"\nend to end: {files}, {counted(args.workers, 'worker')} ({args.worker_kind}), {count_cores()} cores; "
          f"medians of {args.blocks} blocks of {args.steps} steps")  # fmt: skip
    print(f"{'':<18}{'img/s':>9}   x {slower} (least to greatest)")
    for name, one in contestants.items():
        print(f"{name:<18}{rates[name]:>9.1f}   {show_spread(speed_ratios(one, contestants[slower]))}")
    spread = f"{statistics.median(result.waits):.1%} ({min(result.waits):.1%} to {max(result.waits):.1%})"
    print(f"waiting for data: {spread} of the time, as measured by the log of {BOTH}")
    ratio = statistics.median(speed_ratios(contestants[BOTH], contestants[slower]))
    if device.type == "cuda":
        verdict = f"the bar of {BAR:.2f} {'holds' if ratio >= BAR else 'DOES NOT HOLD'}"
    else:
        verdict = "no bar: this is not a GPU, so the workers and the step share the cores"
    print(f"{BOTH} / {slower}: {ratio:.3f} (ideal: 1.00); {verdict}")
