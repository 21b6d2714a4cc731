#!/usr/bin/env python3
"""Measure the time of `tools/train_net.py` to help texts, error messages and the first training step.

Each command is a new process, timed from its start to its end or to the log line of the first step. The commands
alternate with the bare imports of torch and torchvision, in which Python also searches for garbage.
"""

import argparse
import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench_support.machine import describe_run

TRAIN_NET = str(Path(__file__).resolve().parents[1] / "tools" / "train_net.py")
SMALL = "DATA.NAME dummy MODEL.NUM_CLASSES 10 TRAIN.IM_SIZE 32 TEST.IM_SIZE 32 TRAIN.BATCH_SIZE 8 TRAIN.PRINT_FREQ 1"
# The log line of the first step: epoch 1/N, step 1/N.
FIRST_STEP = re.compile(rb" 1/\d+ +1/\d+ ")
TORCH = "import torch"


@dataclass(frozen=True)
class Case:
    """A command, its expected exit status, and whether it is timed to its first step."""

    name: str
    args: list[str]
    status: int = 0
    to_first_step: bool = False


def list_cases(folder: str) -> list[Case]:
    """Return the commands to time; every run has its own OUT_DIR in the folder."""
    numbers = itertools.count()

    def train_net(*args: str) -> list[str]:
        return [TRAIN_NET, *args, "OUT_DIR", f"{folder}/{next(numbers)}"]

    small = SMALL.split()
    step = [*small, "MODEL.ARCH", "resnet8"]
    lean = [*step, "LOG.TENSORBOARD", "False", "TRAIN.WORKERS", "0"]
    return [
        Case("python -c pass", ["-c", "pass"]),
        Case(TORCH, ["-c", "import torch"]),
        Case("import torch, torchvision", ["-c", "import torch, torchvision"]),
        Case("--help", [TRAIN_NET, "--help"]),
        Case("a wrong key", train_net("TRAIN.BATCH_SIZ", "64"), 2),
        Case("a data folder that is not there", train_net("TRAIN.DATASET", "/no/such/folder"), 2),
        Case("an unknown MODEL.ARCH", train_net(*small, "MODEL.ARCH", "resnet81"), 2),
        Case("the first step", train_net(*step), to_first_step=True),
        Case("the same, no TensorBoard, no workers", train_net(*lean), to_first_step=True),
    ]


def time_case(case: Case) -> float:
    """Return the duration of a command in seconds.

    Raises:
        RuntimeError: it ended with an unexpected status.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *case.args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        shown = b""
        for line in process.stderr:
            shown += line
            if case.to_first_step and FIRST_STEP.search(line):
                return time.perf_counter() - start
        status = process.wait()
        seconds = time.perf_counter() - start
    finally:
        stop(process)
    if status != case.status or case.to_first_step:
        raise RuntimeError(f"{case.name}: exit status {status}\n{shown.decode()}")
    return seconds


def stop(process: subprocess.Popen) -> None:
    """Kill a process and its loader workers if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    process.stderr.close()


def measure(repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each command; the first round warms the file cache and is not counted."""
    seconds: dict[str, list[float]] = {}
    for number in range(1 + repeats):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for case in list_cases(folder):
                taken = time_case(case)
                if number:
                    seconds.setdefault(case.name, []).append(taken)
    return seconds


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="runs of each command")
    repeats = parser.parse_args().repeats
    print(describe_run())
    seconds = measure(repeats)
    print(f"\n{'':<38} seconds   from     to  x import torch   (median of {repeats})")
    torch_s = statistics.median(seconds[TORCH])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:<38} {median:>7.2f} {min(values):>6.2f} {max(values):>6.2f} {median / torch_s:>15.2f}")


if __name__ == "__main__":
    main()
