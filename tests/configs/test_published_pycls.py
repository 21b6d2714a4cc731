"""The pycls model zoo: what the configs do, against figures of pycls.

Source: https://github.com/facebookresearch/pycls, commit 5719de6. Files: configs/dds_baselines/*.yaml, MODEL_ZOO.md,
dev/model_complexity.json, pycls/core/{config,optimizer,net}.py, pycls/datasets/{imagenet,transforms}.py,
pycls/models/blocks.py.
"""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support import recipe_semantics as semantics
from support.recipe_semantics import Evaluation, ParameterOptions, Position
from support.tiers import slow
from torch.utils.flop_counter import FlopCounterMode

from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import LazyImage, build_decode_options
from distribuuuu.data.normalize import statistics_of
from distribuuuu.data.seeding import SampleRNG
from distribuuuu.data.transforms import ResizedCrop, random_resized_box


class Published(NamedTuple):
    """Figures of a model: dev/model_complexity.json, and BASE_LR, BATCH_SIZE, WEIGHT_DECAY, IM_SIZE of its YAML."""

    params: int
    multiply_adds: int
    base_lr: float
    batch: int
    weight_decay: float = 5e-5
    train_px: int = 224
    test_px: int = 256


MODELS = {
    "resnet50_pycls": Published(25557032, 4089185256, 0.2, 256),
    "resnet101_pycls": Published(44549160, 7801406440, 0.2, 256),
    "resnet152_pycls": Published(60192808, 11513627624, 0.2, 256),
    "resnext50_32x4d_pycls": Published(25028904, 4230480872, 0.2, 256),
    "resnext101_32x4d_pycls": Published(44177704, 7969997800, 0.2, 256),
    "regnetx_004_pycls": Published(5157512, 397678568, 0.8, 1024),
    "regnetx_040_pycls": Published(22118248, 3964499816, 0.4, 512),
    "regnetx_160_pycls": Published(54278536, 15940756456, 0.4, 512),
    "regnetx_320_pycls": Published(107811560, 31735930792, 0.2, 256),
    "regnety_004_pycls": Published(4344144, 401849056, 0.8, 1024),
    "regnety_040_pycls": Published(20646656, 3973301344, 0.4, 512),
    "regnety_160_pycls": Published(83590140, 15911534044, 0.2, 256),
    "regnety_320_pycls": Published(145046770, 32279583362, 0.2, 256),
    "efficientnet_b0_pycls": Published(5288548, 385825092, 0.4, 256, 1e-5),
    "efficientnet_b1_pycls": Published(7794184, 686817992, 0.4, 256, 1e-5, 240, 274),
    "efficientnet_b2_pycls": Published(9109994, 993578282, 0.4, 256, 1e-5, 260, 298),
}
# optimizer.get_epoch_lr with WARMUP_EPOCHS 5 and BASE_LR 1, at these epochs; the rate is constant within an epoch.
LR_EPOCHS = (0, 0, 0, 1, 1, 5, 5, 6, 33, 50, 66, 99)
LR_FACTORS = (0.1, 0.1, 0.1, 0.2799309185, 0.2799309185, 0.99384417, 0.99384417, 0.991143625, 0.75452071, 0.5,
              0.259123163, 0.000246719818)  # fmt: skip
# blocks.init_weights: sqrt(2 / (kernel area x output channels)) for convolutions, 0.01 for linear layers.
INIT_STD = {
    "resnet50_pycls": {
        "conv1.weight": math.sqrt(2 / (49 * 64)), "layer1.0.conv2.weight": math.sqrt(2 / (9 * 64)),
        "layer2.0.downsample.0.weight": math.sqrt(2 / 512), "layer4.2.conv3.weight": math.sqrt(2 / 2048),
        "fc.weight": 0.01, "fc.bias": 0,
    },
    "resnext50_32x4d_pycls": {
        "conv1.weight": math.sqrt(2 / (49 * 64)), "layer1.0.conv2.weight": math.sqrt(2 / (9 * 128)),
        "layer3.1.conv2.weight": math.sqrt(2 / (9 * 512)), "layer4.2.conv3.weight": math.sqrt(2 / 2048),
        "fc.weight": 0.01, "fc.bias": 0,
    },
    "regnetx_004_pycls": {
        "stem.conv.weight": math.sqrt(2 / (9 * 32)), "s1.b1.conv2.conv.weight": math.sqrt(2 / (9 * 32)),
        "s4.b2.conv2.conv.weight": math.sqrt(2 / (9 * 384)), "s4.b1.downsample.conv.weight": math.sqrt(2 / 384),
        "head.fc.weight": 0.01, "head.fc.bias": 0,
    },
    "regnety_004_pycls": {
        "stem.conv.weight": math.sqrt(2 / (9 * 32)), "s2.b1.conv2.conv.weight": math.sqrt(2 / (9 * 104)),
        "s4.b1.se.fc2.weight": math.sqrt(2 / 440), "s4.b1.se.fc2.bias": 1 / math.sqrt(3 * 52),
        "head.fc.weight": 0.01, "head.fc.bias": 0,
    },
    "efficientnet_b0_pycls": {
        "conv_stem.weight": math.sqrt(2 / (9 * 32)), "blocks.2.1.conv_dw.weight": math.sqrt(2 / (25 * 240)),
        "blocks.2.1.conv_pwl.weight": math.sqrt(2 / 40), "conv_head.weight": math.sqrt(2 / 1280),
        "classifier.weight": 0.01, "classifier.bias": 0,
    },
}  # fmt: skip
all_models = pytest.mark.parametrize("name", MODELS)
# One small model of each family; the large ones differ in their sizes only.
small_models = pytest.mark.parametrize("name", [name if name in INIT_STD else slow(name) for name in MODELS])


