"""Bitwise comparison of the outputs of two runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench_support.training_process import read_records

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.checkpoint.weights_files import best_path

# Fields of a record that depend on time, or name the start of a run.
TIMES = ("time", "images_per_s", "wait", "eta_s", "seconds", "resumed")
# Entries of a checkpoint that depend on time, on OUT_DIR (the options), on the launcher or on the interruptions.
NOT_COMPARED = ("seconds", "timing", "peak_memory_mib", "config", "checkpoints", "jobs")


def compare_runs(one: Path, other: Path) -> tuple[list[str], int]:
    """Return the differences of two OUT_DIRs (checkpoints, best weights, metrics) and the number of tensors."""
    first, second = files_of(one), files_of(other)
    different = [f"{name} exists in one run only" for name in sorted(set(first) ^ set(second))]
    num_tensors = 0
    for name in sorted(set(first) & set(second)):
        contents = read_weights(first[name]), read_weights(second[name])
        num_tensors += count_tensors(contents[0])
        different += find_differences(*contents, name)
    different += find_differences(timeless_records(one), timeless_records(other), "metrics.jsonl")
    return different, num_tensors


def files_of(out_dir: Path) -> dict[str, Path]:
    """Return the paths of the checkpoints and the best weights by file name."""
    checkpoints = CheckpointManager(out_dir)
    return {path.name: path for path in [*checkpoints.list(), best_path(checkpoints.folder.parent)] if path.exists()}


def read_weights(path: Path) -> dict:
    """Return the content of a checkpoint without the entries `NOT_COMPARED`."""
    return {key: value for key, value in read_checkpoint(path).items() if key not in NOT_COMPARED}


def check_best(out_dir: Path) -> None:
    """Check that the best weights are at least as new as the newest checkpoint says; valid at any moment of a run.

    Raises:
        RuntimeError: they are missing or older.
    """
    checkpoints = CheckpointManager(out_dir)
    if not checkpoints.list():
        return
    newest = read_checkpoint(checkpoints.list()[-1])
    best = best_path(checkpoints.folder.parent)
    epoch = read_checkpoint(best)["epoch"] if best.exists() else -1
    if epoch < newest["best_epoch"]:
        raise RuntimeError(f"{best}: of epoch {epoch + 1}, but the best is {newest['best_epoch'] + 1}")


def timeless_records(out_dir: Path) -> list[dict]:
    """Return the records of metrics.jsonl without the fields that depend on time."""
    return [{key: record[key] for key in record if key not in TIMES} for record in read_records(out_dir)]


def find_differences(one: Any, other: Any, where: str) -> Iterator[str]:
    """Yield the differences of two nested values; tensors must be bitwise equal."""
    if type(one) is not type(other):
        yield f"{where}: {type(one).__name__} and {type(other).__name__}"
    elif isinstance(one, dict):
        if list(one) != list(other):
            yield f"{where}: different keys"
        for key in one.keys() & other.keys():
            yield from find_differences(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield f"{where}: {len(one)} and {len(other)} items"
        for number, pair in enumerate(zip(one, other, strict=False)):
            yield from find_differences(*pair, f"{where}/{number}")
    elif isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            yield f"{where}: different tensors"
    elif one != other:
        yield f"{where}: {one!r} and {other!r}"


def count_tensors(content: Any) -> int:
    """Return the number of tensors in a nested value."""
    if isinstance(content, (dict, list, tuple)):
        return sum(count_tensors(item) for item in (content.values() if isinstance(content, dict) else content))
    return int(isinstance(content, torch.Tensor))
