"""Comparison of two runs on the same images, as values for JSON."""

from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.commands.stats.stored_predictions import Predictions, read_predictions
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import first_few
from distribuuuu.config.run_files import PREDICTIONS
from distribuuuu.inference.calibration import binomial_tail

# A difference is called significant if its p-value is below this.
ALPHA = 0.05


def compare_runs(a: Path, b: Path) -> dict[str, Any]:
    """Return the comparison of two runs; `sentence` is the result in words.

    `difference` is B - A in points of top-1, `p` the p-value of McNemar's exact test (Psychometrika 1947), which uses
    the images that only one of them got right.

    Raises:
        ConfigError: a run cannot be read, or they have other classes, images or labels.
    """
    first, other = (read_predictions(run / PREDICTIONS, f"distribuuuu test {run}") for run in (a, b))
    if multilabel := [run for run, content in ((a, first), (b, other)) if content.multilabel]:
        raise ConfigError(f"RUN: {multilabel[0]} does not predict one class per image; fix: compare by `table`")
    right_a, right_b = first.correct, other.correct[_match_images(first, other, f"{a} and {b}")]
    only_a, only_b = (first.path[one & ~two].tolist() for one, two in ((right_a, right_b), (right_b, right_a)))
    counts, difference = (len(only_a), len(only_b)), 100 * float(right_b.mean() - right_a.mean())
    p = min(1.0, 2 * binomial_tail(min(counts), sum(counts), 0.5))
    better, worse = (b, a) if difference >= 0 else (a, b)
    gap = f"{abs(difference):.2f} points of top-1 (p = {p:{'.1g' if p < 0.001 else '.3f'}})."
    sentence = f"{better} is better than {worse} by {gap}"
    if p >= ALPHA:
        sentence = f"No significant difference between {a} and {b}: {better} - {worse} = {gap}"
    return {"a": str(a), "b": str(b), "top1": [100 * float(right.mean()) for right in (right_a, right_b)],
            "difference": difference, "p": p, "significant": p < ALPHA, "images_only_a": only_a,
            "images_only_b": only_b, "sentence": sentence}  # fmt: skip


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
