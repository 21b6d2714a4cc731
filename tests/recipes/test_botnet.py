"""BoTNet-50 beside its recipe: the image size, and the names and shapes of the original state dict."""

import itertools
import sys

import pytest
import torch
from support.runs import message_of
from torch import nn
from torchvision.models import resnet50

from distribuuuu.config import load_cfg
from distribuuuu.config.registry import MODELS
from distribuuuu.models import check_model

CFG = load_cfg(None, ["MODEL.ARCH", "botnet50", "TRAIN.IM_SIZE", "64"])  # imports the plug-in
BOTNET = sys.modules[MODELS.get("botnet50").__module__]


def shapes(model):
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def test_the_image_size_is_a_multiple_of_16():
    check_model(CFG)
    said = message_of(check_model, load_cfg(None, ["MODEL.ARCH", "botnet50", "TRAIN.IM_SIZE", "100"]))
    assert said.startswith("TRAIN.IM_SIZE (command line): ") and "multiple of 16" in said


def test_botnet_rejects_other_sizes():
    model = BOTNET.botnet50(num_classes=3, im_size=64)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 3)
    with pytest.raises(ValueError, match=r"got a feature map of 2 x 2; expected 4 x 4"):
        model(torch.randn(2, 3, 32, 32))


def test_botnet_keeps_the_layout_of_the_original_state_dict():
    with torch.device("meta"):
        found, trunk = shapes(BOTNET.botnet50()), nn.Sequential(*list(resnet50().children())[:7])
    expected = shapes(trunk)
    convs = {"net.0": (512, 2048), "net.3.to_qk": (1024, 512), "net.3.to_v": (512, 512), "net.7": (2048, 512)}
    for block in (f"7.net.{index}" for index in range(3)):
        expected |= {f"{block}.{name}.weight": (*shape, 1, 1) for name, shape in convs.items()}
        expected |= {f"{block}.net.3.pos_emb.{name}": (27, 128) for name in ("rel_height", "rel_width")}
        expected |= norm_shapes(f"{block}.net.1", 512) | norm_shapes(f"{block}.net.5", 512)
        expected |= norm_shapes(f"{block}.net.8", 2048)
    expected["7.net.0.net.0.weight"] = (512, 1024, 1, 1)
    expected |= {"7.net.0.shortcut.0.weight": (2048, 1024, 1, 1)} | norm_shapes("7.net.0.shortcut.1", 2048)
    assert found == expected | {"10.weight": (1000, 2048), "10.bias": (1000,)}


def norm_shapes(name, num_channels):
    parts = ("weight", "bias", "running_mean", "running_var")
    return {f"{name}.{part}": (num_channels,) for part in parts} | {f"{name}.num_batches_tracked": ()}


def test_relative_logits_equal_a_plain_loop():
    torch.manual_seed(0)
    size, dim = 4, 8
    position = BOTNET.RelativePosition(size, dim)
    q = torch.randn(2, 3, size, size, dim)
    expected = torch.empty(2, 3, size * size, size * size)
    cells = list(itertools.product(range(size), range(size)))
    for (i, (row, column)), (j, (key_row, key_column)) in itertools.product(enumerate(cells), enumerate(cells)):
        vector = position.rel_height[key_row - row + size - 1] + position.rel_width[key_column - column + size - 1]
        expected[:, :, i, j] = q[:, :, row, column] @ vector
    assert torch.allclose(position(q), expected, atol=1e-5)
