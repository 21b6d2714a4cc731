"""Figures of reports against scikit-learn and torchmetrics."""

import math

import numpy as np
import pytest

from distribuuuu.commands.stats import stored_predictions as analysis
from distribuuuu.commands.stats.stored_predictions import Predictions


def make(scores: np.ndarray, label: np.ndarray) -> Predictions:
    names = [f"c{number}" for number in range(scores.shape[1])]
    path = np.array([f"image {number}" for number in range(len(scores))])
    return Predictions(path, label, np.zeros(len(scores), np.float32), names, {}, scores.astype(np.float32))


@pytest.fixture(params=[(400, 2), (700, 7), (300, 40)])
def single(request):
    """Predictions of N images of C classes; the last class has no image, one more is never predicted."""
    num, classes = request.param
    generator = np.random.default_rng(num)
    label = generator.integers(0, max(2, classes - 1), num).astype(np.int32)
    scores = generator.normal(size=(num, classes)) * 2
    scores[np.arange(num), label] += 1.5
    scores[:, 0] -= 8 * (classes > 2)
    return make(scores, label)


def test_class_figures_equal_those_of_scikit_learn(single):
    from sklearn import metrics as reference  # its import takes seconds

    numbers = list(range(len(single.classes)))
    given = {"labels": numbers, "zero_division": np.nan}
    expected = reference.precision_recall_fscore_support(single.label, single.predicted, **given)
    names, listed = single.classes, analysis.list_figures(single)
    for name, wanted in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        np.testing.assert_allclose([row[name] for row in listed["classes"].values()], wanted, atol=1e-12)
    confusions = reference.confusion_matrix(single.label, single.predicted, labels=numbers)
    pairs = [[names[row], names[column], count] for (row, column), count in np.ndenumerate(confusions) if count]
    assert listed["confusions"] == pairs
    wanted = reference.precision_score(single.label, single.predicted, average="macro", zero_division=0)
    assert listed["macro_precision"] == pytest.approx(wanted, abs=1e-12)
    assert listed["accuracy"] == pytest.approx(reference.accuracy_score(single.label, single.predicted), abs=1e-12)
    if len(numbers) > 5:
        wanted = reference.top_k_accuracy_score(single.label, single.scores, k=5, labels=numbers)
        assert listed["top5_accuracy"] == pytest.approx(wanted, abs=1e-12)


def test_label_figures_equal_those_of_scikit_learn():
    from sklearn import metrics as reference

    generator = np.random.default_rng(3)
    label = (generator.random((500, 6)) < [0.5, 0.2, 0.05, 0.9, 0.3, 0]).astype(np.uint8)
    scores = np.round(generator.normal(size=(500, 6)) + label, 1)  # with equal scores
    content = make(scores, label)
    rows = analysis.list_figures(content)["classes"].values()
    precisions = [row["average_precision"] for row in rows]
    wanted = [reference.average_precision_score(label[:, number], content.scores[:, number]) for number in range(5)]
    assert precisions[:5] == pytest.approx(wanted, abs=1e-6) and math.isnan(precisions[5])
    expected = reference.precision_recall_fscore_support(label, content.scores > 0, zero_division=np.nan)
    for name, wanted in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        np.testing.assert_allclose([row[name] for row in rows], wanted, atol=1e-12)
