#!/usr/bin/env python3
"""Check that an interrupted `finetune` is bitwise equal to an uninterrupted one.

A small backbone is fine-tuned on a few JPEGs without interruption, then again with SIGKILL to all of its processes at
random moments of each stage. In the end, all weights, features, decisions, records and predictions must be equal.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from bench_support.machine import describe_run
from bench_support.same_runs import compare_runs, find_differences
from bench_support.small_training import draw_images
from bench_support.training_process import TrainingProcess

from distribuuuu.checkpoint.io import read_checkpoint

OPTIONS = "MODEL.ARCH timm/test_efficientnet TRAIN.IM_SIZE 32 TEST.IM_SIZE 36 TEST.BATCH_SIZE 8 OPTIM.MAX_EPOCH 4 "
OPTIONS += "TRAIN.AMP none MODEL.CHANNELS_LAST False CHECKPOINT.EVERY_STEPS 1"
STAGES = ("images", "views", "probe", "plan", "training", "choice", "test")
MEASURED = ("seconds", "image_s", "images_per_s", "speedup", "hours", "mib")


def start(folder: Path, processes: int) -> TrainingProcess:
    """Start or resume the command in folder/run."""
    words = [str(folder / "data"), "--backbone", str(folder / "backbone.pth"), "--out", str(folder / "run")]
    words += ["--workers", "0", "--minutes", "30", "--nproc", str(processes), *OPTIONS.split()]
    return TrainingProcess([sys.executable, "-m", "distribuuuu", "finetune", *words], folder / "run")


def find_stage(out: Path) -> int:
    """Return the number of the stage of a fine-tuning, by its files; that of the end is the number of stages."""
    path = out / "finetune.json"
    done = len(json.loads(path.read_text())) - 1 if path.exists() else 0  # the first entry is the job
    return done + (done > STAGES.index("plan") and (out / "finetune" / "results.json").exists())


def measure_stages(run: TrainingProcess) -> list[float]:
    """Return the seconds of each stage of an uninterrupted run."""
    moments = [time.time()]
    for stage in range(1, len(STAGES) + 1):
        run.wait_for(lambda stage=stage: find_stage(run.out_dir) >= stage)
        moments.append(time.time())
    run.finish()
    return [end - begin for begin, end in itertools.pairwise(moments)]


def kill_many(folder: Path, args: argparse.Namespace, seconds: list[float]) -> None:
    """Start and kill the command in each stage, then let it finish."""
    rng = random.Random(1)
    for number, target in enumerate(sorted(index % len(STAGES) for index in range(args.kills)), 1):
        run = start(folder, args.processes)
        try:
            run.wait_for(lambda target=target, out=run.out_dir: find_stage(out) >= target)
            time.sleep(rng.uniform(0, seconds[target]))
        finally:
            run.kill()
        print(f"{number:>4}  {STAGES[target]:<8}  {(*STAGES, 'end')[find_stage(run.out_dir)]}", flush=True)
    start(folder, args.processes).finish()


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
        seconds = measure_stages(start(folder, args.processes))
        (folder / "run").rename(folder / "uninterrupted")
        kill_many(folder, args, seconds)
        different = list(list_differences(folder / "uninterrupted", folder / "run"))
    print(*different[:20], f"{'NOT EQUAL' if different else 'equal'}; {time.time() - started:.0f} s in total", sep="\n")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
