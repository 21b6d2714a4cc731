"""Comparison of runs on the same images: changed answers, significance, differences of config."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
        order: the index in B of each image of A.
        values: the accuracy of both, in percent.
        interval: 95 % interval of the difference, B - A, in points.
        only_a, only_b: indices in A of the images that only A, or only B, got right.
        p: McNemar's exact p-value.
        adjusted_p: `p` adjusted for the number of pairs.
        by_class: for each class, its images, and how many of them only A and only B got right, int64 (3, classes).
    """

    order: np.ndarray = field(repr=False)
    values: tuple[float, float]
    interval: Interval
    only_a: np.ndarray = field(repr=False)
    only_b: np.ndarray = field(repr=False)
    p: float
    by_class: np.ndarray = field(repr=False)
    adjusted_p: float = math.nan

    @property
    def difference(self) -> float:
        """B - A in points."""
        return self.values[1] - self.values[0]

    @property
    def is_significant(self) -> bool:
        """Whether the adjusted p-value is below `ALPHA`."""
        return self.adjusted_p < ALPHA


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


# ------------------------------------------------------------------------------------- two runs


def compare_pair(a: Predictions, b: Predictions, names: tuple[str, str]) -> Pair:
    """Return the comparison of two runs; errors as in `match_images`."""
    order = match_images(a, b, names)
    right_a, right_b, num_classes = a.correct, b.correct[order], len(a.classes)
    only_a, only_b = np.flatnonzero(right_a & ~right_b), np.flatnonzero(right_b & ~right_a)
    counts = [np.bincount(labels, minlength=num_classes) for labels in (a.label, a.label[only_a], a.label[only_b])]
    interval = paired_interval(len(only_a), len(only_b), len(a))
    return Pair(
        order=order,
        values=(100 * float(right_a.mean()), 100 * float(right_b.mean())),
        interval=Interval(100 * interval.low, 100 * interval.high),
        only_a=only_a,
        only_b=only_b,
        p=mcnemar_p(len(only_a), len(only_b)),
        by_class=np.stack(counts),
    )


def compare_all(runs: Mapping[str, Predictions]) -> dict[tuple[str, str], Pair]:
    """Return the comparison of every two runs, with p-values adjusted for the number of pairs."""
    pairs = {(a, b): compare_pair(runs[a], runs[b], (a, b)) for a, b in itertools.combinations(runs, 2)}
    for pair, adjusted in zip(pairs.values(), holm_adjusted([pair.p for pair in pairs.values()]), strict=True):
        pair.adjusted_p = adjusted
    return pairs


def describe_pair(names: tuple[str, str], pair: Pair) -> str:
    """Return the result of a comparison as a sentence."""
    better, worse = names if pair.difference < 0 else names[::-1]
    low, high = (-pair.interval.high, -pair.interval.low) if pair.difference < 0 else pair.interval
    p = f"p = {format_p(pair.adjusted_p)}"
    if pair.is_significant:
        points = f"{abs(pair.difference):.2f} points of top-1 (95 % interval {low:.2f} to {high:.2f}, {p})"
        return f"{better} is better than {worse} by {points}."
    interval = f"95 % interval {pair.interval.low:+.2f} to {pair.interval.high:+.2f}"
    gap = f"{names[1]} - {names[0]} = {pair.difference:+.2f} points of top-1"
    return f"No significant difference between {names[0]} and {names[1]}: {gap} ({interval}, {p})."


def format_p(p: float) -> str:
    """Return a p-value as text, e.g. '0.031' or '3e-12'."""
    return f"{p:.1g}" if p < 0.001 else f"{p:.3f}"


# -------------------------------------------------------------------------------- several seeds


def compare_groups(values: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return the comparison of every two groups of runs by a permutation test of their means, as values for JSON.

    Args:
        values: the accuracy of each run in percent, by the name of the group.
    """
    groups = []
    for a, b in itertools.combinations(values, 2):
        p = permutation_test(values[a], values[b])
        smallest = smallest_permutation_p(len(values[a]), len(values[b]))
        group = {"a": a, "b": b, "values": [list(values[a]), list(values[b])], "p": p, "smallest_p": smallest}
        groups.append({**group, "sentence": _describe_group(group)})
    return groups


def _describe_group(group: Mapping[str, Any]) -> str:
    a, b, p, least, (first, second) = (group[key] for key in ("a", "b", "p", "smallest_p", "values"))
    sizes = f"{counted(len(first), 'run')} and {counted(len(second), 'run')}"
    difference = statistics.fmean(second) - statistics.fmean(first)
    gap = f"{difference:+.2f} points of top-1 on average"
    if least >= ALPHA:
        reason = f"with {sizes}, no difference could be significant (the smallest possible p is {least:.2f})"
        return f"Too few runs to tell {a} and {b} apart: {gap}, but {reason}."
    if p >= ALPHA:
        return f"No significant difference between {a} and {b}: {gap}, p = {format_p(p)} ({sizes})."
    better, worse = (b, a) if difference > 0 else (a, b)
    points = f"{abs(difference):.2f} points of top-1 on average"
    return f"{better} is better than {worse} by {points}, p = {format_p(p)} ({sizes})."
