"""The RegNets of the 2021 distribuuuu: initial weights by the formulas of timm of that date; the crops of pycls.

Sources: https://github.com/BIGBALLON/distribuuuu, commit eaaa922 of May 7, 2021, which builds them with timm; timm
0.4.5 to 0.5.4, models/regnet.py: RegNet.__init__, equal in all of them. timm 0.6 (commit 4dec8c80) divides the fan-out
by the groups of a convolution and sets the biases of squeeze-and-excitation to zero. The crops are those of
https://github.com/facebookresearch/pycls, commit 5719de6, pycls/datasets/transforms.py.
"""

import math

import numpy as np
import pytest
import torch
from support.recipe_measures import initial_model, recipe
from support.tiers import slow
from torch import nn

from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import random_resized_box
from distribuuuu.models.build import initialize


def published_std(layer: nn.Conv2d | nn.Linear) -> float:
    """kaiming_normal_(mode="fan_out", nonlinearity="relu"), which ignores groups; normal_(std=0.01) for the head."""
    if isinstance(layer, nn.Linear):
        return 0.01
    return math.sqrt(2 / (layer.out_channels * math.prod(layer.kernel_size)))


def check(model: nn.Module) -> None:
    """Compare the weights of each layer with the formulas of timm 0.4.12."""
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            weights = layer.weight.detach()
            assert float(weights.std()) == pytest.approx(published_std(layer), rel=5 / math.sqrt(weights.numel())), name
        if isinstance(layer, nn.Linear):
            assert not layer.bias.any(), name
        elif isinstance(layer, nn.Conv2d) and layer.bias is not None:  # squeeze-and-excitation: torch's own
            bound = 1 / math.sqrt(layer.in_channels)
            biases, rel = layer.bias.detach(), 4 / math.sqrt(layer.bias.numel())
            assert float(biases.std()) == pytest.approx(bound / math.sqrt(3), rel=rel), name
            assert float(biases.abs().max()) <= bound, name
        elif isinstance(layer, nn.BatchNorm2d):  # zero_init_last_bn: the last norm of each block
            assert (layer.weight == (0 if name.endswith("conv3.bn") else 1)).all() and not layer.bias.any(), name


@pytest.mark.parametrize("name, width", [("regnetx_160", 128), slow("regnety_160", 112), slow("regnety_320", 232)])
def test_the_regnets_start_as_in_2021(name, width):
    model = initial_model(recipe(f"imagenet2021/{name}"))
    grouped = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d) and layer.groups > 1]
    assert {layer.weight.shape[1] for layer in grouped} == {width}
    check(model)


def test_squeeze_and_excitation_starts_as_in_2021():
    model = initial_model(recipe("imagenet2021/regnety_160", "MODEL.ARCH", "regnety_004"))
    assert sum(layer.bias is not None for layer in model.modules() if isinstance(layer, nn.Conv2d)) == 2 * 16
    check(model)


def test_norms_keep_their_scales_only_if_asked():
    norm = nn.BatchNorm2d(3)
    nn.init.constant_(norm.weight, 0.5)
    initialize(norm, keep_norms=True)
    assert (norm.weight == 0.5).all()
    initialize(norm)
    assert torch.equal(norm.weight, torch.ones(3))


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
