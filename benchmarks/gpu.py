#!/usr/bin/env python3
"""Throughput on one GPU: our training loop, a bare PyTorch loop, and the training scripts of timm and torchvision.

All use the same model, optimizer and batch on the device, with bfloat16, channels_last and torch.compile; no data is
loaded. Ours is `train_epoch` with metrics, log, checkpoints, learning rate and seeding. The scripts of timm and
torchvision run their own `train_one_epoch`. Clone them at the tags of the installed versions:

    git clone --depth 1 --branch v$(python -c "import timm; print(timm.__version__)") \\
        https://github.com/huggingface/pytorch-image-models REFS/timm
    git clone --depth 1 --branch v$(python -c "import torchvision as tv; print(tv.__version__.split('+')[0])") \\
        https://github.com/pytorch/vision REFS/vision
    python benchmarks/gpu.py --timm REFS/timm/train.py --torchvision REFS/vision/references/classification/train.py

The loops alternate in short blocks in one process, each on its own copy of the model. `control` is the bare loop again.
Then ours and the bare loop alternate in a process group of size 1, which gives the cost of DDP. "of the card" is the
FLOP rate of training, counted as three forward passes, relative to large bfloat16 matrix products in the same run.
"peak GiB" is the peak memory of one loop: weights, optimizer state, batch, and what its steps allocate.

To test it without a GPU: --device cpu --arch resnet8 --im-size 32 --batch 8 --classes 10 --steps 3 --no-compile
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from bench_support.gpu_contestants import (
    Batches,
    Contestant,
    bare_loop,
    import_script,
    speed_ratios,
    take_turns,
    timm_loop,
    torchvision_loop,
)
from bench_support.machine import describe_run, show_spread
from step import MemoryLoader, build_memory_run
from torch.utils.flop_counter import FlopCounterMode

from distribuuuu.config import Config, ConfigError, load_cfg
from distribuuuu.data.batch import Batch
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.ddp import compile_model
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.engine.build import build_training
from distribuuuu.engine.run import Run
from distribuuuu.models import build_model
from distribuuuu.records.run_log import logging_to
from distribuuuu.tasks.losses import build_loss
from distribuuuu.trainer import train_epoch

# Minimum ratio of our images/s to those of the faster reference script, on a GPU.
BAR = 1.0
MATRIX_SIDES = {"cuda": 8192, "cpu": 128}
REFERENCES = ("timm", "torchvision")


def build_memory_loader(batches: Batches, num_classes: int) -> MemoryLoader:
    """Return a loader that repeats the batch."""
    images = batches.batch[0]
    loader = MemoryLoader(Batch(*batches.batch), BatchPlan(len(images), 1, 1), images.device, num_classes)
    loader.num_steps = len(batches)
    return loader


def make_cfg(args: argparse.Namespace, out_dir: Path, data: Sequence[str] = ("DATA.NAME", "dummy")) -> Config:
    """Return the config of the run; the tiny learning rate keeps the weights, and so the speed, constant.

    Args:
        args: the command line.
        out_dir: the output folder, which is created.
        data: options of the data set.
    """
    out_dir.mkdir()
    overrides = f"MODEL.ARCH {args.arch} MODEL.NUM_CLASSES {args.classes} TRAIN.IM_SIZE {args.im_size} TRAIN.AMP bf16 "
    overrides += f"MODEL.CHANNELS_LAST True MODEL.COMPILE {'default' if args.compile else 'none'} "
    overrides += f"TRAIN.BATCH_SIZE {args.batch} TRAIN.PRINT_FREQ {args.steps} TEST.IM_SIZE {args.im_size} "
    overrides += f"OPTIM.BASE_LR 1e-6 OPTIM.MAX_EPOCH 100000 RNG_SEED 1 LOG.TENSORBOARD False OUT_DIR {out_dir}"
    return load_cfg(None, [*overrides.split(), *data])


def build_our_run(cfg, batches: Batches, stack: contextlib.ExitStack) -> Run:
    """Return a run of our loop on its own model, wrapped in DDP inside a process group."""
    run = build_memory_run(cfg, build_memory_loader(batches, cfg.MODEL.NUM_CLASSES))
    stack.enter_context(run.log)
    return run


def build_ours(ours: Run) -> Contestant:
    """Return our loop on the model and the batch of a run."""
    state = ours.state

    def run() -> None:
        train_epoch(ours)
        state.finish_epoch()  # the next block is the next epoch, because the log extrapolates from increasing positions

    parameters = list(state.model.parameters())
    buckets = sum(parameter.numel() * parameter.element_size() for parameter in parameters) * dist.is_distributed()
    images, labels, *_ = ours.train_loader.batch
    return Contestant(run, state.optimizer, [*parameters, *state.model.buffers(), images, labels], buckets)


def build_other(cfg, batches: Batches, build_loop: Callable) -> Contestant:
    """Return another loop on a copy of the model, with the same optimizer, loss and autocast."""
    loader = build_memory_loader(batches, cfg.MODEL.NUM_CLASSES)
    state = build_training(cfg, loader, loader.batch[0][:1], latest=None).state
    if cfg.MODEL.COMPILE != "none":
        compile_model(state.model, cfg.MODEL.COMPILE)
    loop = build_loop(state.model, state.optimizer, build_loss(cfg), batches, state.precision.autocast)
    held = [*state.model.parameters(), *state.model.buffers(), *batches.batch]
    return Contestant(loop, state.optimizer, held)


def build_contestants(args, cfg, batches: Batches, ours: Contestant) -> dict[str, Contestant]:
    """Return the selected loops by name: bare, ours, control, and the reference scripts that are given."""
    contestants = {"bare": build_other(cfg, batches, bare_loop), "ours": ours}
    bare = contestants["bare"]
    contestants["control"] = Contestant(bare.run, bare.optimizer, bare.held)
    if args.timm:
        script, log_file = import_script(args.timm, "timm_train"), Path(cfg.OUT_DIR) / "timm.log"
        contestants["timm"] = build_other(cfg, batches, lambda *parts: timm_loop(script, *parts, log_file))
    if args.torchvision:
        script = import_script(args.torchvision, "torchvision_train")
        contestants["torchvision"] = build_other(cfg, batches, lambda *parts: torchvision_loop(script, *parts))
    return contestants


def count_forward_flops(cfg, batches: Batches) -> int:
    """Return the FLOPs of a forward pass of one image; a multiply-add counts as two."""
    loader = build_memory_loader(batches, cfg.MODEL.NUM_CLASSES)
    model = build_model(cfg).to(loader.device).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(batches.batch[0][:1])
    return counter.get_total_flops()


def measure_matrix_rate(device: torch.device, num_blocks: int = 10, block: int = 10) -> float:
    """Return the FLOP/s of the fastest block of large bfloat16 matrix products."""
    side = MATRIX_SIDES[device.type]
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(1 + num_blocks):
        start = time.perf_counter()
        for _ in range(block):
            left @ right
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 * block / min(seconds[1:])


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """Open a process group with a single process."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def run_all(args: argparse.Namespace, folder: Path, device: torch.device) -> dict:
    """Run all loops; return the results by kind: without and with a process group, FLOPs, matrix rate."""
    images = torch.randn(args.batch, 3, args.im_size, args.im_size, device=device)
    labels = torch.arange(args.batch, device=device) % args.classes
    batches = Batches((images.to(memory_format=torch.channels_last), labels), args.steps)
    cfgs = [make_cfg(args, folder / name) for name in ("alone", "group")]
    flops, rate = count_forward_flops(cfgs[0], batches), measure_matrix_rate(device)
    with contextlib.ExitStack() as stack:
        run = build_our_run(cfgs[0], batches, stack)
        alone = build_contestants(args, cfgs[0], batches, build_ours(run))
        take_turns(alone, args.blocks, device)
        bare = alone["bare"]
        stack.enter_context(group_of_one(device))
        ours = build_ours(build_our_run(cfgs[1], batches, stack))
        group = {"bare": Contestant(bare.run, bare.optimizer, bare.held), "ours": ours}
        take_turns(group, args.blocks, device)
    rate = max(rate, measure_matrix_rate(device))
    return {"alone": alone, "group": group, "flops": flops, "rate": rate}


