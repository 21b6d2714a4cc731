"""Comparison of runs on the same images, or of groups of runs with several seeds."""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from distribuuuu.commands.html.history import MAX_TEXT
from distribuuuu.commands.report.run_report import RunFiles, read_run
from distribuuuu.commands.stats.significance import (
    Interval,
    holm_adjusted,
    mcnemar_p,
    paired_interval,
    permutation_test,
    smallest_permutation_p,
)
from distribuuuu.commands.stats.stored_predictions import Predictions
from distribuuuu.config import ConfigError, yaml_file
from distribuuuu.config.errors import counted, first_few
from distribuuuu.config.options import OPTIONS
from distribuuuu.files.untrusted import read_regular
from distribuuuu.records.results import replace_nonfinite

# A difference is called significant if its p-value is below this.
ALPHA = 0.05


@dataclass
class Pair:
    """Two runs on the same images.

    Attributes:
        a, b: the names of the runs.
        values: the accuracy of both, in percent.
        difference: B - A in points.
        interval: its 95 % interval.
        p: McNemar's exact p-value.
        adjusted_p: `p` adjusted for the number of pairs.
        only_a, only_b: the paths of the images that only A and only B got right, the most confident mistakes first.
    """

    a: str
    b: str
    values: tuple[float, float]
    difference: float
    interval: Interval
    p: float
    only_a: list[str]
    only_b: list[str]
    adjusted_p: float = math.nan

    def list_figures(self) -> dict[str, Any]:
        """Return the figures as plain values, for JSON."""
        counts = {"only_a": len(self.only_a), "only_b": len(self.only_b)}
        images = {"images_only_a": self.only_a, "images_only_b": self.only_b}
        verdict = {"significant": self.adjusted_p < ALPHA, "sentence": self.describe()}
        return {**asdict(self), **counts, **images, **verdict}

    def describe(self) -> str:
        """Return the result as a sentence."""
        low, high = self.interval if self.difference >= 0 else (-self.interval.high, -self.interval.low)
        return _describe(self.a, self.b, self.difference, self.adjusted_p, f"95 % interval {low:.2f} to {high:.2f}")


def _describe(a: str, b: str, difference: float, p: float, basis: str) -> str:
    """Return the result of a comparison as a sentence; `difference` is B - A, `basis` the origin of the p-value."""
    better, worse = (b, a) if difference >= 0 else (a, b)
    gap = f"{abs(difference):.2f} points of top-1 ({basis}, p = {p:{'.1g' if p < 0.001 else '.3f'}})."
    if p < ALPHA:
        return f"{better} is better than {worse} by {gap}"
    return f"No significant difference between {a} and {b}: {better} - {worse} = {gap}"


def match_images(first: Predictions, other: Predictions, names: tuple[str, str]) -> np.ndarray:
    """Return the index in `other` of each image of `first`.

    Args:
        first, other: the predictions of two runs.
        names: the names of the runs, for messages.

    Raises:
        ConfigError: the runs have other classes, images or labels; the message names the difference.
    """
    where = f"{names[0]} and {names[1]}"
    if first.classes != other.classes:
        difference = _describe_sets(first.classes, other.classes, names) or "the same ones in another order"
        raise ConfigError(f"{where}: have other classes: {difference}")
    own, others = first.path.tolist(), other.path.tolist()
    if sorted(own) != sorted(others):
        numbers = f"{counted(len(first), 'image')} and {counted(len(other), 'image')}"
        difference = _describe_sets(own, others, names)
        raise ConfigError(f"{where}: were evaluated on other images, {numbers}: {difference}")
    places = {path: place for place, path in enumerate(others)}
    order = np.arange(len(own)) if own == others else np.array([places[path] for path in own])
    labels = other.label[order]
    if first.label.shape != labels.shape or not np.array_equal(first.label, labels):
        raise ConfigError(f"{where}: have other labels for the same images")
    return order


def _describe_sets(first: Sequence[str], other: Sequence[str], names: tuple[str, str]) -> str:
    """Return which names only one of two runs has; empty if both have the same names."""
    own, others = set(first), set(other)
    parts = ((names[0], own - others), (names[1], others - own))
    return "; ".join(f"only {name} has {first_few(sorted(missing), num=3)}" for name, missing in parts if missing)


def compare_pair(a: Predictions, b: Predictions, names: tuple[str, str]) -> Pair:
    """Return the comparison of two runs; errors as in `match_images`."""
    order = match_images(a, b, names)
    right_a, right_b = a.correct, b.correct[order]
    only_a, only_b = np.flatnonzero(right_a & ~right_b), np.flatnonzero(right_b & ~right_a)
    only_a = only_a[np.argsort(-b.confidence[order[only_a]], kind="stable")]
    only_b = only_b[np.argsort(-a.confidence[only_b], kind="stable")]
    values = 100 * float(right_a.mean()), 100 * float(right_b.mean())
    low, high = paired_interval(len(only_a), len(only_b), len(a))
    return Pair(
        *names,
        values=values,
        difference=values[1] - values[0],
        interval=Interval(100 * low, 100 * high),
        p=mcnemar_p(len(only_a), len(only_b)),
        only_a=a.path[only_a].tolist(),
        only_b=a.path[only_b].tolist(),
    )


