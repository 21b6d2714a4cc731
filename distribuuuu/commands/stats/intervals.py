"""Confidence intervals of accuracies; numpy only."""

import math
import statistics
from collections.abc import Sequence

import numpy as np


def wilson_interval(num_correct: float, num_images: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a proportion, from 0 to 1; (0, 1) without images.

    Wilson, "Probable inference, the law of succession, and statistical inference", JASA 1927.
    """
    if not num_images:
        return 0.0, 1.0
    z, share = statistics.NormalDist().inv_cdf(0.975), num_correct / num_images
    scale = 1 + z * z / num_images
    center = (share + z * z / (2 * num_images)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / num_images + z * z / (4 * num_images**2))
    # Exactly 0 and 1 at the ends, where rounding would leave a remainder.
    low = 0.0 if num_correct == 0 else center - half
    return low, 1.0 if num_correct == num_images else center + half


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return Student's 95 % t interval of the mean of a normal distribution from at least two of its values.

    With t = sqrt(freedom) * tan(angle), the density of the angle is proportional to cos(angle) ** (freedom - 1).
    """
    freedom, angles = len(values) - 1, np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    shares = np.cumsum(density) - (density + density[0]) / 2  # trapezoids from 0 on
    quantile = math.sqrt(freedom) * math.tan(np.interp(0.95, shares / shares[-1], angles))
    mean, half = statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half
