"""Confidence intervals and significance tests against scipy and statsmodels."""

import numpy as np
import pytest

from distribuuuu.commands.stats.significance import mean_interval, paired_interval, permutation_test, wilson_interval


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


@pytest.mark.parametrize("only_a, only_b, num", [(40, 90, 1000), (0, 5, 20)])
def test_the_interval_of_a_difference_covers_it_in_95_percent(only_a, only_b, num):
    low, high = paired_interval(only_a, only_b, num)
    assert -1 <= low < (only_b - only_a) / num < high <= 1
    assert paired_interval(only_b, only_a, num) == pytest.approx((-high, -low))
    shares = np.array([max(only_a, 1), max(only_b, 1), 0]) / num
    draws = np.random.default_rng(0).multinomial(num, [*shares[:2], 1 - shares.sum()], 3000)
    found = np.array([paired_interval(*row[:2], num) for row in draws])
    difference = shares[1] - shares[0]
    assert np.mean((found[:, 0] <= difference) & (difference <= found[:, 1])) > 0.93


def test_the_permutation_test_equals_that_of_scipy(stats):
    def distance(x, y, axis):
        return np.abs(x.mean(axis=axis) - y.mean(axis=axis))

    for sizes in [(2, 2), (3, 3), (3, 5), (5, 4)]:
        rng = np.random.default_rng(1)
        a, b = rng.normal(93, 0.2, sizes[0]), rng.normal(93.3, 0.2, sizes[1])
        expected = stats.permutation_test((a, b), distance, alternative="greater", n_resamples=np.inf, vectorized=True)
        assert permutation_test(a, b) == pytest.approx(expected.pvalue)
    assert permutation_test([1, 2, 3], [4, 5, 6]) == pytest.approx(0.1)
    assert permutation_test([1.0, 1.0], [1.0, 1.0]) == 1


@pytest.mark.parametrize("num", [2, 3, 4, 5, 10, 101])
def test_the_interval_of_a_mean(stats, num):
    values = np.random.default_rng(num).normal(93, 0.3, num)
    expected = stats.t.interval(0.95, num - 1, np.mean(values), stats.sem(values))
    assert mean_interval(values.tolist()) == pytest.approx(expected, rel=1e-9)


def test_without_a_differing_answer_the_interval_fits_the_number_of_images():
    low, high = paired_interval(0, 0, 412)
    assert 0.005 < high < 0.02 and low == -high and paired_interval(0, 0, 41200)[1] < high / 50
