"""Confidence intervals and significance tests of accuracies; numpy only."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Standard deviations on each side of the mean that hold 95 % of a normal distribution.
_Z = statistics.NormalDist().inv_cdf(0.975)
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
    z, share = _Z, num_correct / num_images
    scale = 1 + z * z / num_images
    center = (share + z * z / (2 * num_images)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / num_images + z * z / (4 * num_images**2))
    # Exactly 0 and 1 at the ends, where rounding would leave a remainder.
    low = 0.0 if num_correct == 0 else center - half
    return Interval(low, 1.0 if num_correct == num_images else center + half)


def paired_interval(only_a: int, only_b: int, num_images: int) -> Interval:
    """Return the 95 % interval of accuracy B - accuracy A on the same images, from the images that only one got right.

    Bonett and Price, "Adjusted Wald Confidence Interval for a Difference of Binomial Proportions Based on Paired Data",
    Journal of Educational and Behavioral Statistics 2012.
    """
    a, b = ((number + 1) / (num_images + 2) for number in (only_a, only_b))
    half = _Z * math.sqrt((a + b - (b - a) ** 2) / (num_images + 2))
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
