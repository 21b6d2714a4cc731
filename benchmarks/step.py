#!/usr/bin/env python3
"""Overhead of our training loop over a bare PyTorch loop: same model, same batch in memory, same optimizer.

Ours is `train_epoch` with metrics, log, checkpoints, learning rate and seeding, on epochs of 30 steps with one log line
each; only the loader is replaced. The bare loop takes the next batch, sets the learning rate of a cosine, and calls
zero_grad, forward, loss, backward and step; it has no metrics, log or checkpoints. The loops and a control
(the bare loop again) alternate in short blocks in one process, on the same model and optimizer. The measurement is
repeated in new processes, because the speed of a small model varies between processes.

With --bind, each process runs on a core of its own, which varies less.

With --features both loops use bfloat16, two accumulated micro-batches, gradient clipping and an EMA of the weights;
the bare loop uses the functions of torch directly.
"""

import argparse
import contextlib
import copy
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from bench_support.machine import describe_run, show_spread
from torch import nn

from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.config import load_cfg
from distribuuuu.data.batch import Batch
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.datasets.dummy import Dummy
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.comm import StopRequest
from distribuuuu.distributed.process_group import pick_device, process_group
from distribuuuu.engine.build import build_training, open_log
from distribuuuu.engine.run import Run
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.host import tune_malloc
from distribuuuu.launch.nproc import find_free_port
from distribuuuu.records.run_log import logging_to
from distribuuuu.tasks.losses import build_loss
from distribuuuu.trainer import train_epoch

STEPS = 30
CLASSES = 10
WARM_UP_ROUNDS = 3
BASE_LR = 1e-6
FEATURES = "TRAIN.AMP bf16 EMA.HALF_LIFE 10000 EMA.RAMP_UP 0 OPTIM.CLIP_NORM 1"
# Maximum duration of our step relative to a bare step, by number of processes.
BARS = {1: 1.01, 2: 1.01}
# Deviation of the control from 1 above which the machine was too busy for a result.
MAX_DEVIATION = 0.01


class MemoryLoader:
    """A loader that repeats one batch, with the interface of TrainLoader that the training loop uses."""

    samples = sampler = None

    num_steps = STEPS

    def __init__(self, batch: Batch, plan: BatchPlan, device: torch.device, num_classes: int = CLASSES):
        self.batch = batch
        self.plan = plan
        self.device = device
        self.images = Dummy(batch[0].shape[-1], num_classes)

    def steps_of(self, epoch: int) -> int:
        """Return the steps of an epoch."""
        return self.num_steps

    def batches_from(self, seed: int, epoch: int, first_step: int):
        """Return an iterator over micro-batches."""
        return itertools.repeat(self.batch)

    def choose(self, indices, in_order=False) -> None:
        """Ignore which images the task chooses."""

    def expect(self, passes) -> None:
        """Ignore the passes that will follow."""

    def zero_images(self, num: int) -> torch.Tensor:
        """Return images of a micro-batch, in place of zeros."""
        return self.batch[0]

    def preview(self, seed: int, num: int) -> torch.Tensor:
        """Return no images for the trackers."""
        return self.batch[0][:0]

    def pop_data_time(self) -> float:
        """Return the seconds spent waiting for batches."""
        return 0.0


def build_memory_run(cfg, loader) -> Run:
    """Return a run that trains on the batches of a memory loader and writes no checkpoint of its own."""
    training = build_training(cfg, loader, loader.batch[0][:1], latest=None)
    log = open_log(cfg, training.task, training.state, loader)
    checkpoints, results = CheckpointManager(cfg.OUT_DIR), SimpleNamespace(write=None)
    return Run(
        **vars(training), val_loader=loader, checkpoints=checkpoints, results=results, log=log, stop=StopRequest()
    )


