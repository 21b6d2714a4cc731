"""Comparison of runs on the same images, or of groups of runs with several seeds, as values for JSON."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.commands.stats.intervals import Interval, Z
from distribuuuu.commands.stats.stored_predictions import Predictions, read_predictions
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted, first_few
from distribuuuu.config.run_files import PREDICTIONS
from distribuuuu.inference.calibration import binomial_tail

# Splits of the values of two groups that `permutation_test` enumerates; with more, it draws as many at random.
_MAX_SPLITS = 20_000
# A difference is called significant if its p-value is below this.
ALPHA = 0.05


def compare_runs(sides: Mapping[str, Sequence[Path]]) -> list[dict[str, Any]]:
    """Return the comparison of every two sides, each of one run or of several seeds; `sentence` is the result in words.

    `difference` is B - A in points of top-1. Single runs have its 95 % `interval`, the p-value of McNemar's exact test,
    and the images that only one got right; sides of several runs have that of a permutation test of their means.
    `adjusted_p` is adjusted for the number of comparisons (Holm, Scandinavian Journal of Statistics 1979).

    Raises:
        ConfigError: a run cannot be read, or the first runs of two sides have other classes, images or labels.
    """
    runs = {name: [read_predictions(folder / PREDICTIONS, f"distribuuuu test {folder}") for folder in folders]
            for name, folders in sides.items()}  # fmt: skip
    if others := [name for name, members in runs.items() if members[0].multilabel]:
        raise ConfigError(f"RUN: {others[0]} does not predict one class per image; fix: compare the metrics by `table`")
    pairs, adjusted = [], 0.0
    for a, b in itertools.combinations(runs, 2):
        order = _match_images(runs[a][0], runs[b][0], f"{a} and {b}")
        values = [[100 * float(run.correct.mean()) for run in runs[name]] for name in (a, b)]
        difference = statistics.fmean(values[1]) - statistics.fmean(values[0])
        is_single = len(values[0]) == len(values[1]) == 1
        found = _compare_images(runs[a][0], runs[b][0], order) if is_single else _compare_means(*values)
        pairs.append({"a": a, "b": b, "values": values, "difference": difference, **found})
    for rank, pair in enumerate(sorted(pairs, key=lambda pair: pair["p"])):
        adjusted = min(1.0, max(adjusted, pair["p"] * (len(pairs) - rank)))
        pair |= {"adjusted_p": adjusted, "significant": adjusted < ALPHA}
        pair["sentence"] = _describe(pair)
    return pairs


def _match_images(first: Predictions, other: Predictions, names: str) -> np.ndarray:
    """Return the index in `other` of each image of `first`."""
    own, others = first.path.tolist(), other.path.tolist()
    for what, one, two in (("classes", first.classes, other.classes), ("images", sorted(own), sorted(others))):
        if one != two:
            differing = first_few(sorted({*one} ^ {*two}), num=3) or "the same ones in another order"
            numbers = f"{len(one):,} and {len(two):,}; those of one: {differing}"
            raise ConfigError(f"{names}: were evaluated on other {what}, {numbers}")
    places = {path: place for place, path in enumerate(others)}
    order = np.array([places[path] for path in own])
    if not np.array_equal(first.label, other.label[order]):
        raise ConfigError(f"{names}: have other labels for the same images")
    return order


def _compare_images(a: Predictions, b: Predictions, order: np.ndarray) -> dict[str, Any]:
    """Return the result of McNemar's test: are the changed answers split evenly (Psychometrika 1947; exact form)?"""
    right_a, right_b = a.correct, b.correct[order]
    only = [a.path[one & ~other].tolist() for one, other in ((right_a, right_b), (right_b, right_a))]
    counts = len(only[0]), len(only[1])
    interval = [100 * end for end in paired_interval(*counts, len(a))]
    p = min(1.0, 2 * binomial_tail(min(counts), sum(counts), 0.5))
    return {"interval": interval, "p": p, "images_only_a": only[0], "images_only_b": only[1]}


def _compare_means(a: Sequence[float], b: Sequence[float]) -> dict[str, Any]:
    """Return the result of a permutation test of two groups, and the smallest p-value of groups of these sizes."""
    symmetry = 2 if len(a) == len(b) else 1  # exchanging groups of equal sizes gives the same difference
    return {"p": permutation_test(a, b), "smallest_p": symmetry / math.comb(len(a) + len(b), len(a))}


def _describe(pair: Mapping[str, Any]) -> str:
    """Return the result of a comparison as a sentence."""
    is_positive, p = pair["difference"] >= 0, pair["adjusted_p"]
    better, worse = (pair["b"], pair["a"]) if is_positive else (pair["a"], pair["b"])
    basis = "on average, " + " and ".join(counted(len(values), "run") for values in pair["values"])
    if "interval" in pair:
        low, high = sorted(end if is_positive else -end for end in pair["interval"])
        basis = f"95 % interval {low:.2f} to {high:.2f}"
    gap = f"{abs(pair['difference']):.2f} points of top-1 ({basis}, p = {p:{'.1g' if p < 0.001 else '.3f'}})."
    if pair["significant"]:
        return f"{better} is better than {worse} by {gap}"
    least = pair.get("smallest_p", 0)
    few = f"Too few runs to tell them apart, p is never below {least:.2f}. " if least >= ALPHA else ""
    return f"{few}No significant difference between {pair['a']} and {pair['b']}: {better} - {worse} = {gap}"


def paired_interval(only_a: int, only_b: int, num_images: int) -> Interval:
    """Return the 95 % interval of accuracy B - accuracy A on the same images, from the images that only one got right.

    Bonett and Price, "Adjusted Wald Confidence Interval for a Difference of Binomial Proportions Based on Paired Data",
    Journal of Educational and Behavioral Statistics 2012.
    """
    a, b = ((number + 1) / (num_images + 2) for number in (only_a, only_b))
    half = Z * math.sqrt((a + b - (b - a) ** 2) / (num_images + 2))
    return Interval(max(-1.0, b - a - half), min(1.0, b - a + half))


def permutation_test(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the two-sided p-value of the difference of the means of two groups of runs, e.g. of several seeds.

    It is the share of the splits of all values into groups of these sizes with a difference at least as large: of all
    splits where they are few, otherwise of random ones and the observed one (Phipson and Smyth, 2010).
    """
    values = np.array([*a, *b], dtype=np.float64)
    if math.comb(len(values), len(a)) <= _MAX_SPLITS:
        chosen = np.array(list(itertools.combinations(range(len(values)), len(a))))
    else:
        order = np.random.default_rng(0).random((_MAX_SPLITS, len(values))).argsort(axis=1)
        chosen = np.concatenate([np.arange(len(a))[None], order[:, : len(a)]])
    sums = values[chosen].sum(axis=1)
    differences = np.abs((values.sum() - sums) / len(b) - sums / len(a))
    # The first split is the observed one; sums in another order may differ by rounding.
    return float((differences >= differences[0] - 1e-9 * max(1.0, np.abs(values).max())).mean())
