"""The recipes of ffcv-imagenet: what the configs do, against figures of its training script.

Sources: https://github.com/libffcv/ffcv-imagenet, commit 4dd291a: train_imagenet.py, rn18_configs/*.yaml,
rn50_configs/*.yaml, README.md. https://github.com/libffcv/ffcv, commit 3487682: ffcv/fields/rgb_image.py.
"""

import copy
import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from support import recipe_semantics as semantics
from support.recipe_semantics import Evaluation, ParameterOptions, Position
from support.runs import ROOT
from torch import nn

from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.data.samplers import build_im_size
from distribuuuu.data.transforms import ResizedCrop
from distribuuuu.models.blurpool_resnet import BlurredConv
from distribuuuu.tasks.losses import build_loss


class Published(NamedTuple):
    """Figures of a recipe.

    gpus, batch, weight_decay, ramp: world_size, batch_size (of a GPU), weight_decay, start_ramp and end_ramp of the
    YAML file. lr: get_cyclic_lr, interpolated over the steps of an epoch as in train_loop, at `positions`.
    """

    gpus: int
    batch: int
    weight_decay: float
    ramp: tuple[int, int]
    positions: tuple[tuple[int, int], ...]
    lr: tuple[float, ...]
    max_px: int


RECIPES = {
    "resnet18_ffcv_16": Published(
        1, 1024, 5e-5, (11, 13),
        ((0, 0), (0, 1), (0, 1250), (1, 0), (1, 417), (2, 0), (2, 625), (3, 0), (5, 1), (8, 0), (10, 625), (15, 1250)),
        (5e-05, 0.000249820144, 0.24982518, 0.250025, 0.33335, 0.5, 0.482157131, 0.464285714, 0.392828594, 0.285714286,
         0.196442846, 2.85485897e-05), 400,
    ),
    "resnet18_ffcv_88": Published(
        1, 1024, 5e-5, (65, 76),
        ((0, 0), (0, 1), (0, 1250), (1, 0), (1, 417), (2, 0), (2, 625), (3, 0), (29, 1), (44, 0), (58, 625),
         (87, 1250)),
        (5e-05, 0.000249820144, 0.24982518, 0.250025, 0.33335, 0.5, 0.497095347, 0.494186047, 0.343018608, 0.255813953,
         0.171513952, 4.64744483e-06), 400,
    ),
    "resnet50_ffcv_16": Published(
        8, 512, 1e-4, (11, 13),
        ((0, 0), (0, 1), (0, 311), (1, 0), (1, 104), (2, 0), (2, 156), (3, 0), (5, 1), (8, 0), (10, 156), (15, 311)),
        (0.00017, 0.00289408654, 0.847360913, 0.850085, 1.13339, 1.7, 1.63928571, 1.57857143, 1.33532509, 0.971428571,
         0.667857143, 0.000389194139), 500,
    ),
    "resnet50_ffcv_88": Published(
        8, 512, 1e-4, (65, 76),
        ((0, 0), (0, 1), (0, 311), (1, 0), (1, 104), (2, 0), (2, 156), (3, 0), (29, 1), (44, 0), (58, 156), (87, 311)),
        (0.00017, 0.00289408654, 0.847360913, 0.850085, 1.13339, 1.7, 1.69011628, 1.68023256, 1.16621571, 0.869767442,
         0.583139535, 6.33571855e-05), 500,
    ),
}  # fmt: skip
# apply_blurpool: convolutions with a stride above 1 and at least 16 input channels, and their input channels.
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
all_recipes = pytest.mark.parametrize("name", RECIPES)


def recipe(name: str):
    return semantics.recipe(f"imagenet/{name}")


def family(name: str) -> str:
    return name.partition("_")[0]


@all_recipes
def test_the_learning_rate_is_interpolated_from_a_ten_thousandth(name):
    cfg, published = recipe(name), RECIPES[name]
    found = semantics.learning_rates(cfg, [Position(*position) for position in published.positions])
    assert found == pytest.approx(published.lr, rel=1e-8)


@all_recipes
def test_only_parameters_with_bn_in_their_name_are_exempt_from_the_decay(name):
    options = semantics.parameter_options(recipe(name))
    decays = {parameter: option.weight_decay for parameter, option in options.items()}
    # create_optimizer: `'bn' in k`; the norms of the shortcuts, downsample.1, have no bn in their names.
    assert decays["bn1.weight"] == decays["layer3.0.bn2.bias"] == 0
    assert decays["layer2.0.downsample.1.weight"] == decays["layer2.0.downsample.1.bias"] == decays["fc.bias"] > 0
    for parameter, option in options.items():
        expected = 0 if "bn" in parameter else RECIPES[name].weight_decay
        assert option == ParameterOptions(expected, 1.0), parameter
    settings = semantics.optimizer_defaults(recipe(name))
    assert (settings["momentum"], settings["nesterov"], settings["dampening"]) == (0.9, False, 0)


