"""Saliency maps against captum."""

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from distribuuuu.commands.report.saliency import compute_saliency


def captum_map(model, layer, images, targets):
    """Return the map of captum in the size of the images, from 0 to 1."""
    attr = pytest.importorskip("captum.attr", reason="captum is not installed")
    found = attr.LayerGradCam(model, layer).attribute(images, targets, relu_attributions=True)
    scaled = F.interpolate(found, images.shape[2:], mode="bilinear", align_corners=False)[:, 0].detach()
    return scaled / scaled.amax(dim=(1, 2), keepdim=True).clamp(min=1e-30)


@pytest.fixture
def batch():
    return torch.randn(3, 3, 64, 64), torch.tensor([1, 4, 2])


@pytest.mark.parametrize(("build", "layer_of"), [
    (lambda: torchvision.models.resnet18(num_classes=6), lambda net: net.layer4),
    (lambda: torchvision.models.mobilenet_v2(num_classes=6), lambda net: net.features),
])  # fmt: skip
def test_the_last_feature_map_of_a_convolutional_net_as_in_captum(build, layer_of, batch):
    torch.manual_seed(0)
    model = build().eval()
    expected = captum_map(model, layer_of(model), *batch)
    torch.testing.assert_close(compute_saliency(model, *batch), expected, atol=1e-5, rtol=0)


class Grid(nn.Module):
    """Tokens (N, T, D) as a grid (N, D, side, side), and back: captum needs a layer with such an output."""

    def __init__(self, num_prefix):
        super().__init__()
        self.num_prefix, self.grid = num_prefix, nn.Identity()

    def forward(self, tokens):
        prefix, rest = tokens[:, : self.num_prefix], tokens[:, self.num_prefix :]
        side = int(rest.shape[1] ** 0.5)
        rest = self.grid(rest.transpose(1, 2).unflatten(2, (side, side))).flatten(2).transpose(1, 2)
        return torch.cat([prefix, rest], dim=1)


@pytest.mark.parametrize(("pool", "name"), [("token", "blocks.1.norm1"), ("avg", "norm")])
def test_the_tokens_of_a_transformer_as_in_captum(batch, pool, name):
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=6, img_size=64, global_pool=pool, depth=2, fc_norm=False).eval()
    found = compute_saliency(model, *batch)
    path, _, leaf = name.rpartition(".")
    layer = Grid(model.num_prefix_tokens)
    setattr(model.get_submodule(path), leaf, nn.Sequential(model.get_submodule(name), layer))
    torch.testing.assert_close(found, captum_map(model, layer.grid, *batch), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["test_convnext", "swin_tiny_patch4_window7_224"])
def test_maps_of_other_architectures(name):
    model = timm.create_model(name, num_classes=5).eval()
    images = torch.randn(1, 3, *((224, 224) if "swin" in name else (160, 160)))
    assert compute_saliency(model, images, torch.tensor([2])).shape == images[:, 0].shape


def test_models_without_regions_that_change_their_input_in_place_or_are_frozen(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 8), nn.ReLU(), nn.Linear(8, 6))
    assert compute_saliency(model, *batch) is None
    layers = nn.Conv2d(3, 4, 3, 4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6)
    model = nn.Sequential(*layers).requires_grad_(False).eval()
    assert compute_saliency(model, *batch).shape == (3, 64, 64)
    model.register_forward_hook(lambda model, images, logits: {"logits": logits})
    assert compute_saliency(model, *batch) is None
