"""Comparison of two runs on the same images, or of two groups of runs with several seeds, as values for JSON."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.commands.stats.stored_predictions import Predictions, read_predictions
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted, first_few
from distribuuuu.config.run_files import PREDICTIONS
from distribuuuu.inference.calibration import binomial_tail

# Splits of the values of two groups of which `permutation_test` computes the means.
_MAX_SPLITS = 3_000_000
# A difference is called significant if its p-value is below this.
ALPHA = 0.05


def compare_runs(sides: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """Return the comparison of two sides, each of one run or of several seeds; `sentence` is the result in words.

    `difference` is B - A in points of top-1. Single runs have the p-value of McNemar's exact test (Psychometrika 1947)
    and the images that only one got right, sides of several runs that of a permutation test of their means.

    Raises:
        ConfigError: a run cannot be read, or the first runs of the sides have other classes, images or labels.
    """
    runs = {name: [read_predictions(folder / PREDICTIONS, f"distribuuuu test {folder}") for folder in folders]
            for name, folders in sides.items()}  # fmt: skip
    if others := [name for name, members in runs.items() if members[0].multilabel]:
        raise ConfigError(f"RUN: {others[0]} does not predict one class per image; fix: compare the metrics by `table`")
    a, b = runs
    order = _match_images(runs[a][0], runs[b][0], f"{a} and {b}")
    values = [[100 * float(run.correct.mean()) for run in runs[name]] for name in (a, b)]
    found: dict[str, Any] = {"a": a, "b": b, "values": values}
    found["difference"] = statistics.fmean(values[1]) - statistics.fmean(values[0])
    if len(values[0]) == len(values[1]) == 1:
        right, other = runs[a][0].correct, runs[b][0].correct[order]
        names = runs[a][0].path
        found |= {"images_only_a": names[right & ~other].tolist(), "images_only_b": names[other & ~right].tolist()}
        counts = len(found["images_only_a"]), len(found["images_only_b"])
        found["p"] = min(1.0, 2 * binomial_tail(min(counts), sum(counts), 0.5))
    else:
        found["p"] = permutation_test(*values)
    return {**found, "significant": found["p"] < ALPHA, "sentence": _describe(found)}


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


def _describe(found: Mapping[str, Any]) -> str:
    """Return the result of a comparison as a sentence."""
    p, sizes = found["p"], [len(values) for values in found["values"]]
    better, worse = (found["b"], found["a"]) if found["difference"] >= 0 else (found["a"], found["b"])
    basis = "" if sizes == [1, 1] else f"on average, {' and '.join(counted(size, 'run') for size in sizes)}, "
    gap = f"{abs(found['difference']):.2f} points of top-1 ({basis}p = {p:{'.1g' if p < 0.001 else '.3f'}})."
    if p < ALPHA:
        return f"{better} is better than {worse} by {gap}"
    # The p-value of groups that do not overlap; exchanging groups of equal sizes gives the same difference.
    least = 0.0 if sizes == [1, 1] else (1 + (sizes[0] == sizes[1])) / math.comb(sum(sizes), sizes[0])
    few = f"Too few runs to tell them apart, p is never below {least:.2f}. " if least >= ALPHA else ""
    return f"{few}No significant difference between {found['a']} and {found['b']}: {better} - {worse} = {gap}"


def permutation_test(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the two-sided p-value of the difference of the means of two groups of runs, e.g. of several seeds.

    It is the share of the splits of all values into groups of these sizes with a difference at least as large.
    """
    values = np.array([*a, *b], dtype=np.float64)
    if math.comb(len(values), len(a)) > _MAX_SPLITS:
        raise ConfigError(f"RUN: got {len(a)} and {len(b)} runs; expected at most 12 on each side")
    chosen = np.array(list(itertools.combinations(range(len(values)), len(a))))
    sums = values[chosen].sum(axis=1)
    differences = np.abs((values.sum() - sums) / len(b) - sums / len(a))
    # The first split is the observed one; sums in another order may differ by rounding.
    return float((differences >= differences[0] - 1e-9 * max(1.0, np.abs(values).max())).mean())
