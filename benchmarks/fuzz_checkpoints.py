"""Fuzzer of the checkpoint reader.

Random damage is done to checkpoints, safetensors and files of distribuuuu 2021.

A damaged file must have the same content as before or be refused with CheckpointError. Files without checksums
(safetensors, torch's format from before 1.6) may come back with other values, but must never raise anything else.

    python benchmarks/fuzz_checkpoints.py --number 5000 --seed 0
"""

import collections
import random
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_support.mutations import count_verdicts, damage, run_fuzzer
from bench_support.same_runs import find_differences
from torch import nn

from distribuuuu.checkpoint.io import CheckpointError, load_state_dict, read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.config import load_cfg
from distribuuuu.engine.resume import restore
from distribuuuu.engine.state import TrainState
from distribuuuu.optim.optimizer import build_optimizer
from distribuuuu.tasks.metrics import Meter

# A task without state.
NO_TASK = types.SimpleNamespace(state_dict=dict, rank_state_dict=dict)


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
    meter = Meter({}, 3, torch.device("cpu"))
    return TrainState(model, optimizer, 1, arch="net", classes=("a", "b", "c"), global_batch=4, meter=meter, epoch=2)


def make_subjects(folder: Path) -> list[Subject]:
    """Write one file of each kind."""
    from safetensors.torch import save_file

    state = make_state()
    (folder / "ours").mkdir()
    checkpoints = CheckpointManager(folder / "ours")
    state.finish_epoch({"raw": {"top1": 1.0}})
    ours = checkpoints.save(state.to_dict())
    checkpoints.finish()
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
            restore(state, NO_TASK, content, subject.path)
        else:
            load_state_dict(state.model, content["state_dict"], subject.path)
    except CheckpointError as error:
        return "refused" if str(subject.path) in str(error) else f"violation: the file is not named: {error}"
    except BaseException:
        return f"violation: {traceback.format_exc()}"
    different = next(find_differences(subject.content, content, subject.path.name), None)
    if different is None:
        return "equal"
    return f"violation: {different}" if subject.is_checksummed else "other values"


def run_trials(folder: Path, number: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Damage and read files; yield the file, the mutation and the verdict of each trial."""
    subjects, state, rng = make_subjects(folder), make_state(), random.Random(seed)
    for _ in range(number):
        subject = rng.choice(subjects)
        mutation = damage(subject.path, subject.data, [other.data for other in subjects if other != subject], rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = judge(subject, state)
        if mutation == "another file" and not verdict.startswith("violation: Traceback"):
            verdict = "another file"  # undamaged, with other content
        yield str(subject.path.relative_to(folder)), mutation, verdict


def fuzz(folder: Path, number: int, seed: int) -> tuple[dict[str, collections.Counter], list[str]]:
    """Damage files `number` times; return the counts of verdicts by file, and the violations."""
    return count_verdicts(run_trials(folder, number, seed))


def main() -> int:
    """Run the fuzzer, print a summary, and return the status."""
    return run_fuzzer(__doc__, fuzz)


if __name__ == "__main__":
    sys.exit(main())
