#!/usr/bin/env python3
"""Kill a sweep with successive halving at random, and compare its table and its weights with undisturbed ones.

    python benchmarks/sweep_kills.py --kills 10

Killed are in turn a run, the sweep process, and all, by SIGKILL or SIGTERM at random times; then the same command is
started again. The last weights of each finished trial are compared with those of the same run alone.
"""

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from distribuuuu.checkpoint.io import read_checkpoint

SPACE = shlex.split("OPTIM.BASE_LR=log:0.01:0.3 OPTIM.WEIGHT_DECAY=log:1e-5:1e-3 --trials 12 --asha 2 --jobs 2")
FIXED = shlex.split(
    "--cfg shapes/resnet14 MODEL.ARCH resnet8 MODEL.KWARGS.width 4 OPTIM.MAX_EPOCH 8 TRAIN.WORKERS 0 OUT_DIR"
)
COMMAND = [sys.executable, "-m", "distribuuuu"]


def list_runs(out: Path) -> list[int]:
    """Return the ids of the processes of the runs of a sweep."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if "\0train\0" in (line := entry.read_text(errors="replace")) and f"\0{out}/trial_" in line:
                found.append(int(entry.parent.name))
    return found


def start(out: Path) -> subprocess.Popen:
    """Start the sweep in a folder."""
    log = open(f"{out}.log", "ab")
    return subprocess.Popen([*COMMAND, "sweep", *SPACE, *FIXED, str(out)], stdout=log, stderr=log)


def disturb(out: Path, num_kills: int, rng: random.Random, most_s: float) -> list[str]:
    """Run the sweep with kills to its end; return their descriptions."""
    process, done = start(out), []
    while process.poll() is None or process.returncode != 0:
        if process.poll() is not None:
            process = start(out)
        if len(done) == num_kills:
            process.wait()
            continue
        time.sleep(rng.uniform(1, most_s))
        kind = ("run", "sweep", "all")[len(done) % 3]
        runs = list_runs(out)
        pids = {"run": runs[:1], "sweep": [process.pid], "all": [process.pid, *runs]}[kind]
        if process.poll() is None and pids:
            signum = rng.choice([signal.SIGKILL, signal.SIGTERM])
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            done.append(f"{kind} {signum.name}")
            if kind != "run":
                process.wait()
    return done


def compare_alone(out: Path, folder: Path) -> tuple[int, int]:
    """Return how many finished trials have the weights of the same run alone, and how many are finished."""
    rows = [row for row in json.loads((out / "sweep_results.json").read_text())["rows"] if row["status"] == "finished"]
    same = 0
    for row in rows:
        alone, words = folder / f"alone_{row['trial']}", [word for pair in row["values_of"].items() for word in pair]
        subprocess.run([*COMMAND, "train", *words, *FIXED, str(alone)], check=True, capture_output=True)
        runs = (alone, out / f"trial_{row['trial']:03d}" / "seed_0")
        one, other = (read_checkpoint(max((run / "checkpoints").glob("*.tar")))["state_dict"] for run in runs)
        same += all(torch.equal(one[key], other[key]) for key in one)
    return same, len(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="seed of the times and kinds of the kills")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    base = Path(tempfile.mkdtemp(prefix="sweep_kills_"))
    begun = time.monotonic()
    assert start(base / "calm").wait() == 0, (base / "calm.log").read_text()
    kills = disturb(base / "killed", args.kills, random.Random(args.seed), (time.monotonic() - begun) / args.kills)
    tables = [(base / name / "sweep_results.json").read_bytes() for name in ("calm", "killed")]
    print(f"{len(kills)} kills: {', '.join(kills)}\ntables equal: {tables[0] == tables[1]}")
    print("finished trials with the weights of the run alone: {} of {}".format(*compare_alone(base / "killed", base)))
