"""Recipe of the plain ViT-S: what the config does, against the figures and formulas of big_vision.

Source: github.com/google-research/big_vision at 0127fb6b337e: configs/vit_s16_i1k.py, models/vit.py, optax.py,
utils.py (schedule, mixup, loss), train.py, pp/ops_image.py, pp/archive/autoaugment.py.
"""

import math

import numpy as np
import pytest
import torch
from support.recipe_facts import RECIPES
from support.recipe_measures import initial_model, norm_gammas, recipe, train_transform
from torch import nn

from distribuuuu.data import randaugment
from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.data.mixup import MixParams, PairMixer, build_mixer
from distribuuuu.data.normalize import Normalizer
from distribuuuu.tasks.losses import build_loss

NAME = "imagenet/plain_vit_small"
WIDTH, HIDDEN = 384, 1536


def test_initial_values_are_drawn_as_by_flax():
    model, expected = initial_model(recipe(NAME)), RECIPES["plain_vit_small"]["init"]
    largest = {name: model.get_parameter(name).abs().max().item() for name in expected}
    assert largest["blocks.0.attn.qkv.weight"] == pytest.approx(math.sqrt(6 / (2 * WIDTH)), rel=1e-3)
    assert largest["blocks.3.mlp.fc1.weight"] == pytest.approx(math.sqrt(6 / (WIDTH + HIDDEN)), rel=1e-3)
    # A normal distribution that is cut off at two deviations, and scaled back to the variance.
    for name in ("patch_embed.proj.weight", "head.pre_logits.weight"):
        assert largest[name] == pytest.approx(2 / 0.87962566 * expected[name], rel=1e-2)
    assert len(norm_gammas(recipe(NAME))) == 25


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


def test_the_range_of_values_is_big_visions():
    """value_range(-1, 1)."""
    cfg, images = recipe(NAME), torch.tensor([0, 51, 255], dtype=torch.uint8).expand(1, 3, 1, 3)
    values = Normalizer(torch.device("cpu"), cfg.DATA.MEAN, cfg.DATA.STD, channels_last=False)(images)
    torch.testing.assert_close(values[0, :, 0], torch.tensor([[-1.0, -0.6, 1.0]]).expand(3, 3))
