"""Fuzzer of the checkpoint reader: random damage to checkpoints, safetensors and files of distribuuuu 2021.

A damaged file must have the same content as before or be refused with CheckpointError. Files without checksums
(safetensors, torch's format from before 1.6) may come back with other values, but must never raise anything else.

    python benchmarks/fuzz_checkpoints.py --number 5000 --seed 0
"""

import argparse
import collections
import faulthandler
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mutations import damage
from same_runs import find_differences
from torch import nn

from distribuuuu.checkpoint.io import CheckpointError, read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.config import load_cfg
from distribuuuu.engine.state import TrainState
from distribuuuu.optim.optimizer import build_optimizer


@dataclass
class Subject:
    """A file to be damaged: its bytes, its content, and whether checksums protect the content."""

    path: Path
    data: bytes
    content: dict[str, Any]
    is_checksummed: bool


def make_state() -> TrainState:
    """Return the state of a small model that has made a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3))
    optimizer = build_optimizer(load_cfg(), model)
    model(torch.randn(4, 3, 3, 3)).sum().backward()
    optimizer.step()
    return TrainState(model, optimizer, seed=1, arch="net", classes=("a", "b", "c"), global_batch=4, epoch=2)


def make_subjects(folder: Path) -> list[Subject]:
    """Write one file of each kind."""
    from safetensors.torch import save_file

    state = make_state()
    checkpoints = CheckpointManager(folder / "ours")
    ours = checkpoints.save(state, new_bests=["raw"])
    optimizer = state.optimizer.state_dict()
    for group in optimizer["param_groups"]:
        group["lr"] = np.float64(0.05)  # as the learning-rate schedules of 2021 left it
    old = {"epoch": 4, "state_dict": state.model.state_dict(), "optimizer": optimizer, "best_acc1": 33.5}
    names = ("ckpt_ep_005.pth.tar", "legacy/ckpt_ep_005.pth.tar", "legacy/best.pth.tar", "w.safetensors")
    zipped, legacy, bare, tensors = (folder / name for name in names)
    legacy.parent.mkdir()
    torch.save(old, zipped)
    torch.save(old, legacy, _use_new_zipfile_serialization=False)
    torch.save(old["state_dict"], bare, _use_new_zipfile_serialization=False)
    save_file(old["state_dict"], tensors)
    paths = {ours: True, checkpoints.bests["raw"]: True, zipped: True, legacy: False, bare: False, tensors: False}
    return [Subject(path, path.read_bytes(), read_checkpoint(path), sums) for path, sums in paths.items()]


def judge(subject: Subject, state: TrainState) -> str:
    """Return the verdict on a damaged file: 'refused', 'equal', 'other values', or a violation."""
    try:
        content = read_checkpoint(subject.path)
        if "optimizer" in subject.content:
            state.load_dict(content, subject.path)
        else:
            state.start_from(content, subject.path)
    except CheckpointError as error:
        return "refused" if str(subject.path) in str(error) else f"violation: the file is not named: {error}"
    except BaseException:
        return f"violation: {traceback.format_exc()}"
    different = next(find_differences(subject.content, content, subject.path.name), None)
    if different is None:
        return "equal"
    return f"violation: {different}" if subject.is_checksummed else "other values"


def fuzz(folder: Path, number: int, seed: int) -> tuple[dict[str, collections.Counter], list[str]]:
    """Damage files `number` times; return the counts of verdicts by kind of file, and the violations."""
    subjects, state, chance = make_subjects(folder), make_state(), random.Random(seed)
    counts: dict[str, collections.Counter] = {str(subject.path): collections.Counter() for subject in subjects}
    violations = []
    for index in range(number):
        subject = chance.choice(subjects)
        done = damage(subject.path, subject.data, [other.data for other in subjects if other != subject], chance)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = judge(subject, state)
        if done == "another file" and not verdict.startswith("violation: Traceback"):
            verdict = "another file"  # a valid file with other content
        counts[str(subject.path)][verdict.partition(":")[0]] += 1
        if verdict.startswith("violation"):
            violations.append(f"mutation {index} of {subject.path.name}, {done}: {verdict}")
    return counts, violations


def main() -> int:
    """Run the fuzzer, print a summary, and return the status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=5000, help="mutations")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    faulthandler.enable()
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        counts, violations = fuzz(Path(folder), args.number, args.seed)
        for name, verdicts in counts.items():
            shown = ", ".join(f"{verdict} {count}" for verdict, count in sorted(verdicts.items()))
            print(f"{Path(name).relative_to(folder)}: {shown}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(*violations, sep="\n")
    print(f"{args.number} mutations with seed {args.seed} in {time.perf_counter() - start:.0f} s, memory grew by "
          f"{grown:.0f} MiB: {len(violations)} violations")  # fmt: skip
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
