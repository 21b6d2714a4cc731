"""Recipe of the plain ViT-S: what the config does, against the figures and formulas of big_vision.

Source: github.com/google-research/big_vision at 0127fb6b337e: configs/vit_s16_i1k.py, models/vit.py, optax.py,
utils.py (schedule, mixup, loss), train.py, pp/ops_image.py, pp/archive/autoaugment.py.
"""

import math

import numpy as np
import pytest
import torch
from support.recipe_measures import initial_model, recipe
from torch import nn

from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.data.mixup import build_mixer

NAME = "imagenet/plain_vit_small"
WIDTH, HIDDEN = 384, 1536


def test_the_initial_weights_are_those_of_vit_py():
    glorot, mlp = math.sqrt(2 / (2 * WIDTH)), math.sqrt(2 / (WIDTH + HIDDEN))
    parameters = dict(initial_model(recipe(NAME)).named_parameters())
    for key, std in {
        "patch_embed.proj.weight": math.sqrt(1 / (3 * 16 * 16)), "patch_embed.proj.bias": 0,  # lecun_normal
        "blocks.0.attn.qkv.weight": glorot, "blocks.5.attn.proj.weight": glorot,  # three kernels
        "blocks.11.attn.qkv.bias": 0, "blocks.3.mlp.fc1.weight": mlp, "blocks.3.mlp.fc2.weight": mlp,
        "blocks.3.mlp.fc1.bias": 1e-6, "blocks.3.mlp.fc2.bias": 1e-6, "head.pre_logits.weight": math.sqrt(1 / WIDTH),
        "head.pre_logits.bias": 0, "head.fc.weight": 0, "head.fc.bias": 0,
    }.items():  # fmt: skip
        found = parameters[key].detach()
        assert float(found.std(correction=0)) == pytest.approx(std, rel=4 / math.sqrt(found.numel())), key


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


def test_a_step_has_one_mixing_factor_on_any_number_of_processes():
    cfg, lams = recipe(NAME), []
    for step in range(200):
        drawn = [build_mixer(cfg, plan_batches(128, 1024, world), rank=0).draw(0, 0, step) for world in (1, 4, 8)]
        assert all(len(each.lam) == 1 and each.mixed.all() and not each.use_cutmix.any() for each in drawn)
        assert len({float(each.lam[0]) for each in drawn}) == 1
        lams.append(float(drawn[0].lam[0]))
    assert np.var(lams) == pytest.approx(1 / (4 * (2 * 0.2 + 1)), rel=0.2)  # of Beta(0.2, 0.2)