def recipe(name: str):
    return semantics.recipe(f"imagenet/{name}")


@small_models
def test_the_model_has_the_parameters_and_the_arithmetic_of_pycls(name):
    model, published = semantics.meta_model(recipe(name)).eval(), MODELS[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == published.params
    image = torch.zeros(1, 3, published.train_px, published.train_px, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(image)
    assert counter.get_total_flops() == pytest.approx(2 * published.multiply_adds, rel=1e-3)
    norms = [layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    assert {(layer.eps, layer.momentum) for layer in norms} == {(1e-5, 0.1)}  # config.py: BN.EPS, BN.MOM
    assert set(semantics.drop_path_rates(recipe(name))) <= {0.0}  # config.py: EN.DC_RATIO
    drops = [layer.p for layer in model.modules() if isinstance(layer, torch.nn.Dropout)]
    assert not any(drops)  # config.py: EN.DROPOUT_RATIO


@all_models
def test_the_learning_rate_is_that_of_pycls_with_the_warm_up_of_its_model_zoo(name):
    cfg, published = recipe(name), MODELS[name]
    positions = [Position(epoch, step) for step, epoch in enumerate(LR_EPOCHS)]
    assert cfg.TRAIN.GLOBAL_BATCH_SIZE == published.batch
    expected = [published.base_lr * factor for factor in LR_FACTORS]
    assert semantics.learning_rates(cfg, positions) == pytest.approx(expected, rel=1e-7)


@small_models
def test_all_parameters_decay_with_nesterov_momentum(name):
    cfg = recipe(name)
    assert set(semantics.parameter_options(cfg).values()) == {ParameterOptions(MODELS[name].weight_decay, 1.0)}
    settings = semantics.optimizer_defaults(cfg)
    assert (settings["momentum"], settings["dampening"], settings["nesterov"]) == (0.9, 0, True)


@pytest.mark.parametrize("name", INIT_STD)
def test_the_initial_weights_are_those_of_init_weights(name):
    model = semantics.initial_model(recipe(name))
    for tensor, std in semantics.init_std(model, INIT_STD[name]).items():
        num = dict(model.named_parameters())[tensor].numel()
        assert std == pytest.approx(INIT_STD[name][tensor], rel=4 / math.sqrt(num)), tensor
    assert set(semantics.norm_gammas(model).values()) == {1.0}  # BN.ZERO_INIT_FINAL_GAMMA False


@all_models
def test_all_models_are_initialized_alike(name):
    assert recipe(name).MODEL.INIT == "fan_out"


@all_models
def test_statistics_are_computed_over_8192_images(name):
    cfg, published = recipe(name), MODELS[name]
    # net.compute_precise_bn_stats: int(8192 / images per GPU / GPUs) steps.
    assert math.ceil(cfg.MODEL.PRECISE_BN / published.batch) == int(8192 / (published.batch // 8) / 8) > 0
    assert (cfg.TRAIN.BATCH_SIZE, cfg.MODEL.SYNCBN) == (published.batch // 8, False)


@all_models
def test_images_are_cropped_flipped_and_shifted_in_color(name):
    cfg, published = recipe(name), MODELS[name]
    crop = semantics.train_crop(cfg)
    assert crop == ResizedCrop(published.train_px, (0.08, 1.0), 0.5, (3 / 4, 4 / 3), "opencv_linear")
    assert semantics.policy_operations(cfg) == []
    assert build_decode_options(cfg).exif_rotate  # imagenet.py: cv2.imread applies the EXIF orientation
    assert (cfg.AUG.COLOR_JITTER, cfg.AUG.ERASING, cfg.AUG.MIXUP, cfg.AUG.CUTMIX) == ((), 0, 0, 0)
    mean, std = statistics_of(cfg, ImageDataset())
    assert (mean, std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # imagenet.py: _MEAN, _STD
    expected = Evaluation(published.test_px, published.train_px, "opencv_linear", False)
    assert semantics.evaluation(cfg) == expected


@pytest.mark.slow
def test_the_color_noise_has_the_deviation_of_pca_std():
    transform = semantics.train_transform(recipe("resnet50_pycls")).at_size(8)
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


@all_models
def test_the_raw_weights_of_the_last_epoch_are_reported(name):
    cfg = recipe(name)
    assert semantics.reported_weights(cfg) == "raw" and semantics.ema_decays(cfg, [0]) is None
    assert (cfg.OPTIM.MAX_EPOCH, cfg.LOSS.NAME, cfg.LOSS.LABEL_SMOOTHING) == (100, "cross_entropy", 0)
