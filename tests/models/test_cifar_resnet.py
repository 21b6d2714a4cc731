"""The CIFAR ResNets: sizes, shortcuts and norms."""

import pytest
import torch
from torch import nn

from distribuuuu.config.registry import MODELS
from distribuuuu.models.cifar_resnet import CifarBlock, CifarResNet


def test_cifar_resnets_have_as_many_layers_as_their_name_says():
    for depth in (20, 32, 110):
        with torch.device("meta"):
            model = MODELS.get(f"resnet{depth}")()
        kernels = [layer.kernel_size for layer in model.modules() if isinstance(layer, nn.Conv2d)]
        assert kernels == [(3, 3)] * (depth - 1)  # shortcuts have no parameters; a linear layer follows


def test_the_initial_weights_are_those_of_he_et_al():
    convs = [layer.weight.detach() for layer in CifarResNet(20).modules() if isinstance(layer, nn.Conv2d)]
    for weight in convs:
        assert float(weight.std()) == pytest.approx((2 / (9 * len(weight))) ** 0.5, rel=4 / weight.numel() ** 0.5)
    assert len(convs) == 19


def test_group_norm_leaves_no_batch_statistics():
    torch.manual_seed(0)
    images = torch.randn(4, 3, 32, 32)
    grouped, batched = (CifarResNet(8, norm=norm).train() for norm in ("group", "batch"))
    assert torch.allclose(grouped(images)[:1], grouped(images[:1]), atol=1e-5)
    assert not torch.allclose(batched(images)[:1], batched(images[:1]), atol=1e-2)
    assert not list(grouped.buffers())
    norms = [module for module in grouped.modules() if isinstance(module, nn.GroupNorm)]
    assert {norm.num_channels // norm.num_groups for norm in norms} == {8}


def test_shortcut_has_no_parameters_and_keeps_the_pixels():
    block = CifarResNet(8).stage2[0]
    x = torch.randn(1, 16, 7, 7)
    short = block.shortcut(x)
    assert short.shape == block(x).shape == (1, 32, 4, 4)
    assert torch.equal(short[:, 8:24], x[:, :, ::2, ::2]) and short[:, :8].abs().sum() == 0
    assert CifarResNet(8).stage1[0].shortcut(x) is x
    narrow = CifarBlock(16, 16, stride=2, norm=nn.BatchNorm2d)
    assert torch.equal(narrow.shortcut(x), x[:, :, ::2, ::2]) and narrow(x).shape == (1, 16, 4, 4)