def make_cfg(args: argparse.Namespace, out_dir: str):
    """Return the config of the run; the tiny learning rate keeps the weights, and so the speed, constant."""
    overrides = f"MODEL.ARCH {args.arch} MODEL.NUM_CLASSES {CLASSES} TRAIN.IM_SIZE {args.im_size} "
    overrides += f"TRAIN.BATCH_SIZE {args.batch} TRAIN.PRINT_FREQ {STEPS} TEST.IM_SIZE {args.im_size} DATA.NAME dummy "
    overrides += f"OPTIM.BASE_LR {BASE_LR} OPTIM.MAX_EPOCH {1 << 20} RNG_SEED 1 LOG.TENSORBOARD False "
    overrides += f"OUT_DIR {out_dir} "
    overrides += FEATURES if args.features else ""
    return load_cfg(None, overrides.split())


def build_loops(
    cfg, device: torch.device, stack: contextlib.ExitStack, args: argparse.Namespace
) -> dict[str, Callable[[], None]]:
    """Return the loops by name, each a function that runs STEPS steps; their logs are opened on the stack.

    Args:
        cfg: the config.
        device: this process's device.
        stack: closes the logs.
        args: flags of the command, which name the further loops.
    """
    size, batch_size = cfg.TRAIN.IM_SIZE, cfg.TRAIN.BATCH_SIZE
    images = torch.randn(batch_size, 3, size, size, device=device)
    labels = torch.arange(batch_size, device=device) % CLASSES
    has_features = cfg.EMA.HALF_LIFE > 0
    loader = MemoryLoader(Batch(images, labels), BatchPlan(batch_size, 1 + has_features, dist.world_size()), device)
    run, criterion = build_memory_run(cfg, loader), build_loss(cfg)
    model, state = run.model, run.state
    average = copy.deepcopy(state.model)
    stack.enter_context(run.log)

    def ours() -> None:
        run_epoch(run)

    def bare() -> None:
        if has_features:
            run_bare_features(model, average, state.optimizer, criterion, loader.batches_from(0, 0, 0))
        else:
            run_bare(model, state.optimizer, criterion, loader.batches_from(0, 0, 0))

    return {"bare": bare, "ours": ours, "control": bare}


def run_epoch(run: Run) -> None:
    """Train STEPS steps, which are the next epoch: the log and the trackers get each position once."""
    run.state.epoch, run.state.step = run.state.epoch + 1, 0
    train_epoch(run)


