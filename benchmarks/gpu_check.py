#!/usr/bin/env python3
"""Measure what only a GPU shows, meant to take nine minutes; or check CUDA and nccl paths, in two further parts.

Each line prints what was seen, what is expected, and PASS, FAIL or SKIP; the exit status is 1 after a FAIL. Without a
GPU, or with --device cpu, what applies runs on the CPU, without a bar for speed, and the rest is skipped.

speed (default), in this order: airbench94 beside its author's script; the gaps of a step of airbench94 and ResNet-50;
ResNet-50 end to end from JPEGs; memory.py; tests/test_cuda.py; ResNet-20 with CUDA graphs; predictions on a second GPU
and a training on two. A check that would begin after eight minutes is skipped; one that takes longer than its share of
the nine minutes, or is not over after them, is stopped and has failed. The first one needs

    git clone https://github.com/KellerJordan/cifar10-airbench REFS/airbench
    python benchmarks/gpu_check.py --airbench REFS/airbench/legacy/airbench94.py --cifar10 data

1. The loader of the device against that of the host, races by torch's sanitizer, synchronizations by its debug mode.
2. A process group of one with each DIST.SHARD and MODEL.SYNCBN; compiled runs killed in an evaluation; float16, stopped
   and resumed; two processes on one GPU, one of which is killed.

gpu.py compares our loop with those of timm and torchvision.
"""

import argparse
import faulthandler
import importlib.util
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

if "cpu" in sys.argv:  # of --device, before torch looks for a GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from bench_support.gpu_speed import Lines, check_airbench, check_devices, check_gaps, check_jpegs, check_resnet20
from bench_support.machine import describe_run
from bench_support.small_training import NUM_IMAGES, SETTINGS, TRAIN_NET, draw_images
from bench_support.training_process import RunEnded, TrainingProcess, read_records

from distribuuuu import trainer
from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.config import load_cfg
from distribuuuu.data.loader import build_loader
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.launch.detect import Launch

ROOT = Path(__file__).resolve().parents[1]
ON_GPU = torch.cuda.is_available()
BACKEND = "nccl" if ON_GPU else "gloo"
MODEL = "MODEL.ARCH resnet8 TRAIN.GLOBAL_BATCH_SIZE 6 TEST.BATCH_SIZE 2 OPTIM.MAX_EPOCH 2 CUDNN.DETERMINISTIC True"
NUM_STEPS = NUM_IMAGES["train"] // 6
# Seconds after which a command hangs; a compiled one takes a minute to start.
HANGS_AFTER_S = 400
# Maximum differences of weights. Rounding of the norm of sharded gradients, and of batch norm in float64, grows with
# the steps; a kernel that the compiler tuned anew may sum in another order.
TOLERANCES = {"none": 0.0, "zero1": 0.0, "fsdp": 1e-4, "MODEL.SYNCBN": 1e-3, "compiled": 1e-3 if ON_GPU else 0.0}
# Rounding of a crop on the device, in units of the normalized images; wrong pixels differ by more than 0.1.
PIXEL_TOLERANCE = 0.05
# Seconds after which no check of the speed begins, and after which each of them is stopped.
LATEST_S, LIMIT_S = 480, 525
# Maximum peak memory with activation checkpointing, relative to that without it.
MEMORY_BAR = 0.9


class TimeIsOver(BaseException):
    """The time of a check is over; no `except Exception` of what it runs catches this."""


def train(folder: Path, name: str, words: str = "", flags: str = "", **env: str) -> subprocess.CompletedProcess:
    """Train in folder/name; return the finished command with its output."""
    # One thread, as in the runs that are killed: compiled kernels of the CPU add in an order that depends on it.
    done = subprocess.run(command_of(folder, name, words, flags), capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **env}, timeout=HANGS_AFTER_S)  # fmt: skip
    if done.returncode:
        print(f"      | exit status {done.returncode}: {name}", *done.stderr.splitlines()[-8:], sep="\n      | ")
    return done


def command_of(folder: Path, name: str, words: str, flags: str = "") -> list[str]:
    """Return the command line of a training."""
    settings = dict(zip(*[iter(f"{SETTINGS} {MODEL} TRAIN.WORKERS 2 {words}".split())] * 2, strict=True))
    settings |= {"TRAIN.DATASET": str(folder / "data"), "OUT_DIR": str(folder / name)}
    return [sys.executable, TRAIN_NET, *flags.split(), *(word for pair in settings.items() for word in pair)]


