"""Comparison of runs on the same images: against scipy, and runs that cannot be compared."""

import numpy as np
import pytest

from distribuuuu.commands.report.comparison import compare_all
from distribuuuu.commands.stats.stored_predictions import Predictions
from distribuuuu.config import ConfigError


def predictions(right: np.ndarray) -> Predictions:
    """Return predictions that are right for these images of four classes, and the next class for the others."""
    label = np.arange(len(right), dtype=np.int32) % 4
    scores = np.eye(4, dtype=np.float32)[np.where(right, label, (label + 1) % 4)]
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


def test_pairs_are_tested_by_their_changed_answers_and_the_better_run_is_named(right):
    stats = pytest.importorskip("scipy.stats")
    runs = {name: predictions(found) for name, found in right.items()}
    pairs = {pair["a"] + pair["b"]: pair for pair in compare_all(runs)}
    assert list(pairs) == ["AB", "AC", "BC"]
    only_a, only_c = right["A"] & ~right["C"], right["C"] & ~right["A"]
    pair, points = pairs["AC"], 100 * (right["C"].mean() - right["A"].mean())
    assert pair["images_only_a"] == [f"image {index}" for index in np.flatnonzero(only_a)]
    assert pair["images_only_b"] == [f"image {index}" for index in np.flatnonzero(only_c)]
    assert pair["p"] == pytest.approx(stats.binomtest(int(only_a.sum()), int((only_a | only_c).sum())).pvalue)
    assert pair["difference"] == pytest.approx(points)
    assert pair["interval"][0] < points < pair["interval"][1]
    assert all(pair["adjusted_p"] >= pair["p"] for pair in pairs.values())
    assert pairs["AB"]["adjusted_p"] > 0.05 and pair["adjusted_p"] < 1e-6
    assert "No significant difference between A and B: A - B = 0.75 points" in pairs["AB"]["sentence"]
    expected = f"C is better than A by {points:.2f} points of top-1 (95 % interval "
    (reverse,) = compare_all({"C": runs["C"], "A": runs["A"]})
    assert reverse["sentence"].startswith(expected) and pair["sentence"].startswith(expected)


def test_images_in_another_order_are_matched_by_name(right):
    a, b = predictions(right["A"]), predictions(right["B"])
    order = np.random.default_rng(1).permutation(len(b))
    shuffled = Predictions(b.path[order], b.label[order], b.loss[order], b.classes, b.meta, b.scores[order])
    assert compare_all({"A": a, "B": shuffled}) == compare_all({"A": a, "B": b})


@pytest.mark.parametrize(
    "change, message",
    [(lambda run: run.path.__setitem__(7, "other.jpg"), "other images, .*: only A has image 7; only B has other.jpg"),
     (lambda run: run.label.__setitem__(7, 0), "other labels"),
     (lambda run: run.classes.__setitem__(0, "cat"), "other classes, .*: only A has class0; only B has cat"),
     (lambda run: run.classes.reverse(), "other classes, 4 and 4: the same ones in another order")],
)  # fmt: skip
def test_runs_on_other_data_are_refused(right, change, message):
    a, b = predictions(right["A"]), predictions(right["B"])
    b.path = b.path.astype(object)
    change(b)
    with pytest.raises(ConfigError, match=f"A and B: .*{message}"):
        compare_all({"A": a, "B": b})
    with pytest.raises(ConfigError, match="400 and 399: only A has image 399"):
        compare_all({"A": a, "B": predictions(right["B"][:399])})
