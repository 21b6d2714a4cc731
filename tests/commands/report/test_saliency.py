"""Saliency maps against captum."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from distribuuuu.commands.report.saliency import as_map, compute_saliency, find_activations, weigh_activations


def captum_map(model, layer, images, targets):
    attr = pytest.importorskip("captum.attr", reason="captum is not installed")
    return attr.LayerGradCam(model, layer).attribute(images, targets, relu_attributions=True)[:, 0]


@pytest.fixture
def batch():
    return torch.randn(3, 3, 64, 64), torch.tensor([1, 4, 2])


@pytest.mark.parametrize(("build", "layer_of"), [
    (lambda: torchvision.models.resnet18(num_classes=6), lambda net: net.layer4),
    (lambda: torchvision.models.mobilenet_v2(num_classes=6), lambda net: net.features),
    (lambda: timm.create_model("resnet10t", num_classes=6), lambda net: net.layer4),
])  # fmt: skip
def test_the_last_feature_map_of_a_convolutional_net_as_in_captum(build, layer_of, batch):
    model = build().eval()
    expected = captum_map(model, layer_of(model), *batch)
    torch.testing.assert_close(weigh_activations(*find_activations(model, *batch)), expected, atol=1e-5, rtol=0)
    scaled = compute_saliency(model, *batch)
    assert scaled.shape == (3, 64, 64) and 0 <= scaled.min() <= scaled.max() <= 1


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
    model = timm.create_model("test_vit", num_classes=6, img_size=64, global_pool=pool, depth=2, fc_norm=False).eval()
    found = weigh_activations(*find_activations(model, *batch))
    path, _, leaf = name.rpartition(".")
    layer = Grid(model.num_prefix_tokens)
    setattr(model.get_submodule(path), leaf, nn.Sequential(model.get_submodule(name), layer))
    expected = captum_map(model, layer.grid, *batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_resnet", "test_efficientnet",
                                  "swin_tiny_patch4_window7_224"])  # fmt: skip
def test_maps_of_other_architectures(name):
    model = timm.create_model(name, num_classes=5).eval()
    size = (224, 224) if "swin" in name else model.patch_embed.img_size if "vit" in name else (160, 160)
    images = torch.randn(1, 3, *size)
    assert compute_saliency(model, images, torch.tensor([2])).shape == images[:, 0].shape


def test_models_without_regions_that_change_their_input_in_place_or_are_frozen(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 8), nn.ReLU(), nn.Linear(8, 6))
    assert compute_saliency(model, *batch) is None
    layers = nn.Conv2d(3, 4, 3, 4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6)
    model = nn.Sequential(*layers).requires_grad_(False).eval()
    assert compute_saliency(model, *batch).shape == (3, 64, 64)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "output", [lambda logits: {"shape": logits}, lambda logits: (logits, logits), torch.Tensor.sum]
)
def test_an_output_that_is_not_one_row_of_scores_has_no_map(batch, output):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Conv2d(3, 5, 3)

        def forward(self, images):
            return output(self.body(images).mean((2, 3)))

    assert compute_saliency(Other().eval(), *batch) is None


def test_which_activations_have_regions():
    for shape, found in (((2, 8, 7, 5), (2, 8, 7, 5)), ((2, 7, 7, 96), (2, 96, 7, 7)), ((2, 50, 96), (2, 96, 7, 7))):
        assert as_map(torch.zeros(shape)).shape == found
    assert [as_map(torch.zeros(shape)) for shape in ((2, 8, 1, 1), (2, 60, 96), (2, 9))] == [None] * 3
