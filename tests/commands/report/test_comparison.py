"""Comparison of runs on the same images: against scipy, and runs that cannot be compared."""

import numpy as np
import pytest

from distribuuuu.commands.report.comparison import compare_all, compare_pair
from distribuuuu.commands.stats.stored_predictions import Predictions
from distribuuuu.config import ConfigError

NAMES = ("A", "B")


def predictions(right: np.ndarray) -> Predictions:
    """Return predictions that are right for these images of four classes, and the next class for the others."""
    label = np.arange(len(right), dtype=np.int32) % 4
    predicted = np.where(right, label, (label + 1) % 4)
    scores = np.eye(4, dtype=np.float32)[predicted]
    paths = np.array([f"image {index}" for index in range(len(right))])
    classes = [f"class{number}" for number in range(4)]
    return Predictions(paths, label, np.zeros(len(right), np.float32), classes, {"multilabel": False}, scores)


@pytest.fixture
def right() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    a = rng.random(400) < 0.8
    b = a.copy()
    b[np.flatnonzero(a)[:11]], b[np.flatnonzero(~a)[:8]] = False, True
    return {"A": a, "B": b, "C": rng.random(400) < 0.95}


def test_a_pair_is_tested_by_its_changed_answers(right):
    stats = pytest.importorskip("scipy.stats")
    pair = compare_pair(predictions(right["A"]), predictions(right["C"]), NAMES)
    only_a, only_b = right["A"] & ~right["C"], right["C"] & ~right["A"]
    assert pair.only_a == [f"image {index}" for index in np.flatnonzero(only_a)]
    assert pair.only_b == [f"image {index}" for index in np.flatnonzero(only_b)]
    assert pair.p == pytest.approx(stats.binomtest(int(only_a.sum()), int((only_a | only_b).sum())).pvalue)
    assert pair.difference == pytest.approx(100 * (right["C"].mean() - right["A"].mean()))
    assert pair.interval.low < pair.difference < pair.interval.high


def test_the_sentence_names_the_better_run_or_none(right):
    runs = {name: predictions(found) for name, found in right.items()}
    pairs = {pair.a + pair.b: pair for pair in compare_all(runs)}
    assert list(pairs) == ["AB", "AC", "BC"]
    assert all(pair.adjusted_p >= pair.p for pair in pairs.values())
    assert pairs["AB"].adjusted_p > 0.05 and pairs["AC"].adjusted_p < 1e-6
    assert "No significant difference between A and B: A - B = 0.75 points" in pairs["AB"].describe()
    points = 100 * (right["C"].mean() - right["A"].mean())
    expected = f"C is better than A by {points:.2f} points of top-1 (95 % interval "
    (reverse,) = compare_all({"C": runs["C"], "A": runs["A"]})
    assert reverse.describe().startswith(expected) and pairs["AC"].describe().startswith(expected)


def test_images_in_another_order_are_matched_by_name(right):
    a, b = predictions(right["A"]), predictions(right["B"])
    order = np.random.default_rng(1).permutation(len(b))
    shuffled = Predictions(b.path[order], b.label[order], b.loss[order], b.classes, b.meta, b.scores[order])
    found, expected = compare_pair(a, shuffled, NAMES), compare_pair(a, b, NAMES)
    assert found.only_a == expected.only_a and found.p == expected.p


@pytest.mark.parametrize(
    "change, message",
    [(lambda run: run.path.__setitem__(7, "other.jpg"), "other images, .*: only A has image 7; only B has other.jpg"),
     (lambda run: run.label.__setitem__(7, 0), "other labels"),
     (lambda run: run.classes.__setitem__(0, "cat"), "other classes: only A has class0; only B has cat"),
     (lambda run: run.classes.reverse(), "other classes: the same ones in another order")],
)  # fmt: skip
def test_runs_on_other_data_are_refused(right, change, message):
    a, b = predictions(right["A"]), predictions(right["B"])
    b.path = b.path.astype(object)
    change(b)
    with pytest.raises(ConfigError, match=f"A and B: .*{message}"):
        compare_pair(a, b, NAMES)
    with pytest.raises(ConfigError, match="400 images and 399 images: only A has image 399"):
        compare_pair(a, predictions(right["B"][:399]), NAMES)