@all_recipes
def test_a_step_has_the_images_of_all_gpus_and_batch_norm_those_of_one(name):
    cfg, published = recipe(name), RECIPES[name]
    plan = plan_batches(cfg.TRAIN.BATCH_SIZE, cfg.TRAIN.GLOBAL_BATCH_SIZE, published.gpus)
    assert (plan.micro_batch, plan.accum_steps) == (published.batch, 1) and not cfg.MODEL.SYNCBN
    assert (cfg.TRAIN.AMP, cfg.MODEL.CHANNELS_LAST) == ("fp16", True)


@all_recipes
def test_images_grow_at_the_end_of_the_published_ramp(name):
    cfg, (start, end) = recipe(name), RECIPES[name].ramp
    im_size_at = build_im_size(cfg)
    for epoch in range(cfg.OPTIM.MAX_EPOCH):  # get_resolution
        between = 160 + 32 * np.clip((epoch - start) / (end - start), 0, 1)
        assert im_size_at(epoch) == (160 if epoch <= start else 192 if epoch >= end else round(between / 32) * 32)


@pytest.mark.parametrize("name", ["resnet18_ffcv_16", "resnet50_ffcv_16"])
def test_the_strided_convolutions_are_blurred_and_nothing_else_differs_from_torchvision(name):
    model = copy.deepcopy(semantics.initial_model(recipe(name))).double().eval()
    blurs = {path: layer for path, layer in model.named_modules() if isinstance(layer, BlurredConv)}
    assert {path: layer.conv.in_channels for path, layer in blurs.items()} == BLURRED[family(name)]
    assert all(max(layer.conv.stride) == 2 for layer in blurs.values())
    assert isinstance(model.maxpool, nn.MaxPool2d)
    # The same weights in torchvision's model, with hooks that blur the inputs line by line.
    plain = getattr(torchvision.models, family(name))().double().eval()
    weights = {key.replace(".conv.", "."): value for key, value in model.state_dict().items() if "blur" not in key}
    plain.load_state_dict(weights)

    def blur(_, inputs):
        (x,) = inputs
        for dim in (2, 3):
            padded = F.pad(x, (0, 0, 1, 1) if dim == 2 else (1, 1))
            left, middle, right = (padded.narrow(dim, first, x.shape[dim]) for first in range(3))
            x = (left + 2 * middle + right) / 4
        return (x,)

    for path in BLURRED[family(name)]:
        plain.get_submodule(path).register_forward_pre_hook(blur)
    images = torch.randn(2, 3, 70, 61, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        assert torch.allclose(model(images), plain(images), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["resnet18_ffcv_16", "resnet50_ffcv_16"])
def test_the_initial_weights_are_torchvisions(name):
    model = semantics.initial_model(recipe(name))
    assert set(semantics.norm_gammas(model).values()) == {1.0}
    blurred = next(iter(BLURRED[family(name)]))
    fan_outs = {"conv1.weight": 49 * 64, f"{blurred}.conv.weight": 9 * 128, "layer2.0.downsample.0.conv.weight": None,
                "layer4.1.conv2.weight": 9 * 512}  # fmt: skip
    fan_outs["layer2.0.downsample.0.conv.weight"] = 128 if family(name) == "resnet18" else 512
    for tensor, std in semantics.init_std(model, fan_outs).items():
        assert std == pytest.approx((2 / fan_outs[tensor]) ** 0.5, rel=0.03), tensor
    width = model.fc.in_features
    assert semantics.init_std(model, ["fc.weight"])["fc.weight"] == pytest.approx((3 * width) ** -0.5, rel=0.02)


@all_recipes
def test_images_are_resized_by_area_and_the_mirrored_image_is_evaluated_too(name):
    cfg = recipe(name)
    # RandomResizedCropRGBImageDecoder; libffcv.cpp: cv::INTER_AREA; RandomHorizontalFlip.
    assert semantics.train_crop(cfg) == ResizedCrop(192, (0.08, 1.0), 0.5, (0.75, 4 / 3), "opencv_area")
    assert semantics.train_transform(cfg) == semantics.train_crop(cfg)
    found = semantics.evaluation(cfg)
    assert found == Evaluation(292, 256, "opencv_area", True)
    # get_center_crop takes 224 / 256 of the shorter side; 292 is the nearest whole size that does.
    assert min(range(256, 400), key=lambda resize: abs(found.crop / resize - 224 / 256)) in (292, 293)
    assert abs(found.crop / found.resize - 224 / 256) < 0.002


@all_recipes
def test_the_header_packs_the_images_as_the_authors_did(name):
    header = (ROOT / "configs" / "imagenet" / f"{name}.yaml").read_text()
    assert re.search(rf"--longer-side {RECIPES[name].max_px} --quality 90\b", header)


@all_recipes
def test_the_loss_is_torchs_with_smoothed_labels(name):
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(1)) * 3
    labels = torch.tensor([0, 1, 999, 5, 5, 500])
    expected = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, labels)
    assert build_loss(recipe(name))(logits, labels).item() == pytest.approx(expected.item(), abs=1e-6)


@all_recipes
def test_the_raw_weights_of_the_last_epoch_are_reported(name):
    assert semantics.reported_weights(recipe(name)) == "raw" and semantics.ema_decays(recipe(name), [0]) is None