def compare_all(runs: Mapping[str, Predictions]) -> list[Pair]:
    """Return the comparison of every two runs, with p-values adjusted for the number of pairs."""
    pairs = [compare_pair(runs[a], runs[b], (a, b)) for a, b in itertools.combinations(runs, 2)]
    for pair, adjusted in zip(pairs, holm_adjusted([pair.p for pair in pairs]), strict=True):
        pair.adjusted_p = adjusted
    return pairs


def compare_groups(values: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return the comparison of every two groups of runs by a permutation test of their means, as values for JSON.

    Args:
        values: the accuracy of each run in percent, by the name of the group.
    """
    groups = []
    for a, b in itertools.combinations(values, 2):
        p, sizes = permutation_test(values[a], values[b]), (len(values[a]), len(values[b]))
        smallest = smallest_permutation_p(*sizes)
        basis = " and ".join(counted(size, "run") for size in sizes)
        difference = statistics.fmean(values[b]) - statistics.fmean(values[a])
        sentence = _describe(a, b, difference, p, f"on average, {basis}")
        if smallest >= ALPHA:
            sentence = f"Too few runs to tell {a} and {b} apart, p is never below {smallest:.2f}. {sentence}"
        groups.append({"a": a, "b": b, "values": [values[a], values[b]], "p": p, "smallest_p": smallest,
                       "sentence": sentence})  # fmt: skip
    return groups


def list_changes(runs: Mapping[str, RunFiles]) -> dict[str, list[Any]] | None:
    """Return the options that differ: option -> its value in each run; None if a config.yaml cannot be read.

    Options that are missing in the config of an older version have their defaults.
    """
    try:
        contents = [yaml_file.load(read_regular(run.out_dir / "config.yaml", MAX_TEXT).decode("utf-8"))
                    for run in runs.values()]  # fmt: skip
        configs = [dict(_flatten(content)) for content in contents]
    except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError):
        return None
    given = {key: option.default for key, option in OPTIONS.items()}
    defaults = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}  # as in YAML
    keys = dict.fromkeys(key for config in configs for key in config if key not in OPTIONS or OPTIONS[key].compared)
    rows = {key: [config.get(key, defaults.get(key)) for config in configs] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def _flatten(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass
class Comparison:
    """The result of a comparison.

    Attributes:
        sides: the runs of each side, by its name.
        pairs: the comparison of the first run of every two sides on the same images.
        groups: the comparison of every two sides by their runs, see `compare_groups`; empty if each has one run.
        changes: options that differ between the sides; None: a config cannot be read.
    """

    sides: dict[str, list[RunFiles]]
    pairs: list[Pair]
    groups: list[dict[str, Any]]
    changes: dict[str, list[Any]] | None

    def lines(self) -> list[str]:
        """Return the results in words: of the groups, if there are any, else of the pairs; and the changed options."""
        found = [group["sentence"] for group in self.groups] or [pair.describe() for pair in self.pairs]
        if self.changes is None:
            return [*found, "A run has no readable config.yaml, so the configs are not compared."]
        return [*found, *(f"{key}: {', '.join(map(str, values))}" for key, values in self.changes.items())]

    def list_figures(self) -> dict[str, Any]:
        """Return the figures as plain values, for JSON."""
        runs = {name: [str(run.out_dir) for run in members] for name, members in self.sides.items()}
        pairs = [pair.list_figures() for pair in self.pairs]
        return replace_nonfinite({"runs": runs, "pairs": pairs, "groups": self.groups, "config": self.changes})


def compare_runs(sides: Mapping[str, Sequence[Path]]) -> Comparison:
    """Return the comparison of two or more sides, each of one run or of several seeds.

    Raises:
        ConfigError: a run cannot be read, or the runs were evaluated on different images.
    """
    runs = {name: [read_run(str(folder)) for folder in folders] for name, folders in sides.items()}
    firsts = {name: members[0] for name, members in runs.items()}
    contents = {name: run.content for name, run in firsts.items()}
    if others := [name for name, content in contents.items() if content.multilabel or not content.classifies]:
        raise ConfigError(f"RUN: {others[0]} does not predict one class per image; fix: compare the metrics by `table`")
    pairs, has_seeds = compare_all(contents), any(len(members) > 1 for members in runs.values())
    values = {name: [100 * float(run.content.correct.mean()) for run in members] for name, members in runs.items()}
    groups = compare_groups(values) if has_seeds else []
    return Comparison(runs, pairs, groups, list_changes(firsts))
