"""Recipe of the plain ViT-S: what the config does, against the figures and formulas of big_vision.

Source: github.com/google-research/big_vision at 0127fb6b337e: configs/vit_s16_i1k.py, models/vit.py, optax.py,
utils.py (schedule, mixup, loss), train.py, pp/ops_image.py, pp/archive/autoaugment.py.
"""

import math

import numpy as np
import pytest
import torch
from support.recipe_semantics import (
    Evaluation,
    drop_path_rates,
    evaluation,
    init_std,
    initial_model,
    learning_rates,
    norm_gammas,
    num_steps,
    optimizer_defaults,
    parameter_options,
    positions,
    recipe,
    reported_weights,
    train_crop,
    train_transform,
)
from torch import nn

from distribuuuu.data import randaugment
from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.data.datasets.base import get_dataset
from distribuuuu.data.mixup import MixParams, PairMixer, build_mixer
from distribuuuu.data.normalize import Normalizer, statistics_of
from distribuuuu.tasks.losses import build_loss

NAME = "imagenet/plain_vit_small"
WIDTH, HIDDEN, PATCH = 384, 1536, 16


def published_rate(step: int, total_steps: int) -> float:
    """utils.py, create_learning_rate_schedule: decay_type cosine, warmup_steps 10_000, base 1, times config.lr."""
    progress = min(1.0, max(0.0, (step - 10_000) / (total_steps - 10_000)))
    return 1e-3 * 0.5 * (1 + math.cos(math.pi * progress)) * min(1.0, step / 10_000)


def test_learning_rates_are_big_visions():
    cfg = recipe(NAME)
    steps, at = num_steps(cfg), positions(cfg)
    assert len(at) == 12 and steps == 1251
    expected = [published_rate(epoch * steps + step, 90 * steps) for epoch, step in at]
    np.testing.assert_allclose(learning_rates(cfg, at), expected, rtol=2e-5)
    assert learning_rates(cfg, [(7, 1243), (8, 0)]) == pytest.approx([1e-3, 1e-3], rel=1e-4)


def test_kernels_decay_and_nothing_else():
    """optax.py: add_decayed_weights with the pattern .*/kernel$ and 1e-4, scaled by the schedule but not by lr."""
    cfg = recipe(NAME)
    found = {name: options.weight_decay for name, options in parameter_options(cfg).items()}
    kernels = {name for name, value in initial_model(cfg).named_parameters() if value.ndim > 1} - {"pos_embed"}
    assert {name for name, decay in found.items() if decay} == kernels
    assert [found[name] * cfg.OPTIM.BASE_LR for name in kernels] == [pytest.approx(1e-4)] * len(kernels)
    blocks = {
        f"blocks.{i}.{layer}.weight" for i in range(12) for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    }
    assert kernels == blocks | {"patch_embed.proj.weight", "head.pre_logits.weight", "head.fc.weight"}


def test_the_optimizer_is_adam_of_optax():
    """optax.scale_by_adam has b1 0.9, b2 0.999 and eps 1e-8."""
    cfg = recipe(NAME)
    options = optimizer_defaults(cfg)
    assert (options["betas"], options["eps"], options["lr"]) == ((0.9, 0.999), 1e-8, 1e-3)
    assert (cfg.OPTIM.CLIP_NORM, cfg.OPTIM.MAX_EPOCH, cfg.TRAIN.GLOBAL_BATCH_SIZE) == (1, 90, 1024)


# The model