def show(args: argparse.Namespace, result: dict, device: torch.device) -> None:
    """Print one line per loop, the cost of DDP and the comparison with BAR."""
    alone, group, rate = result["alone"], result["group"], result["rate"]
    step_images = args.batch * args.steps
    rates = {name: step_images / statistics.median(one.seconds) for name, one in alone.items()}
    fastest = max((name for name in alone if name in REFERENCES), key=rates.get, default=None)
    print(f"{result['flops'] / 1e9:.3f} GFLOP per image forward; matrix products: {rate / 1e12:.3f} TFLOP/s\n")
    reference = f"x {fastest or 'script'}"
    print(f"loop             img/s   x bare (least to greatest)   {reference:<13}  of the card  peak GiB")
    for name, one in alone.items():
        share = f"{3 * result['flops'] * rates[name] / rate:.1%}"
        to_fastest = f"{statistics.median(speed_ratios(one, alone[fastest])):.3f}" if fastest else "-"
        peak = f"{one.peak_bytes / 2**30:.2f}" if one.peak_bytes else "-"
        to_bare = show_spread(speed_ratios(one, alone["bare"]))
        print(f"{name:<12} {rates[name]:>9.1f}   {to_bare:<26}   {to_fastest:<13} {share:>12} {peak:>9}")
    is_distributed = speed_ratios(group["ours"], group["bare"])
    cost = statistics.median(speed_ratios(alone["ours"], alone["bare"])) / statistics.median(is_distributed) - 1
    peak = f", peak {group['ours'].peak_bytes / 2**30:.2f} GiB" if group["ours"].peak_bytes else ""
    print(
        f"ours in a process group of one: {show_spread(is_distributed)} x bare; DDP costs {cost:.1%} of the time{peak}"
    )
    missing = [name for name in REFERENCES if name not in alone]
    if missing:
        print(f"skipped: {' and '.join(missing)}; fix: give the path of the script with --{' and --'.join(missing)}")
    if fastest and device.type == "cuda":
        ratio = statistics.median(speed_ratios(alone["ours"], alone[fastest]))
        print(f"ours / {fastest}: {ratio:.3f}; the bar of {BAR:.2f} {'holds' if ratio >= BAR else 'DOES NOT HOLD'}")
    else:
        print("no bar: " + ("this is not a GPU" if fastest else "no reference script ran"))


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timm", type=Path, metavar="PATH/train.py", help="timm's training script")
    parser.add_argument("--torchvision", type=Path, metavar="PATH/train.py", help="torchvision's training script")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to run")
    parser.add_argument("--arch", default="resnet50", help="MODEL.ARCH")
    parser.add_argument("--classes", type=int, default=1000, help="number of classes; at least 5")
    parser.add_argument("--batch", type=int, default=256, help="images per step")
    parser.add_argument("--im-size", type=int, default=224, help="side of the images in pixels")
    parser.add_argument("--steps", type=int, default=30, help="steps per block")
    parser.add_argument("--blocks", type=int, default=10, help="blocks per loop after the warm-up")
    parser.add_argument("--threads", type=int, help="threads of the process; default: chosen by torch")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="do not compile the models")
    args = parser.parse_args()
    for path in filter(None, (args.timm, args.torchvision)):
        if not path.is_file():
            parser.error(f"{path}: not found; fix: clone it as described in --help")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU found; fix: --device cpu with a small model")
    if min(args.batch, args.im_size, args.steps, args.blocks) < 1 or args.classes < 5:
        parser.error("expected --batch, --im-size, --steps, --blocks >= 1 and --classes >= 5")
    return args


def main() -> None:
    """Measure and print; the output of the loops is written to files, as in a batch job."""
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = pick_device(0) if args.device == "cuda" else torch.device("cpu")
    torch.backends.cudnn.benchmark = True  # as in ours and in both scripts
    print(describe_run())
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"device: {card}; torchvision {version('torchvision')}, timm {version('timm')}")
    print(f"{args.arch}, {args.batch} images of {args.im_size} px, bfloat16, channels_last, "
          f"{'compiled' if args.compile else 'not compiled'}; medians of {args.blocks} blocks of {args.steps} steps",
          flush=True)  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        open(Path(folder) / "output", "w", encoding="utf-8") as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        logging_to(folder, "train.log"),
    ):
        try:
            result = run_all(args, Path(folder), device)
        except ConfigError as error:
            raise SystemExit(str(error)) from error
    show(args, result, device)


if __name__ == "__main__":
    sys.exit(main())
