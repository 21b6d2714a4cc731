#!/usr/bin/env python3
"""Check that an interrupted `finetune` is bitwise equal to an uninterrupted one.

A small backbone is fine-tuned on a few JPEGs without interruption, then again with SIGKILL to all of its processes at
random moments of each stage. In the end, all weights, features, decisions, records and predictions must be equal.
With `--processes 2`, the training has two processes in both runs.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from bench_support.machine import describe_run
from bench_support.same_runs import compare_runs, find_differences
from bench_support.small_training import draw_images
from bench_support.training_process import TrainingProcess, read_records

from distribuuuu.checkpoint.io import read_checkpoint

OPTIONS = "MODEL.ARCH timm/test_efficientnet TRAIN.IM_SIZE 32 TEST.IM_SIZE 36 TEST.BATCH_SIZE 8 OPTIM.MAX_EPOCH 4 "
OPTIONS += "TRAIN.AMP none MODEL.CHANNELS_LAST False CHECKPOINT.EVERY_STEPS 1 TRAIN.GLOBAL_BATCH_SIZE 8 "
OPTIONS += "TRAIN.PRINT_FREQ 1"
STAGES = ("images", "views", "features", "start", "training", "choice", "test")
MEASURED = ("seconds", "image_s", "images_per_s", "speedup", "hours", "mib")
POLL_S = 0.005  # each poll looks at all processes of the machine


class Start:
    """A start of the command in folder/run, and the moments at which it has begun each stage itself."""

    def __init__(self, folder: Path, processes: int):
        self.out = folder / "run"
        words = [str(folder / "data"), "--backbone", str(folder / "backbone.pth"), "--out", str(self.out)]
        words += ["--workers", "0", "--minutes", "30", "--nproc", str(processes), *OPTIONS.split()]
        self.process = TrainingProcess([sys.executable, "-m", "distribuuuu", "finetune", *words], self.out)
        self.begun_at = {STAGES[0]: time.time()}

    def list_steps(self, own: bool = False) -> set[tuple[int, int]]:
        """Return the epoch and the number of each step of the training, or only of those that this start has made."""
        since = self.begun_at[STAGES[0]] if own else 0
        records = read_records(self.out / "finetune")
        return {(one["epoch"], one["step"]) for one in records if one["kind"] == "train" and one["time"] >= since}

    def has_begun(self, stage: str) -> bool:
        """Tell whether a stage has begun if the one before has: an earlier start has left files of later stages."""
        decisions = self.out / "finetune.json"
        if decisions.exists() and "test" in json.loads(decisions.read_text()):  # a finished one prints its table only
            return True
        if stage == "views":
            return " images of 3 classes in " in self.process.said_since_start()
        if stage == "features":
            return ", AMP none, " in self.process.said_since_start()
        if stage == "test":
            return "choice" in json.loads(decisions.read_text())
        time.sleep(POLL_S)
        is_alive = self.process.has_rank(0)  # the training is a process of its own
        return {"start": is_alive, "choice": not is_alive}.get(stage, not is_alive or bool(self.list_steps(own=True)))

    def find_stage(self) -> str:
        """Return the stage of this moment."""
        for stage in STAGES[len(self.begun_at) :]:
            if not self.has_begun(stage):
                break
            self.begun_at[stage] = time.time()
        return [*self.begun_at][-1]

    def wait_for(self, stage: str) -> None:
        """Wait until a stage has begun."""
        self.process.wait_for(lambda: STAGES.index(self.find_stage()) >= STAGES.index(stage))


def measure(start: Start) -> tuple[dict[str, float], int]:
    """Return the seconds of each stage and the number of steps of an uninterrupted run."""
    start.wait_for(STAGES[-1])
    start.process.finish()
    moments = [*start.begun_at.values(), time.time()]
    durations = (end - begin for begin, end in itertools.pairwise(moments))
    return dict(zip(STAGES, durations, strict=True)), len(start.list_steps())


def kill_many(folder: Path, args: argparse.Namespace, seconds: dict[str, float], num_steps: int) -> Counter[str]:
    """Start and kill the command in each stage, then let it finish; return the number of kills by the stage hit.

    A training makes at least one more step before each kill.
    """
    rng, hits, aimed = random.Random(1), Counter[str](), 0
    targets = sorted(index % len(STAGES) for index in range(args.kills))
    in_training = targets.count(STAGES.index("training"))
    for number, target in enumerate((STAGES[index] for index in targets), 1):
        start, share = Start(folder, args.processes), rng.uniform(0, 0.9)
        try:
            start.wait_for(target)
            if target == "training":
                aimed += 1
                least = num_steps * aimed // (in_training + 1)
                start.process.wait_for(lambda own=start, least=least: len(own.list_steps()) >= least)
                time.sleep(share * seconds["training"] / num_steps)
            else:
                end = time.monotonic() + share * seconds[target]
                while time.monotonic() < end and start.find_stage() == target:
                    time.sleep(POLL_S)
            hit = start.find_stage()
        finally:
            start.process.kill()
        hits[hit] += 1
        steps = f"step {len(start.list_steps())} of {num_steps}" if hit == "training" else ""
        print(f"{number:>4}  {target:<8}  {hit:<8}  {steps}".rstrip(), flush=True)
    Start(folder, args.processes).process.finish()
    return hits


def stable(value: Any) -> Any:
    """Return a nested value without what was measured."""
    is_dict = isinstance(value, dict)
    return {key: stable(own) for key, own in value.items() if key not in MEASURED} if is_dict else value


def list_differences(*runs: Path) -> Iterator[str]:
    """Yield the differences of the files of two fine-tunings."""
    yield from compare_runs(*(out / "finetune" for out in runs))[0]
    yield from find_differences(*(stable(read_checkpoint(out / "best.pth.tar")) for out in runs), "best weights")
    for name in ("finetune.json", "test_results.json", "finetune/results.json", "calibration.json"):
        yield from find_differences(*(stable(json.loads((out / name).read_text())) for out in runs), name)
    for name in ("features.npz", "predictions.npz", "finetune/predictions.npz"):
        arrays = [dict(np.load(out / name)) for out in runs]
        yield from (f"{name}: {key}" for key in arrays[0] if not np.array_equal(*(own[key] for own in arrays)))


def main() -> int:
    """Run both fine-tunings and compare them; return 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="number of kills")
    parser.add_argument("--processes", type=int, default=1, help="processes of the training")
    args, started = parser.parse_args(), time.time()
    print(describe_run(), "\nkill  aimed at  stage hit", sep="\n")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        draw_images(folder / "data")
        torch.save(timm.create_model("test_efficientnet").state_dict(), folder / "backbone.pth")
        seconds, num_steps = measure(Start(folder, args.processes))
        (folder / "run").rename(folder / "uninterrupted")
        hits = kill_many(folder, args, seconds, num_steps)
        different = list(list_differences(folder / "uninterrupted", folder / "run"))
    missed = [stage for stage in STAGES if not hits[stage] and args.kills >= len(STAGES)]
    print(*different[:20], *(f"no kill hit the stage {stage}" for stage in missed), sep="\n")
    print(f"{'NOT EQUAL' if different else 'equal'}; {time.time() - started:.0f} s in total")
    return bool(different or missed)


if __name__ == "__main__":
    sys.exit(main())
