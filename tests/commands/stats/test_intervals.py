"""Confidence intervals against scipy."""

import numpy as np
import pytest

from distribuuuu.commands.stats.intervals import mean_interval, wilson_interval


@pytest.fixture(scope="module")
def stats():
    """The module of scipy, whose import takes a second."""
    return pytest.importorskip("scipy.stats")


def test_the_wilson_interval(stats):
    counts = [(0, 7), (7, 7), (1, 1), (0, 1), (57, 124), (9405, 10_000), (1, 10**7)]
    for correct, total in counts:
        expected = stats.binomtest(correct, total).proportion_ci(0.95, method="wilson")
        assert wilson_interval(correct, total) == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert wilson_interval(0, 0) == (0, 1), "without images, nothing is known"


@pytest.mark.parametrize("num", [2, 3, 4, 5, 10, 101])
def test_the_interval_of_a_mean(stats, num):
    values = np.random.default_rng(num).normal(93, 0.3, num)
    expected = stats.t.interval(0.95, num - 1, np.mean(values), stats.sem(values))
    assert mean_interval(values.tolist()) == pytest.approx(expected, rel=1e-9)
