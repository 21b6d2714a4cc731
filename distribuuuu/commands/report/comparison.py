"""Comparison of runs on the same images, or of groups of runs with several seeds."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.commands.report.run_report import read_run
from distribuuuu.commands.stats.significance import (
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
    folders = {name: [str(run.out_dir) for run in members] for name, members in runs.items()}
    sentences = [found["sentence"] for found in groups or pairs]
    return {"runs": folders, "pairs": pairs, "groups": groups, "sentences": sentences}


def compare_all(runs: Mapping[str, Predictions]) -> list[dict[str, Any]]:
    """Return the comparison of every two runs, with p-values adjusted for the number of pairs.

    `values` are accuracies in percent, `difference` is B - A with its 95 % `interval`, and `images_only_a` are those
    that only A got right, the most confident mistakes of B first.

    Raises:
        ConfigError: the runs have other classes, images or labels; the message names the difference.
    """
    pairs = [_compare_pair(a, b, runs[a], runs[b]) for a, b in itertools.combinations(runs, 2)]
    for pair, adjusted in zip(pairs, holm_adjusted([pair["p"] for pair in pairs]), strict=True):
        low, high = pair["interval"] if pair["difference"] >= 0 else [-end for end in reversed(pair["interval"])]
        basis = f"95 % interval {low:.2f} to {high:.2f}"
        sentence = _describe(pair["a"], pair["b"], pair["difference"], adjusted, basis)
        pair |= {"adjusted_p": adjusted, "significant": adjusted < ALPHA, "sentence": sentence}
    return pairs


def _compare_pair(name_a: str, name_b: str, a: Predictions, b: Predictions) -> dict[str, Any]:
    order = _match_images(a, b, (name_a, name_b))
    right_a, right_b = a.correct, b.correct[order]
    only_a, only_b = np.flatnonzero(right_a & ~right_b), np.flatnonzero(right_b & ~right_a)
    only_a = only_a[np.argsort(-b.confidence[order[only_a]], kind="stable")]
    only_b = only_b[np.argsort(-a.confidence[only_b], kind="stable")]
    counts, values = (len(only_a), len(only_b)), [100 * float(right.mean()) for right in (right_a, right_b)]
    return {
        "a": name_a, "b": name_b, "values": values, "difference": values[1] - values[0],
        "interval": [100 * end for end in paired_interval(*counts, len(a))], "p": mcnemar_p(*counts),
        "only_a": counts[0], "only_b": counts[1],
        "images_only_a": a.path[only_a].tolist(), "images_only_b": a.path[only_b].tolist(),
    }  # fmt: skip


def _match_images(first: Predictions, other: Predictions, names: tuple[str, str]) -> np.ndarray:
    """Return the index in `other` of each image of `first`."""
    own, others = first.path.tolist(), other.path.tolist()
    for what, one, two in (("classes", first.classes, other.classes), ("images", sorted(own), sorted(others))):
        if one != two:
            parts = ((names[0], {*one} - {*two}), (names[1], {*two} - {*one}))
            only = "; ".join(
                f"only {name} has {first_few(sorted(missing), num=3)}" for name, missing in parts if missing
            )
            numbers = f"{len(one):,} and {len(two):,}: {only or 'the same ones in another order'}"
            raise ConfigError(f"{names[0]} and {names[1]}: were evaluated on other {what}, {numbers}")
    places = {path: place for place, path in enumerate(others)}
    order = np.array([places[path] for path in own])
    if not np.array_equal(first.label, other.label[order]):
        raise ConfigError(f"{names[0]} and {names[1]}: have other labels for the same images")
    return order


def _describe(a: str, b: str, difference: float, p: float, basis: str) -> str:
    """Return the result of a comparison as a sentence; `difference` is B - A, `basis` the origin of the p-value."""
    better, worse = (b, a) if difference >= 0 else (a, b)
    gap = f"{abs(difference):.2f} points of top-1 ({basis}, p = {p:{'.1g' if p < 0.001 else '.3f'}})."
    if p < ALPHA:
        return f"{better} is better than {worse} by {gap}"
    return f"No significant difference between {a} and {b}: {better} - {worse} = {gap}"


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
