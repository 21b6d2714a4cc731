"""OPTIM.KWARGS, OPTIM.CLIP and OPTIM.WEIGHT_DECAY_END against the components of timm, torch and DINO, in float64."""

import math

import pytest
import timm
import torch
from support.errors import problems_of
from support.runs import make_cfg
from support.tables import each_row
from timm.optim import create_optimizer_v2
from timm.utils.agc import adaptive_clip_grad
from torch import nn

from distribuuuu.config import load_cfg
from distribuuuu.models.head import head_parameters
from distribuuuu.optim.optimizer import build_optimizer
from distribuuuu.optim.precision import build_clipper
from distribuuuu.optim.schedules import build_weight_decay


def with_gradients(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3).double()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = scale * 10.0 ** (number % 5 - 4) * torch.randn_like(parameter)
    return model


# ------------------------------------------------------------------------------------------------- arguments

ARGUMENTS = [
    ("sgd", {"maximize": True}), ("adamw", {"amsgrad": True}), ("lamb", {"max_grad_norm": 0.1, "trust_clip": True}),
    ("muon", {"ns_steps": 2, "nesterov": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given"), ARGUMENTS)
def test_arguments_reach_the_constructor(name, given):
    words = [word for key, value in given.items() for word in (f"OPTIM.KWARGS.{key}", value)]
    cfg = make_cfg("OPTIM.NAME", name, "OPTIM.BASE_LR", 0.01, "OPTIM.WEIGHT_DECAY", 0.1, *words)
    ours, theirs, plain = (with_gradients() for _ in range(3))
    settings = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9}
    if name == "sgd":
        peers = [torch.optim.SGD(model.parameters(), nesterov=True, **settings, **more)
                 for model, more in ((theirs, given), (plain, {}))]  # fmt: skip
    else:
        group = {"weight_decay": 0.1}
        peers = [create_optimizer_v2([{"params": list(model.parameters()), **group}], name, **settings, **more)
                 for model, more in ((theirs, given), (plain, {}))]  # fmt: skip
    for optimizer in (build_optimizer(cfg, ours), *peers):
        for _ in range(3):
            optimizer.step()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad *= -0.01
    mine, peer, without = (torch.cat([p.flatten() for p in model.parameters()]) for model in (ours, theirs, plain))
    assert torch.equal(mine, peer) and not torch.equal(mine, without)


@each_row(("words", "said"), [
    ("OPTIM.NAME adamw OPTIM.KWARGS.betas [0.9,0.9]", "OPTIM.KWARGS.betas (command line): is an option; fix"),
    ("OPTIM.KWARGS.weight_decay 1", "fix: set OPTIM.WEIGHT_DECAY instead"), ("OPTIM.KWARGS.lr 1", "set OPTIM.BASE_LR"),
    ("OPTIM.KWARGS.momentum 1", "set OPTIM.MOMENTUM"), ("OPTIM.KWARGS.nesterov 1", "set OPTIM.NESTEROV"),
    ("OPTIM.KWARGS.fused True", "is set by the trainer; fix: remove it"),
    ("OPTIM.KWARGS.state_path /etc/passwd", "names a file or an address"),
    ("OPTIM.CLIP agc", "OPTIM.CLIP_LIMIT: got 0; OPTIM.CLIP agc expects a number above 0, e.g. 0.01"),
    ("OPTIM.CLIP agc OPTIM.CLIP_LIMIT nan", "OPTIM.CLIP_LIMIT (command line): got nan; expected a finite number"),
    ("OPTIM.CLIP vlaue", "did you mean value"),
    ("OPTIM.WEIGHT_DECAY 0 OPTIM.WEIGHT_DECAY_END 0.1", "OPTIM.WEIGHT_DECAY_END (command line): got 0.1; "),
])  # fmt: skip
def test_what_an_option_sets_and_what_conflicts_is_refused_when_the_config_is_read(words, said):
    (problem,) = problems_of(load_cfg, None, words.split())
    assert said in problem


def test_an_unknown_argument_is_refused_with_the_nearest():
    for name, given, said in (("adamw", "amsgard", "did you mean amsgrad?"), ("sgd", "rho", "one of maximize"),
                              ("lamb", "layer_decay", "OPTIM.KWARGS.layer_decay")):  # fmt: skip
        (problem,) = problems_of(
            build_optimizer, make_cfg("OPTIM.NAME", name, f"OPTIM.KWARGS.{given}", 1), nn.Linear(2, 2)
        )
        assert said in problem and "no such argument" in problem


# -------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("limit", [1e-3, 0.01, 10.0])
def test_adaptive_clipping_is_that_of_timm_without_the_head(limit):
    cfg = make_cfg(
        "MODEL.ARCH", "timm/test_resnet", "MODEL.NUM_CLASSES", 3, "OPTIM.CLIP", "agc", "OPTIM.CLIP_LIMIT", limit
    )
    ours, theirs, raw = (with_gradients() for _ in range(3))
    head = head_parameters(cfg, ours)
    assert [id(p) for p in head] == [id(p) for p in list(ours.parameters())[-2:]], "as timm leaves out the last two"
    build_clipper(cfg, head)(ours.parameters())
    adaptive_clip_grad(list(theirs.parameters())[:-2], limit)
    for mine, peer in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, peer.grad, rtol=1e-14, atol=0)
    assert any(not torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), raw.parameters(), strict=True))


def test_values_are_clipped_as_torch_does_and_nan_stays():
    cfg = make_cfg("OPTIM.CLIP", "value", "OPTIM.CLIP_LIMIT", 0.01)
    for nan in (False, True):
        ours, theirs = with_gradients(), with_gradients()
        for model in (ours, theirs):
            next(model.parameters()).grad[0] = math.nan if nan else 7
        build_clipper(cfg)(ours.parameters())
        nn.utils.clip_grad_value_(theirs.parameters(), 0.01)
        for mine, peer in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, peer.grad, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------------------------- weight decay


def dino_schedule(base: float, final: float, epochs: int, steps: int) -> list[float]:
    """Return the values of `cosine_scheduler` in github.com/facebookresearch/dino without a warm-up."""
    total = epochs * steps
    return [final + 0.5 * (base - final) * (1 + math.cos(math.pi * step / total)) for step in range(total)]


@pytest.mark.parametrize(("base", "final"), [(0.04, 0.4), (0.4, 0.0)])
def test_weight_decay_follows_the_cosine_of_dino(base, final):
    words = ("OPTIM.WEIGHT_DECAY", base, "OPTIM.WEIGHT_DECAY_END", final, "OPTIM.MAX_EPOCH", 5)
    factor_at = build_weight_decay(make_cfg(*words, "OPTIM.LR_UPDATE", "step"))
    assert [base * factor_at(step / 7) for step in range(35)] == pytest.approx(
        dino_schedule(base, final, 5, 7), rel=1e-12
    )
    held = build_weight_decay(make_cfg(*words))
    assert [held(step / 7) for step in range(35)] == [factor_at(step // 7) for step in range(35)]
