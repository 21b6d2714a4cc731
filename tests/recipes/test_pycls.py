"""The pycls model zoo: what differs from pycls in its color noise and its crops, which random numbers decide.

Source: https://github.com/facebookresearch/pycls, commit 5719de6: pycls/datasets/transforms.py.
"""

import math

import numpy as np
import pytest
import torch
from support.recipe_measures import recipe, train_transform

from distribuuuu.data.decode import LazyImage
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import random_resized_box


@pytest.mark.slow
def test_the_color_noise_has_the_deviation_of_pca_std():
    transform = train_transform(recipe("imagenet/resnet50_pycls")).at_size(8)
    gray = torch.full((3, 16, 16), 128, dtype=torch.uint8)
    shifts = torch.stack([transform(LazyImage(gray), SampleRNG(0, i))[:, 0, 0].double() - 128 for i in range(1500)])
    # transforms.lighting: 0.1 x sqrt of the sum of (eigenvector x eigenvalue) squared, x 255, for red, green and blue.
    assert shifts.std(0).tolist() == pytest.approx([3.167, 3.223, 3.254], rel=0.08)


def test_the_crops_of_pycls_differ_from_ours_in_less_than_half_a_percent():
    # transforms.random_sized_crop: a ratio uniform in [3/4, 4/3], inverted for one crop in two; ours is log-uniform.
    draw = np.random.default_rng(0)
    ratios = draw.uniform(3 / 4, 4 / 3, 2_000_000)
    theirs = np.log(np.where(draw.uniform(size=ratios.size) < 0.5, 1 / ratios, ratios))
    limit = math.log(4 / 3)
    at = np.linspace(-limit, limit, 41)
    ours = (at + limit) / (2 * limit)
    assert 0.001 < np.abs(np.searchsorted(np.sort(theirs), at) / len(theirs) - ours).max() < 0.005
    boxes = [random_resized_box(SampleRNG(0, index), 4000, 4000, (0.3, 0.3)) for index in range(4000)]
    drawn = np.sort([math.log(box.width / box.height) for box in boxes])
    assert np.abs(np.searchsorted(drawn, at) / len(drawn) - ours).max() < 0.03