def test_initial_values_are_those_of_flax():
    model, xavier = initial_model(recipe(NAME)), math.sqrt(2 / (WIDTH + WIDTH))
    expected = {
        "patch_embed.proj.weight": math.sqrt(1 / (3 * PATCH * PATCH)),  # lecun_normal
        "patch_embed.proj.bias": 0,
        "blocks.0.attn.qkv.weight": xavier,  # three kernels of their own
        "blocks.5.attn.proj.weight": xavier,
        "blocks.11.attn.qkv.bias": 0,
        "blocks.3.mlp.fc1.weight": math.sqrt(2 / (WIDTH + HIDDEN)),
        "blocks.3.mlp.fc2.weight": math.sqrt(2 / (WIDTH + HIDDEN)),
        "blocks.3.mlp.fc1.bias": 1e-6,
        "blocks.3.mlp.fc2.bias": 1e-6,
        "head.pre_logits.weight": math.sqrt(1 / WIDTH),  # lecun_normal
        "head.pre_logits.bias": 0,
        "head.fc.weight": 0,
        "head.fc.bias": 0,
    }
    for name, std in init_std(model, expected).items():
        assert std == pytest.approx(expected[name], rel=0.02 if "weight" in name else 0.1), name
    largest = {name: model.get_parameter(name).abs().max().item() for name in expected}
    assert largest["blocks.0.attn.qkv.weight"] == pytest.approx(math.sqrt(6 / (2 * WIDTH)), rel=1e-3)
    assert largest["blocks.3.mlp.fc1.weight"] == pytest.approx(math.sqrt(6 / (WIDTH + HIDDEN)), rel=1e-3)
    # A normal distribution that is cut off at two deviations, and scaled back to the variance.
    for name in ("patch_embed.proj.weight", "head.pre_logits.weight"):
        assert largest[name] == pytest.approx(2 / 0.87962566 * expected[name], rel=1e-2)
    gammas = norm_gammas(model)
    assert len(gammas) == 25 and set(gammas.values()) == {1.0} and not any(drop_path_rates(recipe(NAME)))
    assert {layer.eps for layer in model.modules() if isinstance(layer, nn.LayerNorm)} == {1e-6}


