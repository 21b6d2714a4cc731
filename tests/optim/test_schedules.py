"""Learning rates against the formulas, written out again."""

import math

import numpy as np
import pytest
from support.runs import make_cfg

from distribuuuu.optim.schedules import build_lr


def schedule(*words):
    return build_lr(make_cfg(*words), 1)


def test_cosine_with_warmup_to_the_twelfth_digit():
    lr_at = schedule("OPTIM.BASE_LR", 0.4, "OPTIM.MIN_LR", 0.01)
    for epoch in range(100):
        expected = 0.4 * ((1 - 0.01) * (1 + math.cos(math.pi * epoch / 100)) / 2 + 0.01)
        if epoch < 5:
            expected *= 0.1 * (1 - epoch / 5) + epoch / 5
        assert lr_at(epoch) == pytest.approx(expected, abs=1e-12)


def test_steps_may_begin_with_zero_or_not():
    for steps in ["[0, 30, 60, 90]", "[30, 60, 90]"]:
        lr_at = schedule("OPTIM.LR_POLICY", "steps", "OPTIM.STEPS", steps, "OPTIM.WARMUP_EPOCHS", 0, "OPTIM.BASE_LR", 1)
        factors = [round(lr_at(epoch), 9) for epoch in (0, 29, 30, 59, 60, 89, 90, 99)]
        assert factors == [1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]


def test_lin_and_exp_go_from_one_to_min_lr():
    for policy, middle in (("lin", 0.55), ("exp", math.sqrt(0.1))):
        lr_at = schedule("OPTIM.LR_POLICY", policy, "OPTIM.MIN_LR", 0.1, "OPTIM.WARMUP_EPOCHS", 0, "OPTIM.BASE_LR", 1)
        assert [lr_at(0), lr_at(50), lr_at(100)] == pytest.approx([1, middle, 0.1])


def test_the_rate_is_held_for_the_epoch_unless_it_is_updated_by_step():
    held, moving = schedule(), schedule("OPTIM.LR_UPDATE", "step")
    assert held(7.99) == held(7)
    assert moving(7.99) < moving(7.5) < moving(7) == held(7)
    assert schedule("OPTIM.WARMUP_EPOCHS", 0)(0) == 0.2


def test_in_timm_the_warmup_replaces_the_cosine():
    lr_at = schedule("OPTIM.BASE_LR", 1, "OPTIM.LR_POLICY", "cos_timm", "OPTIM.WARMUP_FACTOR", 0.2)
    assert [lr_at(epoch) for epoch in range(5)] == pytest.approx([0.2, 0.36, 0.52, 0.68, 0.84], rel=1e-12)
    assert [lr_at(epoch) for epoch in range(5, 100)] == [schedule("OPTIM.BASE_LR", 1)(epoch) for epoch in range(5, 100)]


def test_a_cosine_after_the_warmup_takes_the_rest_of_the_epochs():
    words = ("OPTIM.LR_POLICY", "cos_after_warmup", "OPTIM.LR_UPDATE", "step", "OPTIM.WARMUP_EPOCHS", 2.5)
    lr_at = schedule(*words, "OPTIM.MIN_LR", 0.01, "OPTIM.MAX_EPOCH", 12, "OPTIM.BASE_LR", 2)
    for epoch in (0, 1, 2.5, 2.6, 7.25, 12):
        progress = max(0, epoch - 2.5) / (12 - 2.5)
        warmup = min(1, 0.1 + 0.9 * epoch / 2.5)
        expected = 2 * warmup * (0.99 * (1 + math.cos(math.pi * progress)) / 2 + 0.01)
        assert lr_at(epoch) == pytest.approx(expected, rel=1e-12)


def test_the_triangle_is_the_interpolation():
    words = ("OPTIM.LR_POLICY", "tri", "OPTIM.LR_UPDATE", "step", "OPTIM.WARMUP_EPOCHS", 2.5)
    words += ("OPTIM.WARMUP_FACTOR", 0.1, "OPTIM.MIN_LR", 0.05, "OPTIM.MAX_EPOCH", 16, "OPTIM.BASE_LR", 2)
    lr_at = schedule(*words)
    for epoch in (0, 0.5, 2.5, 3, 9.25, 16):
        assert lr_at(epoch) == pytest.approx(np.interp(epoch, [0, 2.5, 16], [0.2, 2, 0.1]), rel=1e-12)
