"""The CIFAR-10 ResNets of He et al.: what the configs do, against the figures of the paper.

Source: https://arxiv.org/abs/1512.03385, version 1, section 4.2 and table 6.
"""

import math
from typing import NamedTuple

import pytest
import torch
from support import recipe_semantics as semantics
from support.images import draw_folder
from support.recipe_semantics import Evaluation, ParameterOptions, Position
from support.runs import ROOT
from support.tiers import slow
from torch import nn

from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.data.datasets.torchvision_sets import Cifar10
from distribuuuu.data.loader import build_loader
from distribuuuu.data.normalize import statistics_of
from distribuuuu.data.transforms import PaddedCrop
from distribuuuu.engine.setup import build_run
from distribuuuu.launch.detect import detect_launch
from distribuuuu.trainer import train_epoch

NUM_IMAGES, NUM_STEPS = 50_000, 390


class Published(NamedTuple):
    """Parameters in M, as printed, and the test error in percent: table 6."""

    params: str
    error: float


MODELS = {
    "resnet20": Published("0.27", 8.75),
    "resnet32": Published("0.46", 7.51),
    "resnet44": Published("0.66", 7.17),
    "resnet56": Published("0.85", 6.97),
    "resnet110": Published("1.7", 6.43),
}
# Steps of the run, from 0, and the learning rate of the paper: 0.1, divided by 10 at 32k and 48k steps, 64k in all.
LR = {0: 0.1, 1: 0.1, 389: 0.1, 500: 0.1, 1000: 0.1, 10_000: 0.1, 31_900: 0.1, 32_000: 0.01, 40_000: 0.01,
      47_900: 0.01, 48_000: 0.001, 63_900: 0.001}  # fmt: skip
all_models = pytest.mark.parametrize("name", MODELS)


def recipe(name: str):
    return semantics.recipe(f"cifar10/{name}")


@all_models
def test_the_learning_rate_falls_at_32k_and_48k_of_64k_steps(name):
    cfg = recipe(name)
    expected = {step: 0.01 if name == "resnet110" and step < 390 else lr for step, lr in LR.items()}
    at = [Position(*divmod(step, NUM_STEPS)) for step in expected]
    assert semantics.num_steps(cfg, NUM_IMAGES) == NUM_STEPS
    found = semantics.learning_rates(cfg, at, NUM_IMAGES)
    assert found == pytest.approx(list(expected.values()), rel=1e-9)
    assert 0 <= 64_000 - cfg.OPTIM.MAX_EPOCH * NUM_STEPS <= 40  # the run has whole epochs


@all_models
def test_all_parameters_decay_with_plain_momentum(name):
    cfg = recipe(name)
    assert set(semantics.parameter_options(cfg).values()) == {ParameterOptions(1e-4, 1.0)}
    settings = semantics.optimizer_defaults(cfg)
    assert (settings["momentum"], settings["nesterov"], settings["dampening"]) == (0.9, False, 0)


@all_models
def test_a_step_has_128_images_and_batch_norm_the_64_of_one_of_two_gpus(name):
    cfg = recipe(name)
    for num_processes in (1, 2):
        plan = plan_batches(cfg.TRAIN.BATCH_SIZE, cfg.TRAIN.GLOBAL_BATCH_SIZE, num_processes)
        assert (plan.global_batch, plan.micro_batch) == (128, 64)


@all_models
def test_the_model_has_the_published_size_and_shortcuts_without_parameters(name):
    model, published = semantics.initial_model(recipe(name)), MODELS[name]
    digits = len(published.params.partition(".")[2])
    assert f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.{digits}f}" == published.params
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    depth = int(name.removeprefix("resnet"))
    assert len(convolutions) == depth - 1 and all(layer.kernel_size == (3, 3) for layer in convolutions)
    # Option A: the shortcut subsamples the pixels and pads the 16 new channels with zeros.
    x = torch.randn(1, 16, 32, 32)
    shortcut = model.stage2[0].shortcut(x)
    assert shortcut.shape == (1, 32, 16, 16)
    is_padding = (shortcut == 0).all(dim=(0, 2, 3))
    assert is_padding.sum() == 16 and torch.equal(shortcut[:, ~is_padding], x[:, :, ::2, ::2])


@all_models
def test_the_initial_weights_are_normal_by_fan(name):
    model = semantics.initial_model(recipe(name))
    fans = {"stem.0.weight": 9 * 16, "stage1.0.conv1.weight": 9 * 16, "stage2.0.conv1.weight": 9 * 32,
            "stage2.1.conv2.weight": 9 * 32, "stage3.1.conv2.weight": 9 * 64}  # fmt: skip
    for tensor, std in semantics.init_std(model, fans).items():
        num = dict(model.named_parameters())[tensor].numel()
        assert std == pytest.approx(math.sqrt(2 / fans[tensor]), rel=4 / math.sqrt(num)), tensor
    assert set(semantics.norm_gammas(model).values()) == {1.0}


@all_models
def test_images_are_padded_by_4_cropped_and_flipped_and_the_mean_is_subtracted(name):
    cfg = recipe(name)
    assert semantics.train_transform(cfg) == PaddedCrop(32, 4, 0.5)
    crop = semantics.evaluation(cfg)
    assert crop == Evaluation(32, 32, "bilinear", False)
    mean, std = statistics_of(cfg, Cifar10)
    assert mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=1e-4) and set(std) == {1}


@all_models
def test_the_loss_is_plain_and_the_raw_weights_are_reported(name):
    cfg = recipe(name)
    assert (cfg.LOSS.NAME, cfg.LOSS.LABEL_SMOOTHING, cfg.AUG.MIXUP, cfg.AUG.CUTMIX) == ("cross_entropy", 0, 0, 0)
    assert semantics.reported_weights(cfg) == "raw" and semantics.ema_decays(cfg, [0]) is None


@all_models
def test_the_header_states_the_published_error(name):
    header = (ROOT / "configs" / "cifar10" / f"{name}.yaml").read_text()
    assert f"top-1 {100 - MODELS[name].error:.2f} (error {MODELS[name].error}" in header


@pytest.mark.parametrize("name", [name if name == "resnet20" else slow(name) for name in MODELS])
def test_two_steps(name, tmp_path):
    draw_folder(tmp_path / "images", "train", {f"class{number}": 2 for number in range(10)}, size=(40, 36))
    draw_folder(tmp_path / "images", "val", {f"class{number}": 1 for number in range(10)}, size=(40, 36))
    words = ["TRAIN.DATASET", tmp_path / "images", "DATA.NAME", "imagefolder", "DATA.CROP", "pad", "TRAIN.WORKERS", 0,
             "TRAIN.BATCH_SIZE", 4, "TRAIN.GLOBAL_BATCH_SIZE", 8, "OUT_DIR", tmp_path, "RNG_SEED", 1,
             "LOG.TENSORBOARD", False]  # fmt: skip
    cfg, launch, cpu = semantics.recipe(f"cifar10/{name}", *words), detect_launch(), torch.device("cpu")
    run = build_run(cfg, build_loader(cfg, launch, cpu, train=True), build_loader(cfg, launch, cpu, train=False))
    before = [parameter.detach().clone() for parameter in run.state.model.parameters()]
    with run.stop, run.log:
        train_epoch(run)
    assert run.state.step == 2
    assert not any(map(torch.equal, before, run.state.model.parameters()))
