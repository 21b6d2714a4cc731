"""The speed checks of gpu_check.py: airbench94, the gaps of a step, JPEGs end to end, ResNet-20, two GPUs.

Each check yields lines: what is checked, what was seen, the bar, and whether it holds; None: it does not apply here.
"""

import contextlib
import gzip
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from bench_support import step_times as steps
from bench_support.loader_images import make_jpegs
from bench_support.small_training import NUM_IMAGES
from bench_support.training_process import read_records
from step import MemoryLoader, build_memory_run

from distribuuuu import load_run
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.batch import Batch
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.distributed.process_group import pick_device
from distribuuuu.engine.run import Run
from distribuuuu.engine.step_profile import FOLDER, labeled_parts, profiling
from distribuuuu.engine.trial_run import trial_run
from distribuuuu.launch.detect import Launch
from distribuuuu.trainer import take_step, train_epoch

ROOT = Path(__file__).resolve().parents[2]
ON_GPU = torch.cuda.is_available()
# Check, what was seen, what is expected, passed (None: skipped).
Lines = Iterator[tuple[str, str, str, bool | None]]
# Maximum seconds of our airbench94 relative to its author's script; minimum accuracy of its runs, in percent.
AIRBENCH_BAR, AIRBENCH_TOP1, AIRBENCH_RUNS = 1.10, 93.6, 3
# Minimum share of the time in which the GPU computes; images/s of ResNet-20; and of the loader and the model together,
# relative to the slower one alone.
BUSY_BAR, RESNET20_BAR, TOGETHER_BAR = 0.9, 22_000, 0.95
NUM_STEPS = 50 if ON_GPU else 3
FAST = "TRAIN.AMP bf16 MODEL.CHANNELS_LAST True" if ON_GPU else ""
AIRBENCH = ROOT / "configs" / "cifar10" / "airbench94"
# Runs the author's script, which is imported from its path, in a folder with its files of CIFAR-10.
_AUTHOR = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("airbench94", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
for run in ("warmup", *range(int(sys.argv[2]))):
    script.main(run)
"""


class AirbenchRun(NamedTuple):
    """A run of airbench94.

    Attributes:
        seconds: of the epochs after the first one.
        top1: in percent.
        wait: the share of the seconds that waits for batches.
    """

    seconds: float
    top1: float
    wait: float = 0.0


def check_airbench(folder: Path, script: Path | None, cifar10: Path | None) -> Lines:
    """Train airbench94 by its author's script, then by ours, compiled and with MODEL.COMPILE step; compare the seconds.

    They are those of all epochs but the first one, in which ours compiles: of the author's, what his script counts,
    which is without evaluations; of ours, all until the last step, also the starts of epochs, what is compiled again
    when the whitening bias is frozen, and checkpoints. The whitening comes before, and counts for neither.

    Args:
        folder: a temporary folder.
        script: legacy/airbench94.py of github.com/KellerJordan/cifar10-airbench.
        cifar10: the folder of torchvision's CIFAR10.
    """
    check, bar = "airbench94, seconds of epochs 2 to 10, ours / the author's", f"at most {AIRBENCH_BAR}"
    if not (ON_GPU and script and cifar10):
        yield check, "no GPU" if not ON_GPU else "no --airbench or no --cifar10", bar, None
        return
    runs_of = {"the author's": run_author(folder, script, cifar10)}
    for mode in ("default", "step"):
        try:
            runs_of[mode] = [run_airbench(folder / f"airbench {mode} {seed}", cifar10, seed, mode)
                             for seed in range(1, 1 + AIRBENCH_RUNS)]  # fmt: skip
        except subprocess.CalledProcessError as error:  # the other mode may still hold the bar
            print(f"      | MODEL.COMPILE {mode}: {error.stderr[-1000:]}")
    seconds = {name: statistics.median(one.seconds for one in runs) for name, runs in runs_of.items()}
    author_s = seconds.pop("the author's")
    ratio = min(seconds.values(), default=math.inf) / author_s
    seen = ", ".join(f"{mode} {second:.2f} s, of which {statistics.mean(one.wait for one in runs_of[mode]):.0%} wait "
                     "for batches" for mode, second in seconds.items())  # fmt: skip
    seen += f"; {author_s:.2f} s; the faster: {ratio:.2f}"
    yield f"{check}; MODEL.COMPILE", seen, bar, ratio <= AIRBENCH_BAR
    for name, runs in runs_of.items():
        top1 = statistics.mean(one.top1 for one in runs)
        seen = f"{top1:.2f} % (n = {len(runs)})"
        yield f"airbench94, top-1, {name}", seen, f"at least {AIRBENCH_TOP1}", top1 >= AIRBENCH_TOP1


def run_author(folder: Path, script: Path, cifar10: Path) -> list[AirbenchRun]:
    """Return the runs of the author's script, unchanged, after its warm-up."""
    from torchvision.datasets import CIFAR10

    (folder / "cifar10").mkdir()
    for name in ("train", "test"):
        data = CIFAR10(cifar10, train=name == "train")
        content = {"images": torch.tensor(data.data), "labels": torch.tensor(data.targets), "classes": data.classes}
        torch.save(content, folder / "cifar10" / f"{name}.pt")
    command = [sys.executable, "-c", _AUTHOR, str(script.resolve()), str(AIRBENCH_RUNS)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return read_author(done.stdout)[1:]


def read_author(output: str) -> list[AirbenchRun]:
    """Return the runs that the author's script has printed: a row for each epoch, and the evaluation."""
    runs, seconds = list[AirbenchRun](), list[float]()
    for cells in ([cell.strip() for cell in line.split("|")] for line in output.splitlines() if line.count("|") == 8):
        if cells[2].isdigit():
            seconds.append(float(cells[-2]))
        elif cells[2] == "eval":
            runs.append(AirbenchRun(seconds[-1] - seconds[0], 100 * float(cells[-3])))
            seconds.clear()
    return runs


def run_airbench(out_dir: Path, cifar10: Path, seed: int, mode: str) -> AirbenchRun:
    """Return a run of ours."""
    words = f"MODEL.COMPILE {mode} RNG_SEED {seed} LOG.TENSORBOARD False TRAIN.DATASET {cifar10} OUT_DIR".split()
    command = [sys.executable, str(ROOT / "tools" / "train_net.py"), "--cfg", f"{AIRBENCH}.yaml", *words, str(out_dir)]
    subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return read_run(out_dir)


def read_run(out_dir: Path) -> AirbenchRun:
    """Return the run of a folder."""
    rows = [row for row in read_records(out_dir) if row["kind"] == "train"]
    results = json.loads((out_dir / "results.json").read_text(encoding="utf-8"))
    started = max(row["time"] for row in rows if row["epoch"] == 1)
    seconds = rows[-1]["time"] - started
    waited = sum(row["wait"] * row["count"] / row["images_per_s"] for row in rows if row["epoch"] > 1)
    return AirbenchRun(seconds, results["accuracy"]["raw"]["last"]["top1"], waited / seconds)


# ----------------------------------------------------------------------------------- the time of a step


def build_run(folder: Path, stack: contextlib.ExitStack, arch: str, batch: int, side: int, mode: str):
    """Return a run of our loop on one batch in memory, with a MODEL.COMPILE, of epochs of NUM_STEPS steps."""
    device = pick_device(0)
    words = f"{FAST} MODEL.COMPILE {mode}"
    options = f"MODEL.ARCH {arch} MODEL.NUM_CLASSES 10 TRAIN.IM_SIZE {side} TEST.IM_SIZE {side} DATA.NAME dummy"
    options += f" TRAIN.BATCH_SIZE {batch} TRAIN.PRINT_FREQ {NUM_STEPS} OPTIM.BASE_LR 1e-6 OPTIM.MAX_EPOCH 100000"
    cfg = load_cfg(None, f"{options} LOG.TENSORBOARD False OUT_DIR {folder} {words}".split())
    folder.mkdir()
    images = torch.randn(batch, 3, side, side, device=device)
    layout = torch.channels_last if cfg.MODEL.CHANNELS_LAST else torch.contiguous_format
    content = Batch(images.to(memory_format=layout), torch.arange(batch, device=device) % 10)
    loader = MemoryLoader(content, BatchPlan(batch, 1, 1), device, 10)
    loader.num_steps = NUM_STEPS
    run = build_memory_run(cfg, loader)
    stack.enter_context(run.log)
    return run


STEPS = (
    [("airbench94", 1024, 32, "default"), ("airbench94", 1024, 32, "step"), ("resnet50", 256, 224, "default")]
    if ON_GPU
    else [("resnet8", 8, 32, "none"), ("resnet8", 8, 32, "step")]
)


def check_gaps(folder: Path) -> Lines:
    """Trace the steps of models on a batch in memory; show how busy the GPU is, launches, and the longest gaps."""
    for arch, batch, side, mode in STEPS:
        out_dir = folder / f"steps_of_{arch}_{mode}"
        with contextlib.ExitStack() as stack:
            run = build_run(out_dir, stack, arch, batch, side, mode)
            stack.enter_context(labeled_parts(run))
            for _ in range(2):  # compile, then fill the queue
                train_epoch(run)
                run.state.finish_epoch()
            with profiling(run, NUM_STEPS):
                train_epoch(run)
            (trace,) = (out_dir / FOLDER).glob("trace*")
        with gzip.open(trace) as file:
            found = read_trace(json.load(file)["traceEvents"], NUM_STEPS)
        gaps = ", ".join(f"{gap:.2f}" for gap in found["gaps_ms"]) or "none"
        host = f", {found['host_ms']:.1f} ms of the host" if found["host_ms"] else ""  # a replayed graph has no parts
        seen = f"GPU busy {found['busy']:.0%}; a step: {found['launches']:.0f} launches{host}; longest gaps {gaps} ms"
        passed = found["busy"] >= BUSY_BAR if ON_GPU else None
        yield f"steps of {arch}, MODEL.COMPILE {mode}", seen, f"at least {BUSY_BAR:.0%} busy", passed


def read_trace(events: list[dict], num_steps: int) -> dict:
    """Return of a trace the share of the time in which the GPU works, launches a step, host ms a step, longest gaps."""
    timed = [event for event in events if event.get("ph") == "X"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in timed if event.get("cat") in kinds)
    launches = sum("Launch" in event["name"] for event in timed if event.get("cat") == "cuda_runtime")
    labels = [event["dur"] for event in timed if event["name"] in ("forward", "backward", "optimizer")
              and event.get("cat") == "user_annotation"]  # fmt: skip
    busy, gaps, end = 0.0, list[float](), spans[0][0] if spans else 0.0
    for start, stop in spans:
        gaps.append(max(0.0, start - end) / 1e3)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    total = end - spans[0][0] if spans else 1.0
    return {"busy": busy / total, "launches": launches / num_steps, "host_ms": sum(labels) / 1e3 / num_steps,
            "gaps_ms": sorted(filter(None, gaps), reverse=True)[:5]}  # fmt: skip


def check_resnet20(folder: Path) -> Lines:
    """Train ResNet-20 on a batch in memory, with CUDA graphs of the model and of the whole step."""
    first = "reduce-overhead" if ON_GPU else "none"
    rates, batch = dict[str, float](), 128 if ON_GPU else 8
    for mode in (first, "step"):
        with contextlib.suppress(*([RuntimeError] if ON_GPU else [])), contextlib.ExitStack() as stack:
            rates[mode] = measure_rate(build_run(folder / f"resnet20_{mode}", stack, "resnet20", batch, 32, mode))
    seen = ", ".join(f"{mode} {rate:,.0f} images/s" for mode, rate in rates.items())
    passed = max(rates.values(), default=0.0) >= RESNET20_BAR if ON_GPU else None
    yield f"ResNet-20, batch {batch}; MODEL.COMPILE", seen, f"the faster at least {RESNET20_BAR:,} on a GPU", passed


def measure_rate(run: Run) -> float:
    """Return the images/s of a run: the median of epochs after the first one, which compiles."""
    rates = list[float]()
    for _ in range(6 if ON_GPU else 2):
        steps.synchronize(run.train_loader.device)
        started = time.perf_counter()
        train_epoch(run)
        run.state.finish_epoch()
        steps.synchronize(run.train_loader.device)
        rates.append(NUM_STEPS * run.train_loader.plan.global_batch / (time.perf_counter() - started))
    return statistics.median(rates[1:])


# ------------------------------------------------------------------------------------- end to end, devices

LOADERS = ("TRAIN.WORKERS 4", "TRAIN.WORKERS 8", "TRAIN.WORKERS -1", "TRAIN.WORKERS -1 DATA.WORKER_KIND thread",
           "TRAIN.WORKERS -1 DATA.WORKER_KIND thread DATA.DECODER nvimgcodec")  # fmt: skip


def check_jpegs(folder: Path) -> Lines:
    """Train ResNet-50 from JPEGs; compare the rate with that of the model and of the loader alone."""
    make_jpegs(folder / "jpegs", 600 if ON_GPU else 12)
    batch, arch, px = (256, "resnet50", 224) if ON_GPU else (4, "resnet8", 32)
    model = f"MODEL.ARCH {arch} TRAIN.IM_SIZE {px} TEST.IM_SIZE {px} TRAIN.DATASET {folder / 'jpegs'}"
    model += f" {FAST} LOG.TENSORBOARD False MODEL.NUM_CLASSES 10"
    steps.MEASURE_S, steps.WARM_UP_S = (2.0, 0.5) if ON_GPU else (0.1, 0.01)
    for words in LOADERS if ON_GPU else ("TRAIN.WORKERS 0", "TRAIN.WORKERS 1 DATA.WORKER_KIND thread"):
        check, bar = f"JPEGs, {words}", f"at least {TOGETHER_BAR} of the slower one alone"
        try:
            rates, wait = measure_rates(folder, f"{model} {words}", batch)
        except ConfigError as error:  # a decoder that is not installed
            yield check, str(error)[:80], bar, None
            continue
        share = rates["together"] / min(rates["model"], rates["loader"])
        shown = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
        yield (
            check,
            f"images/s: {shown} ({share:.2f}); {wait:.0%} waits",
            bar,
            share >= TOGETHER_BAR if ON_GPU else None,
        )


def measure_rates(folder: Path, words: str, batch: int) -> tuple[dict[str, float], float]:
    """Return the images/s of the model, of the loader and of both, and the share of the last that waits for data."""
    cfg, out = load_cfg(None, words.split()), folder / f"rates_{len(list(folder.iterdir()))}"
    out.mkdir()
    with trial_run(cfg, Launch("check"), BatchPlan(batch, 1, 1), str(out)) as run:
        loader, device = run.train_loader, run.train_loader.device
        run.model.train()
        memory, stream = itertools.repeat(next(iter(loader))), steps.endless_batches(loader, 0)
        ahead = steps.count_ahead(loader.plan, steps.count_own_workers(cfg, Launch("check"))[0])
        rates = {"model": batch / steps.time_calls(lambda: take_step(run, memory, 0), device)}
        rates["loader"] = batch / steps.time_calls(lambda: next(stream), device, ahead)
        loader.pop_data_time()
        started = time.perf_counter()
        rates["together"] = batch / steps.time_calls(lambda: take_step(run, stream, 0), device, ahead)
        return rates, min(1.0, loader.pop_data_time() / (time.perf_counter() - started))


def check_devices(folder: Path, train: Callable, compare: Callable) -> Lines:
    """Predict on the second GPU, and train on two GPUs; compare both with one.

    `train` and `compare` are those of gpu_check.py.
    """
    check, expected = "predictions, cuda:1 and cuda:0", "probabilities differ by at most 1e-4"
    if torch.cuda.device_count() < 2:
        yield check, f"GPUs: {torch.cuda.device_count()}", expected, None
        return
    train(folder, "one gpu", "OPTIM.BASE_LR 0.001")
    images = sorted(str(path) for path in (folder / "data" / "val").rglob("*.jpg"))
    assert len(images) == NUM_IMAGES["val"]
    found = [load_run(folder / "one gpu", device=f"cuda:{number}").predict(images, topk=3) for number in (0, 1)]
    scores = [[dict(zip(one.labels, one.probabilities, strict=True)) for one in own] for own in found]
    largest = max(abs(mine[name] - theirs[name]) for mine, theirs in zip(*scores, strict=True) for name in mine)
    yield check, f"{largest:.2g}", expected, largest <= 1e-4
    train(folder, "two gpus", "OPTIM.BASE_LR 0.001 MODEL.SYNCBN True", "--nproc 2")
    yield compare("two GPUs over nccl", folder / "one gpu", folder / "two gpus", 1e-3)
