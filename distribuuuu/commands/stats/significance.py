"""Confidence intervals and significance tests of accuracies; numpy only."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Splits of the values of two groups that `permutation_test` enumerates; with more, it draws as many at random.
_MAX_SPLITS = 20_000


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


def wilson_interval(num_correct: float, num_images: int) -> Interval:
    """Return the 95 % Wilson score interval of a proportion, from 0 to 1; (0, 1) without images.

    Wilson, "Probable inference, the law of succession, and statistical inference", JASA 1927.
    """
    if not num_images:
        return Interval(0.0, 1.0)
    z, share = statistics.NormalDist().inv_cdf(0.975), num_correct / num_images
    scale = 1 + z * z / num_images
    center = (share + z * z / (2 * num_images)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / num_images + z * z / (4 * num_images**2))
    # Exactly 0 and 1 at the ends, where rounding would leave a remainder.
    low = 0.0 if num_correct == 0 else center - half
    return Interval(low, 1.0 if num_correct == num_images else center + half)


def mcnemar_p(only_a: int, only_b: int) -> float:
    """Return the two-sided p-value of McNemar's exact test for two classifiers on the same images.

    It is the probability of a split of the changed answers at least as uneven, if each side is equally likely
    (McNemar, Psychometrika 1947; exact form: the binomial test).

    Args:
        only_a: images that only the first classifier got right.
        only_b: images that only the second one got right.
    """
    total, fewer = only_a + only_b, min(only_a, only_b)
    if 2 * fewer == total:
        return 1.0
    counts = np.arange(fewer + 1)
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, total + 1, dtype=np.float64)))])
    log_terms = log_factorials[total] - log_factorials[counts] - log_factorials[total - counts] - total * math.log(2)
    return min(1.0, 2 * math.fsum(np.exp(log_terms)))


def paired_interval(only_a: int, only_b: int, num_images: int) -> Interval:
    """Return the 95 % interval of accuracy B - accuracy A on the same images, from -1 to 1.

    The difference is that of the shares of the images that only B and only A got right. The distances of both from
    their Wilson limits are added as squares (Newcombe, Statistics in Medicine 1998), with their correlation, which is
    that of a multinomial distribution. Without a differing answer, the width still fits the number of images.

    Args:
        only_a: images that only A got right.
        only_b: images that only B got right.
        num_images: all images; at least 1.
    """
    (low_a, high_a), (low_b, high_b) = (wilson_interval(number, num_images) for number in (only_a, only_b))
    a, b = only_a / num_images, only_b / num_images
    correlation = -math.sqrt(a * b / ((1 - a) * (1 - b))) if max(a, b) < 1 else 0.0

    def distance(one: float, other: float) -> float:
        return math.sqrt(one**2 + other**2 - 2 * correlation * one * other)

    return Interval(
        max(-1.0, b - a - distance(b - low_b, high_a - a)), min(1.0, b - a + distance(high_b - b, a - low_a))
    )


def permutation_test(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the two-sided p-value of the difference of the means of two groups of runs, e.g. of several seeds.

    It is the share of the splits of all values into groups of these sizes with a difference at least as large: of all
    splits where they are few, otherwise of random ones and the observed one (Phipson and Smyth, 2010).

    Args:
        a: values of the first group, at least one.
        b: values of the second group, at least one.
    """
    values = np.array([*a, *b], dtype=np.float64)
    num_splits = math.comb(len(values), len(a))
    if num_splits <= _MAX_SPLITS:
        chosen = np.array(list(itertools.combinations(range(len(values)), len(a))))
    else:
        order = np.random.default_rng(0).random((_MAX_SPLITS, len(values))).argsort(axis=1)
        chosen = np.concatenate([np.arange(len(a))[None], order[:, : len(a)]])
    sums = values[chosen].sum(axis=1)
    differences = np.abs((values.sum() - sums) / len(b) - sums / len(a))
    # The first split is the observed one; sums in another order may differ by rounding.
    return float((differences >= differences[0] - 1e-9 * max(1.0, np.abs(values).max())).mean())


def smallest_permutation_p(num_a: int, num_b: int) -> float:
    """Return the smallest p-value that `permutation_test` can give for groups of these sizes."""
    mirrored = 2 if num_a == num_b else 1  # exchanging groups of equal sizes gives the same difference
    return mirrored / math.comb(num_a + num_b, num_a)


def mean_interval(values: Sequence[float]) -> Interval:
    """Return Student's 95 % t interval of the mean of a normal distribution from at least two of its values.

    With t = sqrt(freedom) * tan(angle), the density of the angle is proportional to cos(angle) ** (freedom - 1).
    """
    freedom, angles = len(values) - 1, np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    shares = np.cumsum(density) - (density + density[0]) / 2  # trapezoids from 0 on
    quantile = math.sqrt(freedom) * math.tan(np.interp(0.95, shares / shares[-1], angles))
    mean, half = statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean - half, mean + half)


def holm_adjusted(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the number of comparisons (Holm, Scandinavian Journal of Statistics 1979)."""
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(np.take(p_values, order) * np.arange(len(order), 0, -1)).clip(max=1)
    return adjusted.tolist()
