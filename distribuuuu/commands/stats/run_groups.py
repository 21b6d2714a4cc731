"""Runs by the rows of a result table: reading their results.json, grouping the seeds of a config."""

import contextlib
import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean, first_few
from distribuuuu.config.run_files import RESULTS
from distribuuuu.records.read_results import read_results

# Digits of the hash of a config that are shown.
DIGITS_OF_HASH = 8


@dataclass(frozen=True)
class Result:
    """A training run: its results.json and the content of that file."""

    path: Path
    record: dict


@contextlib.contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Append the problems of a ConfigError that the block raises."""
    try:
        yield
    except ConfigError as error:
        problems += map(str, error.problems)


def read_runs(patterns: Sequence[str], problems: list[str]) -> list[Result]:
    """Return the runs in files, folders and globs, each one once; append what cannot be read to `problems`."""
    paths: dict[Path, Path] = {}
    for pattern in patterns:
        with collecting(problems):
            for path in find_files(pattern, (RESULTS, "seed_*.json")):
                paths.setdefault(path.resolve(), path)
    runs = []
    for path in paths.values():
        with collecting(problems):
            runs.append(Result(path, read_results(path)))
    return runs


def find_files(pattern: str, names: Sequence[str]) -> list[Path]:
    """Return the files of a path or glob, and those of some names in matching folders; ConfigError: there are none."""
    path = Path(pattern)
    matches = [path] if path.exists() else [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
    if not matches:
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"{pattern}: no such file or folder{did_you_mean(path.name, siblings)}")
    files = []
    for match in matches:
        files += sorted(file for name in names for file in match.rglob(name)) if match.is_dir() else [match]
    if not files:
        raise ConfigError(f"{pattern}: contains no {' or '.join(names)}")
    return files


def group_runs(runs: Sequence[Result]) -> tuple[list[list[Result]], list[str]]:
    """Group the finished runs that differ in the seed or the fold only; return the groups and messages.

    Runs of a group have the same config hash, global batch, data and numbers of images. A seed counts once a fold.
    """
    groups: dict[tuple, list[Result]] = {}
    notes, unfinished = list[str](), list[str]()
    for run in runs:
        record, training = run.record, run.record["training"]
        if not record["finished"]:
            unfinished.append(f"{run.path} ({training['epochs_done']} of {training['epochs_planned']} epochs)")
            continue
        data = record["data"]
        images = ("folds", sum(_count_images(record))) if is_fold(record) else (data["folder"], *_count_images(record))
        group = groups.setdefault((record["config_hash"], training["global_batch"], data["name"], *images), [])
        own = record["seed"], data["folder"]
        known = (other for other in group if (other.record["seed"], other.record["data"]["folder"]) == own)
        if same_seed := next(known, None):
            notes.append(f"{run.path}: skipped: seed {record['seed']} is already in {same_seed.path}")
        else:
            group.append(run)
    notes += [f"skipped, as they are not finished: {first_few(unfinished)}"] if unfinished else []
    return list(groups.values()), notes


def is_fold(record: dict) -> bool:
    """Tell whether a run was trained on one of the folders that `split --folds` writes."""
    return re.fullmatch(r"fold_\d+", record["data"]["folder"] or "") is not None


def _count_images(record: dict) -> tuple[int, int]:
    return record["data"]["num_train"], record["data"]["num_val"]


def describe_data(record: dict) -> str:
    """Return the data of a run in a few words."""
    data = record["data"]
    return f"{data['folder'] or data['name']}, {' + '.join(map(str, _count_images(record)))} images"


def row_name(record: dict, changes: dict) -> str:
    """Return the config of a run, or its architecture if it has none, followed by the changed options."""
    changed = (f"{key} {value}" for key, value in changes.items())
    return ", ".join([record["config"] or record["model"]["arch"], *changed])
