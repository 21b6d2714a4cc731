"""Comparison of runs on the same images, or of groups of runs with several seeds."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.commands.report.run_report import read_run
from distribuuuu.commands.stats.significance import (
    Interval,
    holm_adjusted,
    mcnemar_p,
    paired_interval,
    permutation_test,
    smallest_permutation_p,
)
from distribuuuu.commands.stats.stored_predictions import Predictions
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted, first_few

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


def compare_runs(sides: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """Return the comparison of two or more sides, each of one run or of several seeds, as values for JSON.

    `pairs` compare the first runs of every two sides on the same images, `groups` every two sides by all their runs;
    they are empty if each side has one. `sentences` are the results in words: of the groups or else of the pairs.

    Raises:
        ConfigError: a run cannot be read, or the runs were evaluated on different images.
    """
    runs = {name: [read_run(str(folder)) for folder in folders] for name, folders in sides.items()}
    contents = {name: members[0].content for name, members in runs.items()}
    if others := [name for name, content in contents.items() if content.multilabel or not content.classifies]:
        raise ConfigError(f"RUN: {others[0]} does not predict one class per image; fix: compare the metrics by `table`")
    pairs, has_seeds = compare_all(contents), any(len(members) > 1 for members in runs.values())
    values = {name: [100 * float(run.content.correct.mean()) for run in members] for name, members in runs.items()}
    groups = compare_groups(values) if has_seeds else []
    return {
        "runs": {name: [str(run.out_dir) for run in members] for name, members in runs.items()},
        "pairs": [pair.list_figures() for pair in pairs],
        "groups": groups,
        "sentences": [group["sentence"] for group in groups] or [pair.describe() for pair in pairs],
    }