def set_cosine_lr(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the learning rate of a step."""
    lr = BASE_LR * 0.5 * (1 + math.cos(math.pi * step / STEPS))
    for group in optimizer.param_groups:
        group["lr"] = lr


def run_bare(model: nn.Module, optimizer: torch.optim.Optimizer, criterion: Callable, batches: Iterator) -> None:
    """Run STEPS bare training steps."""
    model.train()
    for step in range(STEPS):
        set_cosine_lr(optimizer, step)
        images, labels, *_ = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()


def run_bare_features(
    model: nn.Module,
    average: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable,
    batches: Iterator,
) -> None:
    """Run STEPS bare training steps with the options of FEATURES."""
    model.train()
    bare = getattr(model, "module", model)
    averages, currents = list(average.parameters()), list(bare.parameters())
    averages += [buffer for buffer in average.buffers() if buffer.is_floating_point()]
    currents += [buffer for buffer in bare.buffers() if buffer.is_floating_point()]
    counts = [[buffer for buffer in net.buffers() if not buffer.is_floating_point()] for net in (average, bare)]
    for step in range(STEPS):
        set_cosine_lr(optimizer, step)
        optimizer.zero_grad()
        for no_sync in (
            model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext(),
            contextlib.nullcontext(),
        ):
            images, labels, *_ = next(batches)
            with no_sync:
                with torch.autocast(images.device.type, torch.bfloat16):
                    logits = model(images)
                (criterion(logits, labels) / 2).backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 1.0, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, currents, 1e-3)
            torch._foreach_copy_(*counts)


def time_blocks(
    loops: dict[str, Callable[[], None]], num_blocks: int, num_epochs: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds per epoch of each block; each round runs every loop once, starting with a different one."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for number in range(WARM_UP_ROUNDS + num_blocks):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(num_epochs):
                loops[name]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number >= WARM_UP_ROUNDS:
                seconds[name].append((time.perf_counter() - start) / num_epochs)
    return seconds


def run_process(rank: int, num_processes: int, args: argparse.Namespace, folder: str) -> None:
    """Run one process of one launch; rank 0 writes the median milliseconds per step of each loop."""
    tune_malloc()  # as the command does; otherwise page faults, which depend on the layout of memory, vary by 10 %
    torch.set_num_threads(args.threads)
    if args.bind:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    launch = Launch("benchmark", rank, rank, num_processes, "127.0.0.1", args.port)
    device = pick_device(rank)
    # The log is written to a file, as in a batch job.
    with open(Path(folder) / f"stderr_{rank}", "w", encoding="utf-8") as sys.stderr:
        log = logging_to(folder, "train.log")
        with process_group(launch, device, timeout_s=600), log, contextlib.ExitStack() as stack:
            loops = build_loops(make_cfg(args, folder), device, stack, args)
            seconds = time_blocks(loops, args.blocks, args.epochs, device)
        sys.stderr = sys.__stderr__
    if rank == 0:
        step_ms = {name: 1e3 / STEPS * statistics.median(values) for name, values in seconds.items()}
        (Path(folder) / "step_ms.json").write_text(json.dumps(step_ms), encoding="utf-8")


def measure(num_processes: int, args: argparse.Namespace) -> None:
    """Print the medians of each launch, the median ratio over the launches, and the comparison with BARS."""
    columns = "launch   bare ms   ours ms   ratio   control"
    print(f"\n{num_processes} process{'es' * (num_processes > 1)}\n{columns}")
    ratios, controls = [], []
    for number in range(args.launches):
        args.port = find_free_port()
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run_process, (num_processes, args, folder), nprocs=num_processes)
            step_ms = json.loads((Path(folder) / "step_ms.json").read_text(encoding="utf-8"))
        ratios.append(step_ms["ours"] / step_ms["bare"])
        controls.append(step_ms["control"] / step_ms["bare"])
        row = f"{step_ms['bare']:>9.3f} {step_ms['ours']:>9.3f} {ratios[-1]:>7.3f} {controls[-1]:>9.3f}"
        print(f"{number + 1:>6} {row}", flush=True)
    ratio, bar = statistics.median(ratios), BARS.get(num_processes, BARS[2])
    print(f"ours / bare: {show_spread(ratios)}; bare / bare: {show_spread(controls)}")
    print(f"the bar of {bar:.2f} {'holds' if ratio <= bar else 'DOES NOT HOLD'}")
    if abs(statistics.median(controls) - 1) > MAX_DEVIATION:
        print(f"the control deviates by more than {MAX_DEVIATION}: measure again on a quiet machine")


def main() -> None:
    """Measure for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of processes to measure")
    parser.add_argument("--arch", default="resnet8", help="MODEL.ARCH")
    parser.add_argument("--batch", type=int, default=8, help="images per process and step")
    parser.add_argument("--im-size", type=int, default=32, help="side of the images in pixels")
    parser.add_argument("--launches", type=int, default=5, help="launches per number of processes")
    parser.add_argument("--blocks", type=int, default=60, help="blocks per loop and launch")
    parser.add_argument("--epochs", type=int, default=1, help=f"epochs of {STEPS} steps per block")
    parser.add_argument("--features", action="store_true", help="bf16, two micro-batches, gradient clipping and EMA")
    parser.add_argument("--bind", action="store_true", help="run each process on a core of its own (Linux)")
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    args = parser.parse_args()
    print(describe_run())
    print(
        "with bf16, two micro-batches, clipping and an average of the weights" if args.features else "float32 and SGD"
    )
    print(f"{args.arch}, {args.batch} images of {args.im_size} px a process, {args.threads} thread(s); medians of "
          f"{args.blocks} blocks of {args.epochs} x {STEPS} steps with one read and log")  # fmt: skip
    for num_processes in args.processes:
        measure(num_processes, args)


if __name__ == "__main__":
    main()
