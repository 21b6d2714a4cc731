"""The recipes of ffcv-imagenet: blurred convolutions next to torchvision's models, and the loss next to torch's.

Source: https://github.com/libffcv/ffcv-imagenet, commit 4dd291a: train_imagenet.py (apply_blurpool).
"""

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from support.recipe_measures import initial_model, recipe
from support.tiers import slow
from torch import nn

from distribuuuu.models.blurpool_resnet import BlurredConv

# Convolutions with a stride above 1 and at least 16 input channels, and their input channels.
BLURRED = {
    "resnet18": {
        "layer2.0.conv1": 64, "layer2.0.downsample.0": 64, "layer3.0.conv1": 128, "layer3.0.downsample.0": 128,
        "layer4.0.conv1": 256, "layer4.0.downsample.0": 256,
    },
    "resnet50": {
        "layer2.0.conv2": 128, "layer2.0.downsample.0": 256, "layer3.0.conv2": 256, "layer3.0.downsample.0": 512,
        "layer4.0.conv2": 512, "layer4.0.downsample.0": 1024,
    },
}  # fmt: skip


def blur(_, inputs):
    """Blur the input of a layer line by line: a forward pre-hook."""
    (x,) = inputs
    for dim in (2, 3):
        padded = F.pad(x, (0, 0, 1, 1) if dim == 2 else (1, 1))
        left, middle, right = (padded.narrow(dim, first, x.shape[dim]) for first in range(3))
        x = (left + 2 * middle + right) / 4
    return (x,)


@pytest.mark.parametrize("family", ["resnet18", slow("resnet50")])
def test_the_strided_convolutions_are_blurred_and_nothing_else_differs_from_torchvision(family):
    model = copy.deepcopy(initial_model(recipe(f"imagenet/{family}_ffcv_16"))).double().eval()
    blurs = {path: layer for path, layer in model.named_modules() if isinstance(layer, BlurredConv)}
    assert {path: layer.conv.in_channels for path, layer in blurs.items()} == BLURRED[family]
    assert all(max(layer.conv.stride) == 2 for layer in blurs.values()) and isinstance(model.maxpool, nn.MaxPool2d)
    plain = getattr(torchvision.models, family)().double().eval()
    weights = {key.replace(".conv.", "."): value for key, value in model.state_dict().items() if "blur" not in key}
    plain.load_state_dict(weights)
    for path in BLURRED[family]:
        plain.get_submodule(path).register_forward_pre_hook(blur)
    images = torch.randn(2, 3, 70, 61, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        assert torch.allclose(model(images), plain(images), rtol=1e-9, atol=1e-9)
