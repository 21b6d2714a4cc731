"""Fuzzer of the checkpoint reader, of OUT_DIR and of CFG_DEST.

Random damage is done to checkpoints, safetensors and files of distribuuuu 2021.

A damaged file must have the same content as before or be refused with CheckpointError. Files without checksums
(safetensors, torch's format from before 1.6) may come back with other values, but must never raise anything else.

Random values of OUT_DIR and CFG_DEST must be refused with their key, or name a local folder and a file in it that is no
other file of the run, on a file system that ignores case either. Nothing is written outside of a temporary folder.

    python benchmarks/fuzz_checkpoints.py --number 5000 --seed 0
"""

import collections
import faulthandler
import os
import random
import resource
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_support.mutations import count_verdicts, damage, parse_fuzz_args, print_verdicts
from bench_support.same_runs import find_differences
from torch import nn

from distribuuuu.checkpoint.io import CheckpointError, read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.checkpoint.restore import load_state_dict
from distribuuuu.config import load_cfg
from distribuuuu.config.reader import read_cfg
from distribuuuu.config.run_files import COMMAND_FILES, RUN_FILES
from distribuuuu.engine.build import write_config
from distribuuuu.engine.preflight import find_run_problems
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


# Parts of names: files of a run, devices of Windows, schemes, and characters with a meaning for some file system.
NAME_PARTS = (
    *RUN_FILES, *COMMAND_FILES, "best_ema.pth.tar", "checkpoints.1", "ckpt_ep_001.pth.tar", "config.yaml", "con", "NUL",
    "com1", "~", "~root", "s3:", "gs:", "hf:", "file:", "http:", "host:", "C:", "..", ".", "/", "//", "\\", " ", "",
    "a", "run 1", "a" * 300, "\0", "\n", "\x7f", "\u202e", "\udce4", "\u017f", "\uff43heckpoints", "\u65e5\u672c", "*",
    "?", "-x", ".yaml", ".tmp",
)  # fmt: skip


def draw_name(rng: random.Random) -> str:
    """Return a name of one to four parts, in a random case."""
    name = "".join(rng.choices(NAME_PARTS, k=rng.choice((1, 1, 2, 2, 3, 4))))
    return rng.choice((str, str, str.upper, str.title, str.swapcase))(name)


def judge_names(folder: Path, out_dir: str, name: str) -> str:
    """Return the verdict on values of OUT_DIR and CFG_DEST in an empty current folder."""
    try:
        cfg, problems = read_cfg(None, ["OUT_DIR", out_dir, "CFG_DEST", name, "MODEL.DUMMY_INPUT", "True"])
        problems += find_run_problems(cfg, train=True)
        if problems:
            keys = {problem.key for problem in problems}
            return "refused" if keys <= {"OUT_DIR", "CFG_DEST"} else f"violation: {problems[0]}"
        out = Path(cfg.OUT_DIR)
        if folder.resolve() not in (out.resolve(), *out.resolve().parents):
            return "elsewhere"
        out.mkdir(parents=True, exist_ok=True)
        for own in RUN_FILES:
            (out / own).write_text(own)
        write_config(cfg)
    except BaseException:
        return f"violation: {traceback.format_exc()}"
    entries = os.listdir(out)
    is_apart = len({entry.casefold().rstrip(" .") for entry in entries}) == len(RUN_FILES) + 1 == len(entries)
    is_whole = all((out / own).read_text() == own for own in RUN_FILES) and load_cfg(str(out / name)) == cfg
    is_local = "://" not in out_dir
    return "equal" if is_local and is_apart and is_whole else f"violation: {cfg.OUT_DIR!r} has {entries}"


def run_name_trials(number: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Judge random names; yield the option, the kind of the case and the verdict of each trial."""
    rng = random.Random(seed)
    for _ in range(number):
        option = rng.choice(("OUT_DIR", "CFG_DEST"))
        value = draw_name(rng)
        values = (value, "config.yaml") if option == "OUT_DIR" else ("out", value)
        with tempfile.TemporaryDirectory() as folder:
            before = os.getcwd()
            os.chdir(folder)
            try:
                verdict = judge_names(Path(folder), *values)
            finally:
                os.chdir(before)
        yield option, repr(value), verdict


def fuzz_names(number: int, seed: int) -> tuple[dict[str, collections.Counter], list[str]]:
    """Try `number` values of OUT_DIR and CFG_DEST; return the counts of verdicts by option, and the violations."""
    return count_verdicts(run_name_trials(number, seed))


def fuzz(folder: Path, number: int, seed: int) -> tuple[dict[str, collections.Counter], list[str]]:
    """Damage files `number` times; return the counts of verdicts by file, and the violations."""
    return count_verdicts(run_trials(folder, number, seed))


def main() -> int:
    """Run the fuzzer, print a summary, and return the status."""
    args = parse_fuzz_args(__doc__)
    faulthandler.enable()
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        counts, violations = fuzz(Path(folder), args.number, args.seed)
    name_counts, name_violations = fuzz_names(args.number, args.seed)
    counts, violations = {**counts, **name_counts}, [*violations, *name_violations]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print_verdicts(counts, violations)
    print(f"{args.number} mutations and as many names with seed {args.seed} in {time.perf_counter() - start:.0f} s, "
          f"memory grew by {grown:.0f} MiB: {len(violations)} violations")  # fmt: skip
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