def test_activations_positions_and_the_head_are_those_of_vit_py():
    model = initial_model(recipe(NAME))
    x = torch.linspace(-4, 4, 101)
    gelu = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(model.blocks[7].mlp.act(x), gelu, rtol=1e-5, atol=1e-6)
    # posemb_sincos_2d: column 3 of row 2, by frequency 10,000 ** -(k / 95) for k in 0 to 95.
    angles = [[axis * 10_000 ** -(k / 95) for k in range(96)] for axis in (3, 2)]
    expected = [wave(angle) for axis in angles for wave in (math.sin, math.cos) for angle in axis]
    np.testing.assert_allclose(model.pos_embed[0, 2 * 14 + 3].detach(), expected, atol=1e-5)
    assert not model.pos_embed.requires_grad
    head, tokens = model.head, torch.randn(2, 196, WIDTH, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(1000, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        head.fc.weight.copy_(weight)
        hidden = torch.tanh(tokens.mean(1) @ head.pre_logits.weight.T)  # rep_size True: a hidden layer, then tanh
        torch.testing.assert_close(model.forward_head(tokens), hidden @ weight.T, rtol=1e-4, atol=1e-4)
        head.fc.weight.zero_()
    assert isinstance(model.norm, nn.LayerNorm) and isinstance(model.fc_norm, nn.Identity)
    assert sum(parameter.numel() for parameter in model.parameters()) == 22_049_896 + WIDTH * WIDTH + WIDTH


# Mixing and the loss


def batch(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, 3, 6, 5, generator=generator), torch.randint(0, 1000, (num,), generator=generator)


def test_a_step_has_one_mixing_factor_on_any_number_of_processes():
    cfg, lams = recipe(NAME), []
    for step in range(200):
        drawn = [build_mixer(cfg, plan_batches(128, 1024, world), rank=0).draw(0, 0, step) for world in (1, 4, 8)]
        assert all(len(each.lam) == 1 and each.mixed.all() and not each.use_cutmix.any() for each in drawn)
        assert len({float(each.lam[0]) for each in drawn}) == 1
        lams.append(float(drawn[0].lam[0]))
    assert np.var(lams) == pytest.approx(1 / (4 * (2 * 0.2 + 1)), rel=0.2)  # of Beta(0.2, 0.2)


def test_a_factor_and_its_complement_give_the_same_images_so_at_least_one_half_needs_no_option(monkeypatch):
    """utils.py, get_mixup: a = max(a, 1 - a)."""
    cfg, [images, labels] = recipe(NAME), batch(8)
    mixer, results = build_mixer(cfg, plan_batches(8, 8, 1), rank=0), []
    for lam in (0.3, 0.7):
        on, zero = np.ones(1, dtype=bool), np.zeros(1)
        drawn = MixParams(np.array([lam]), ~on, on, zero, zero)
        monkeypatch.setattr(PairMixer, "draw", lambda *position, drawn=drawn: drawn)
        mixed, targets = mixer(images.clone(), labels, 0, 0, 0, 0)
        results.append([*zip(mixed, targets, strict=True)])
    for place, (image, target) in enumerate(results[0]):
        other_image, other_target = results[1][place ^ 1]
        torch.testing.assert_close(image, other_image)
        torch.testing.assert_close(target, other_target)


def test_images_targets_and_loss_of_a_pair_are_big_visions():
    """A batch of two images, of which each is the other's partner in jnp.roll too."""
    cfg = recipe(NAME, "TRAIN.GLOBAL_BATCH_SIZE", 2, "TRAIN.BATCH_SIZE", 2)
    mixer, criterion = build_mixer(cfg, plan_batches(2, 2, 1), rank=0), build_loss(cfg)
    for step in range(10):
        images, labels = batch(2)
        a = float(mixer.draw(0, 0, step).lam[0])
        expected = a * images + (1 - a) * images.roll(1, 0)
        one_hot = nn.functional.one_hot(labels, 1000).float()
        expected_targets = a * one_hot + (1 - a) * one_hot.roll(1, 0)
        mixed, targets = mixer(images.clone(), labels, 0, 0, step, 0)
        torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(targets, expected_targets, rtol=0, atol=1e-6)
        logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(step)) * 3
        loss = -(expected_targets * logits.log_softmax(-1)).sum(-1).mean()  # softmax_xent
        assert float(criterion(logits, targets)) == pytest.approx(float(loss), abs=1e-6)


# Images


def test_the_policy_has_the_operations_and_magnitudes_of_big_vision():
    """randaug(2,10): level_to_arg at level 10, with cutout_const 40 and translate_const 100; replace_value 128."""
    policy = train_transform(recipe(NAME)).policy
    assert policy.operation is randaugment.randaugment and randaugment.NUM_OPERATIONS == 2
    assert list(randaugment.OPERATIONS) == [
        "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast", "Brightness",
        "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd",
    ]  # fmt: skip
    names = ("ENHANCEMENT", "ROTATION", "SHEAR", "TRANSLATION", "CUTOUT", "POSTERIZE_BITS", "SOLARIZE_ADDITION", "GRAY")
    assert [getattr(randaugment, name) for name in names] == [1.9, 30, 0.3, 100, 40, 4, 110, 128]


def test_the_crop_and_the_range_of_values_are_big_visions():
    """decode_jpeg_and_inception_crop(224): area_min 5, area_max 100, ratio 0.75 to 1.33; value_range(-1, 1)."""
    cfg = recipe(NAME)
    crop = train_crop(cfg)
    assert (crop.size, tuple(crop.scale), tuple(crop.ratio), crop.flip) == (224, (0.05, 1), (0.75, 1.33), 0.5)
    assert crop.interpolation == "opencv_linear"  # get_resize: bilinear, antialias False
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).expand(1, 3, 1, 3)
    statistics = statistics_of(cfg, get_dataset(cfg.DATA.NAME))
    values = Normalizer(torch.device("cpu"), *statistics, channels_last=False)(images)
    torch.testing.assert_close(values[0, :, 0], torch.tensor([[-1.0, -0.6, 1.0]]).expand(3, 3))


def test_evaluation_is_big_visions():
    cfg = recipe(NAME)
    assert evaluation(cfg) == Evaluation(256, 224, "opencv_area", False)  # resize_small(256), central_crop(224)
    assert reported_weights(cfg) == "raw"