def weights_of(out_dir: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the newest checkpoint."""
    return read_checkpoint(sorted((out_dir / "checkpoints").glob("*.pth.tar"))[-1])["state_dict"]


def compare(check: str, one: Path, other: Path, tolerance: float) -> tuple[str, str, str, bool]:
    """Return the line that compares the last weights of two runs."""
    expected = f"weights differ by at most {tolerance:g}"
    try:
        pairs = zip(weights_of(one).values(), weights_of(other).values(), strict=True)
    except IndexError:
        return check, "a run has no checkpoint", expected, False
    largest = max((mine.double() - theirs.double()).abs().max().item() for mine, theirs in pairs)
    return check, f"weights differ by {largest:.2g}", expected, largest <= tolerance


def last_loss(out_dir: Path) -> float:
    """Return the last training loss of a run."""
    return [record["loss"] for record in read_records(out_dir) if record["kind"] == "train"][-1]


# ------------------------------------------------------------------------------------------ part 1


def check_tests(folder: Path) -> Lines:
    """Run tests/test_cuda.py."""
    if not importlib.util.find_spec("pytest"):
        yield "tests/test_cuda.py", "pytest is not installed", "no failure", None
        return
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "--import-mode=importlib", "tests/test_cuda.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1]
    yield "tests/test_cuda.py", summary, "no failure", done.returncode == 0
    if done.returncode:
        print("\n".join(line for line in done.stdout.splitlines() if line.startswith(("E  ", "FAILED"))))


def check_batches(folder: Path) -> Lines:
    """Compare the batches of DATA.LOADER host and device."""
    device = pick_device(0)
    for crop in ("pad", "resized"):
        loaders = []
        for kind in ("host", "device"):
            words = command_of(folder, "batches", f"DATA.CROP {crop} DATA.LOADER {kind} TRAIN.WORKERS 0")[2:]
            loaders.append(build_loader(load_cfg(None, words), Launch("check"), device, train=True))
        pairs = zip(*(loader.batches_from(5, 1, 0) for loader in loaders), strict=False)
        first = ((mine.images, others.images) for mine, others in itertools.islice(pairs, 5))
        largest = max((mine - others).abs().max().item() for mine, others in first)
        check = f"batches of the host and the device, DATA.CROP {crop}"
        yield check, f"pixels differ by {largest:.2g}", f"at most {PIXEL_TOLERANCE}", largest <= PIXEL_TOLERANCE


def check_resumption(folder: Path) -> Lines:
    """Stop a run after an epoch, resume and evaluate it, with the loader of the host and of the device."""
    for kind in ("host", "device"):
        words = f"DATA.LOADER {kind} DATA.CROP pad"
        status = [train(folder, f"{kind} whole", words).returncode,
                  train(folder, f"{kind} resumed", words, "--stop-epoch 1").returncode,
                  train(folder, f"{kind} resumed", words).returncode]  # fmt: skip
        test = [TRAIN_NET.replace("train_net", "test_net") if word == TRAIN_NET else word
                for word in command_of(folder, f"{kind} resumed", words)]  # fmt: skip
        status.append(subprocess.run(test, capture_output=True, timeout=HANGS_AFTER_S).returncode)
        yield f"train, stop, resume, evaluate: DATA.LOADER {kind}", f"exit statuses {status}", "all 0", not any(status)
        yield compare(f"resumed run, DATA.LOADER {kind}", folder / f"{kind} whole", folder / f"{kind} resumed", 0.0)


def check_races(folder: Path) -> Lines:
    """Count the races that torch's sanitizer reports in a run."""
    for loader in ("host", "device"):
        check = f"TORCH_CUDA_SANITIZER, DATA.LOADER {loader}"
        if not ON_GPU:
            yield check, "no GPU", "0 races", None
            continue
        words = f"TRAIN.WORKERS 0 DATA.LOADER {loader} DATA.CROP pad OPTIM.MAX_EPOCH 1 OPTIM.WARMUP_EPOCHS 0"
        done = train(folder, f"races {loader}", words, TORCH_CUDA_SANITIZER="1")
        races = (done.stdout + done.stderr).count("possible data race")
        yield check, f"{races} races, exit status {done.returncode}", "0 races", races == done.returncode == 0


def check_synchronizations(folder: Path) -> Lines:
    """Train an epoch in torch's debug mode, and show where the host waited for the device."""
    check, expected = "synchronizations in an epoch", "only in the read of the metrics, tasks/meter.py"
    if not ON_GPU:
        yield check, "no GPU", expected, None
        return
    train_epoch, found = trainer.train_epoch, Counter()

    def watch(run) -> None:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                train_epoch(run)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for one in caught:
            if "synchroniz" in str(one.message) and run.state.epoch == 1:  # the first epoch sets up kernels
                found[f"{Path(one.filename).parent.name}/{Path(one.filename).name}:{one.lineno}"] += 1

    trainer.train_epoch = watch
    words = "TRAIN.PRINT_FREQ 5 CHECKPOINT.EVERY_STEPS 0 CUDNN.DETERMINISTIC False OPTIM.CLIP_NORM 1"
    try:
        trainer.train_model(load_cfg(None, command_of(folder, "synchronizations", words)[2:]))
    finally:
        trainer.train_epoch = train_epoch
    others = [place for place in found if not place.startswith("tasks/meter.py")]
    yield check, ", ".join(f"{num} x {place}" for place, num in found.items()) or "none", expected, not others


# ------------------------------------------------------------------------------------------ part 2


def check_groups(folder: Path) -> Lines:
    """Train in a process group of one, and compare with a process without a group."""
    for kind in ("none", "zero1", "fsdp", "MODEL.SYNCBN"):
        words = f"DIST.SHARD {kind}"
        if kind == "MODEL.SYNCBN":  # its rounding errors grow with the learning rate
            words = "MODEL.SYNCBN True OPTIM.BASE_LR 0.001"
        check = f"group of one, {BACKEND}, {words}"
        if kind == "fsdp" and not ON_GPU and torch.__version__ < "2.7":
            yield check, f"torch {torch.__version__}", "torch 2.7 for fsdp on a CPU", None
            continue
        alone = f"alone {words.partition(' OPTIM')[2]}"
        if not (folder / alone).exists():
            train(folder, alone, words.replace("MODEL.SYNCBN True", ""))
        train(folder, f"group {kind}", f"{words} DIST.BACKEND {BACKEND}")
        yield compare(check, folder / alone, folder / f"group {kind}", TOLERANCES[kind])


def check_compiled(folder: Path) -> Lines:
    """Kill a compiled run in an evaluation and resume it; compare it with an undisturbed one, and with an eager one."""
    words = "TRAIN.AMP bf16 EMA.HALF_LIFE 60 TEST.FLIP True DIST.STARTUP_TIMEOUT_S 1800"
    train(folder, "eager", words)
    for mode in ("default", "reduce-overhead", "step"):
        check = f"MODEL.COMPILE {mode}"
        if mode == "reduce-overhead" and not ON_GPU:
            yield check, "no GPU", "CUDA graphs", None
            continue
        whole, killed, compiled = f"whole {mode}", f"killed {mode}", f"{words} MODEL.COMPILE {mode}"
        if train(folder, whole, compiled).returncode:
            yield check, "the training failed", "exit status 0", False
            continue
        losses = [last_loss(folder / name) for name in ("eager", whole)]
        close = abs(losses[1] / losses[0] - 1) <= 0.02
        yield f"{check}: loss", f"{losses[1]:.4f}, eager {losses[0]:.4f}", "within 2 %", close
        hit = kill_in_evaluation(folder, killed, compiled)
        train(folder, killed, compiled)
        if mode != "step":  # whose evaluation, of eager operations, may be over before: it is killed where it is
            yield f"{check}: killed in", "an evaluation" if hit else "another phase", "an evaluation", hit
        yield compare(f"{check}: resumed", folder / whole, folder / killed, TOLERANCES["compiled"])


def kill_in_evaluation(folder: Path, name: str, words: str) -> bool:
    """Kill a run in its first evaluation; return whether it was there."""
    run = TrainingProcess(command_of(folder, name, words), folder / name, NUM_STEPS, HANGS_AFTER_S)
    try:
        run.wait_for(run.is_evaluating)
        time.sleep(0.3)  # the checkpoint of the epoch is saved meanwhile
        run.suspend()
        return run.is_evaluating()
    except RunEnded:
        return False
    finally:
        run.kill()


def check_float16(folder: Path) -> Lines:
    """Stop and resume a run with float16 and clipping, with one process's optimizer and a partitioned one."""
    for shard in ("none", "zero1"):
        check = f"fp16 with clipping, DIST.SHARD {shard}: resumed"
        if not ON_GPU:
            yield check, "no GPU", "float16 is for GPUs", None
            continue
        words = f"TRAIN.AMP fp16 OPTIM.CLIP_NORM 1 DIST.BACKEND {BACKEND} DIST.SHARD {shard}"
        train(folder, f"fp16 {shard} whole", words)
        train(folder, f"fp16 {shard}", words, "--stop-epoch 1")
        train(folder, f"fp16 {shard}", words)
        yield compare(check, folder / f"fp16 {shard} whole", folder / f"fp16 {shard}", 0.0)


def check_killed_rank(folder: Path) -> Lines:
    """Kill one of two processes that share the device, and measure how soon the other one ends."""
    words = "DIST.BACKEND gloo OPTIM.MAX_EPOCH 200"
    run = TrainingProcess(command_of(folder, "two", words, "--nproc 2"), folder / "two", NUM_STEPS, HANGS_AFTER_S)
    check, expected = "two processes over gloo, kill -9 of rank 1", "all end in 30 s, with a failure"
    try:
        run.wait_for(lambda: len(run.records()) >= 5)
        run.signal_rank(1, signal.SIGKILL)
        started = time.monotonic()
        status = run.wait(60)
        seconds = time.monotonic() - started
        left = len(run.list_pids())
        seen = f"exit status {status} after {seconds:.1f} s, {left} processes left"
        yield check, seen, expected, status != 0 and seconds <= 30 and not left
    except (RunEnded, RuntimeError, subprocess.TimeoutExpired) as error:
        yield check, f"{type(error).__name__}: {str(error)[-300:]}", expected, False
    finally:
        run.kill()


# ------------------------------------------------------------------------------------------- speed


def check_memory(folder: Path) -> Lines:
    """Run memory.py, print its output, and compare the peaks with that of DDP without activation checkpointing."""
    words = "--processes 1" if ON_GPU else "--processes 1 --arch timm/test_vit --im-size 160 --steps 2"
    command = [sys.executable, str(ROOT / "benchmarks" / "memory.py"), *words.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    print(
        re.sub("^", "      | ", "\n".join([done.stdout.rstrip(), *done.stderr.splitlines()[-8:]]), flags=re.MULTILINE)
    )
    rows = re.findall(r"^(\S.*?) {2,}\d+ +(\d\S*) ", done.stdout, re.MULTILINE)
    peaks = {name: float(share) for name, share in rows}
    holds = done.returncode == 0 and peaks.get("DDP, recomputed", math.inf) <= MEMORY_BAR
    seen = ", ".join(f"{name} {share:.2f}" for name, share in peaks.items())
    expected = f"exit status 0; DDP, recomputed at most {MEMORY_BAR} of DDP"
    passed = holds if ON_GPU or done.returncode else None
    yield "memory.py, peaks", f"{seen}; exit status {done.returncode}", expected, passed


def list_checks(args: argparse.Namespace) -> list[tuple[Callable[[Path], Lines], float]]:
    """Return the checks of a part with the seconds that each may take; inf: no limit."""
    airbench = partial(check_airbench, script=args.airbench, cifar10=args.cifar10)
    devices = partial(check_devices, train=train, compare=compare)
    return {
        "speed": [(airbench, 240), (check_gaps, 120), (check_jpegs, 150), (check_memory, 120), (check_tests, 120),
                  (check_resnet20, 90), (devices, 120)],
        "1": [(one, math.inf) for one in (check_batches, check_races, check_synchronizations, check_resumption)],
        "2": [(one, math.inf) for one in (check_groups, check_float16, check_killed_rank, check_compiled)],
    }[args.part]  # fmt: skip


def catching(run_check: Callable[[Path], Lines], folder: Path, limit_s: float) -> Lines:
    """Yield the lines of a check, and one that fails after an exception, or when its time is over.

    A command that the check waits for is then killed.
    """

    def stop(*_) -> None:
        raise TimeIsOver(f"{limit_s:.0f} s are over")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s if math.isfinite(limit_s) else 0)  # 0: none
    try:
        yield from run_check(folder)
    except (Exception, TimeIsOver) as error:
        traceback.print_exc()
        kind = "timeout" if isinstance(error, TimeIsOver) else type(error).__name__
        yield getattr(run_check, "func", run_check).__name__, f"{kind}: {error!s:.200}", "no error", False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> int:
    """Run a part; return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("speed", "1", "2"), default="speed", help="the part to run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: as without a GPU")
    parser.add_argument("--airbench", type=Path, metavar="PATH/airbench94.py", help="the script of its author")
    parser.add_argument("--cifar10", type=Path, metavar="FOLDER", help="the folder of torchvision's CIFAR10")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    device = torch.cuda.get_device_name() if ON_GPU else "none; on the CPU"
    print(describe_run(), f"device: {device}", sep="\n", flush=True)
    started, verdicts = time.time(), Counter()
    if args.part == "speed":  # a hang within a library, which no signal interrupts, ends the process
        faulthandler.dump_traceback_later(LIMIT_S + 15, exit=True)
    with tempfile.TemporaryDirectory() as folder:
        draw_images(Path(folder) / "data")
        for run_check, limit_s in list_checks(args):
            past_s = time.time() - started
            if args.part == "speed" and past_s > LATEST_S:
                print(f"SKIP  a check: {LATEST_S} s are over", flush=True)
                verdicts["SKIP"] += 1
                continue
            limit_s = min(limit_s, LIMIT_S - past_s) if args.part == "speed" else limit_s
            for check, seen, expected, passed in catching(run_check, Path(folder), limit_s):
                verdict = "SKIP" if passed is None else "PASS" if passed else "FAIL"
                verdicts[verdict] += 1
                print(f"{verdict}  {check}: saw {seen}; expected {expected}", flush=True)
    counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in ("PASS", "FAIL", "SKIP"))
    print(f"part {args.part}: {counts}; {time.time() - started:.0f} s")
    return int(verdicts["FAIL"] > 0)


if __name__ == "__main__":
    sys.exit(main())
