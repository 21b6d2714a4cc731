#!/usr/bin/env python3
"""Measure peak memory and step time of a large model: DDP, ZeRO-1, FSDP and activation checkpointing.

Each row runs in new processes, with AdamW, the same images and the same weights. Memory is the maximum over the
processes, minus the memory before the model is built: on CUDA the peak of allocated tensors, on a CPU the peak of
private memory, sampled by a thread every 20 ms.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from bench_support.machine import describe_run

from distribuuuu.config import load_cfg
from distribuuuu.distributed import comm as dist
from distribuuuu.distributed.activation_checkpoint import recompute_blocks
from distribuuuu.distributed.ddp import wrap_model
from distribuuuu.distributed.process_group import pick_device, process_group
from distribuuuu.distributed.sharding import build_parallelize_fn
from distribuuuu.launch.detect import Launch
from distribuuuu.launch.nproc import find_free_port
from distribuuuu.models import build_model, count_parameters
from distribuuuu.optim.optimizer import build_optimizer
from distribuuuu.optim.precision import build_precision

RECOMPUTED = "MODEL.ACT_CHECKPOINT True"
ROWS = {
    "DDP": "",
    "DDP, recomputed": RECOMPUTED,
    "ZeRO-1": "DIST.SHARD zero1",
    "ZeRO-1, recomputed": f"DIST.SHARD zero1 {RECOMPUTED}",
    "FSDP": "DIST.SHARD fsdp",
    "FSDP, recomputed": f"DIST.SHARD fsdp {RECOMPUTED}",
}
MIB = 2**20
SAMPLE_EVERY_S = 0.02


class PrivateMemory(threading.Thread):
    """A thread that samples the private memory of this process and keeps the maximum (Linux)."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak_mib = 0.0
        self._ended = threading.Event()

    def run(self) -> None:
        """Sample until `finish`."""
        while not self._ended.wait(SAMPLE_EVERY_S):
            self.peak_mib = max(self.peak_mib, self.now_mib())

    def finish(self) -> float:
        """Stop sampling and return the maximum in MiB."""
        self._ended.set()
        self.join()
        return self.peak_mib

    @staticmethod
    def now_mib() -> float:
        """Return the current private memory in MiB."""
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


@contextlib.contextmanager
def peak_memory(device: torch.device, result: dict) -> Iterator[None]:
    """Set `result["mib"]` to the peak memory of the block in MiB, minus the memory before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        result["mib"] = (torch.cuda.max_memory_allocated(device) - before) / MIB
        return
    before, sampler = PrivateMemory.now_mib(), PrivateMemory()
    sampler.start()
    yield
    result["mib"] = sampler.finish() - before


def take_steps(cfg, args: argparse.Namespace, device: torch.device) -> tuple[list[float], int]:
    """Train for some steps; return the seconds of all but the first, and the number of parameters."""
    torch.manual_seed(0)
    model = build_model(cfg)
    if cfg.MODEL.ACT_CHECKPOINT:
        recompute_blocks(model)
    num_parameters = count_parameters(model)
    model = build_parallelize_fn(cfg, device)(model)
    optimizer, precision = build_optimizer(cfg, model), build_precision(cfg, device)
    images = torch.randn(args.batch, 3, args.im_size, args.im_size, device=device)
    labels = torch.arange(args.batch, device=device)
    wrapped, seconds = wrap_model(model, device, images), []
    for _ in range(1 + args.steps):
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        with precision.autocast():
            logits = wrapped(images)
        precision.backward(torch.nn.functional.cross_entropy(logits.float(), labels))
        precision.step(optimizer, lambda parameters: None)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[1:], num_parameters


def run_process(rank: int, args: argparse.Namespace, overrides: str, port: int, folder: str) -> None:
    """Run one process of a row; the first writes the results."""
    torch.set_num_threads(args.threads)
    launch, result = Launch("benchmark", rank, rank, args.processes, "127.0.0.1", port), {}
    device = pick_device(rank)
    overrides += f" MODEL.ARCH {args.arch} TRAIN.IM_SIZE {args.im_size} TEST.IM_SIZE {args.im_size}"
    overrides += f" TRAIN.AMP {args.amp} OPTIM.NAME adamw OPTIM.BASE_LR 1e-4 OUT_DIR {folder}"
    cfg = load_cfg(None, overrides.split())
    backend = "nccl" if device.type == "cuda" else "gloo"  # not auto, which opens no group for one process
    with process_group(launch, device, 600, backend):
        with peak_memory(device, result):
            seconds, num = take_steps(cfg, args, device)
        (peak_mib,) = dist.all_reduce_max([result["mib"]])
    if rank == 0:
        measured = {"mib": peak_mib, "step_s": statistics.median(seconds), "parameters": num}
        (Path(folder) / "measured.json").write_text(json.dumps(measured), encoding="utf-8")


def measure(args: argparse.Namespace, overrides: str) -> dict:
    """Return the results of a row, measured in new processes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_process, (args, overrides, find_free_port(), folder), nprocs=args.processes)
        return json.loads((Path(folder) / "measured.json").read_text(encoding="utf-8"))


def main() -> None:
    """Measure and print every row, relative to DDP."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="vit_large_patch16_224" if on_gpu else "vit_small_patch16_224")
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() if on_gpu else 2,
                        help="processes; one is a process group of one, which shards nothing")  # fmt: skip
    parser.add_argument("--batch", type=int, default=64 if on_gpu else 2, help="images per process and step")
    parser.add_argument("--im-size", type=int, default=224, help="side of the images in pixels")
    parser.add_argument("--amp", default="bf16" if on_gpu else "none", help="TRAIN.AMP")
    parser.add_argument("--steps", type=int, default=20 if on_gpu else 3, help="timed steps, after one warm-up step")
    parser.add_argument("--threads", type=int, default=1, help="threads per process")
    args = parser.parse_args()
    # malloc returns freed memory to the system at once, so that a peak on the CPU is that of used memory.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
    print(describe_run())
    first = None
    for name, overrides in ROWS.items():
        row = measure(args, overrides)
        if first is None:
            first = row
            print(f"{args.arch}, {row['parameters'] / 1e6:.1f} M parameters, {args.processes} processes, {args.batch} "
                  f"images of {args.im_size} px each, AdamW, TRAIN.AMP {args.amp}")  # fmt: skip
            print(f"{'':<29}{'peak MiB':>9}{'/ DDP':>8}{'step s':>9}{'/ DDP':>8}")
        shares = [row[key] / first[key] for key in ("mib", "step_s")]
        print(f"{name:<29}{row['mib']:>9.0f}{shares[0]:>8.2f}{row['step_s']:>9.3f}{shares[1]:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
