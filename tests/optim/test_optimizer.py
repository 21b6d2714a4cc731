"""Optimizers, their groups and arguments, clipping and the rate by the batch, against timm and torch."""

import math

import pytest
import timm
import torch
from support.runs import make_cfg, problems_of
from support.tables import each_row
from timm.optim import create_optimizer_v2
from torch import nn

from distribuuuu.checkpoint.io import CheckpointError, load_optimizer
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.optim.name_patterns import parameter_kinds
from distribuuuu.optim.optimizer import build_optimizer, parameter_groups
from distribuuuu.optim.precision import build_clipper
from distribuuuu.optim.schedules import build_lr, scaled_lr, set_lr
from distribuuuu.trainer import train_model

TINY = ["test_vit", "test_vit2", "test_resnet", "test_efficientnet", "test_convnext"]
NO_DECAY = ("OPTIM.NORM_WEIGHT_DECAY", 0, "OPTIM.BIAS_WEIGHT_DECAY", 0)


def tiny(name: str = "test_vit", **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=3, **kwargs)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, num: int = 3, lr: float = 0.01) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(num):
        set_lr(optimizer, lr / (1 + step))
        optimizer.zero_grad()
        model(torch.randn(5, 3, 4, 4, generator=generator)).square().sum().backward()
        optimizer.step()


def settings_of(model: nn.Module, groups: list[dict]) -> dict[str, tuple[float, float]]:
    """Return the weight decay and the share of the learning rate of each parameter, each once."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pairs = [(names[id(parameter)], (group["weight_decay"], group.get("lr_scale", 1.0)))
             for group in groups for parameter in group["params"]]  # fmt: skip
    assert len(pairs) == len(dict(pairs))
    return dict(pairs)


def test_the_default_is_sgd_with_one_group_to_the_bit():
    ours, theirs = small_model(), small_model()
    theirs[0].bias.requires_grad = ours[0].bias.requires_grad = False
    trainable = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    groups = [{"params": trainable, "weight_decay": 5e-5}]
    expected = torch.optim.SGD(groups, lr=0.2, momentum=0.9, dampening=0.0, nesterov=True)
    optimizer = build_optimizer(make_cfg(), ours)
    assert type(optimizer) is torch.optim.SGD
    take_steps(ours, optimizer)
    take_steps(theirs, expected)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert build_optimizer(make_cfg("OPTIM.KWARGS.maximize", True), ours).defaults["maximize"]
    before, after = (item.state_dict() for item in (expected, optimizer))
    at_once = [{**group, "foreach": True} for group in before["param_groups"]]
    assert at_once == after["param_groups"] and before["state"].keys() == after["state"].keys()


@pytest.mark.parametrize("name", TINY)
def test_without_decay_of_norms_and_biases_the_groups_are_those_of_timm(name):
    model = tiny(name)
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    expected = timm.optim.param_groups_weight_decay(model, 0.05, no_weight_decay_list=exempt)
    groups = parameter_groups(make_cfg("OPTIM.WEIGHT_DECAY", 0.05, *NO_DECAY), model)
    assert settings_of(model, groups) == settings_of(model, expected) and len(groups) == 2
    expected = timm.optim.param_groups_layer_decay(model, 0.05, exempt, layer_decay=0.65)
    groups = parameter_groups(make_cfg("OPTIM.WEIGHT_DECAY", 0.05, *NO_DECAY, "OPTIM.LAYER_DECAY", 0.65), model)
    assert settings_of(model, groups) == settings_of(model, expected)


def test_factors_multiply_the_rate_of_what_their_patterns_match_and_the_first_counts():
    model = small_model()
    words = ("FINETUNE.LR_MULT.4.bias", 5, "FINETUNE.LR_MULT.4", 10, "FINETUNE.LR_MULT.[01]", 0.5)
    optimizer = build_optimizer(make_cfg(*words), model)
    set_lr(optimizer, 0.2)
    expected = {"0.weight": 0.1, "0.bias": 0.1, "1.weight": 0.1, "1.bias": 0.1, "4.weight": 2.0, "4.bias": 1.0}
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert {name: rates[id(weight)] for name, weight in model.named_parameters()} == pytest.approx(expected)
    assert settings_of(model, parameter_groups(make_cfg("FINETUNE.LR_MULT.4", 3), model))["0.weight"] == (5e-5, 1.0)


def test_each_kind_has_its_own_weight_decay():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.MultiheadAttention(4, 2))
    model.scale = nn.Parameter(torch.ones(()))
    kinds: dict[str, list[str]] = {}
    for name, kind in parameter_kinds(model).items():
        kinds.setdefault(kind, []).append(name)
    assert kinds == {
        "norm": ["scale", "1.weight", "1.bias"], "weight": ["0.weight", "2.in_proj_weight", "2.out_proj.weight"],
        "bias": ["0.bias", "2.in_proj_bias", "2.out_proj.bias"],
    }  # fmt: skip
    words = ("OPTIM.WEIGHT_DECAY", 0.3, "OPTIM.NORM_WEIGHT_DECAY", 0.2, "OPTIM.BIAS_WEIGHT_DECAY", 0.1)
    groups = build_optimizer(make_cfg(*words), model).param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.2, 3), (0.3, 3), (0.1, 3)]
    groups = build_optimizer(make_cfg(*words[:4]), model).param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.2, 3), (0.3, 6)]
    assert len(build_optimizer(make_cfg("OPTIM.WEIGHT_DECAY", 0, *NO_DECAY), model).param_groups) == 1


@pytest.mark.parametrize(("name", "given"), [
    ("adamw", {"amsgrad": True}), ("lamb", {"max_grad_norm": 0.1, "trust_clip": True}), ("lars", {}), ("lion", {}),
    ("muon", {"ns_steps": 2}), ("rmsproptf", {}), ("AdamW", {}),
])  # fmt: skip
def test_the_optimizers_of_timm_take_the_same_steps_with_their_arguments(name, given):
    ours, theirs = small_model(), small_model()
    words = [word for key, value in given.items() for word in (f"OPTIM.KWARGS.{key}", value)]
    cfg = make_cfg("OPTIM.NAME", name, "OPTIM.WEIGHT_DECAY", 0.05, "OPTIM.MOMENTUM", 0.8, *NO_DECAY, *words)
    optimizer = build_optimizer(cfg, ours)
    expected = create_optimizer_v2(theirs, name, lr=0.2, weight_decay=0.05, momentum=0.8, **given)
    assert type(optimizer) is type(expected)
    take_steps(ours, optimizer)
    take_steps(theirs, expected)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):  # lamb's norm is summed group by group
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_values_that_do_not_fit_are_reported_with_their_key():
    for words, said in [
        (("OPTIM.NAME", "adahessian"), "OPTIM.NAME .*unknown optimizer"),
        (("OPTIM.NAME", "lion", "OPTIM.EPS", 1e-8), "OPTIM.EPS .*lion has no eps"),
        (("OPTIM.NAME", "adamw", "OPTIM.BETAS", "[2, 0.9]"), "OPTIM.NAME .*betas .2, 0.9.: Invalid beta"),
        (("OPTIM.NAME", "adamw", "OPTIM.BETAS", "[0.9]"), r"OPTIM.BETAS .*adamw takes 2, not \[0.9\]"),
        (("OPTIM.NAME", "adamw", "OPTIM.KWARGS.amsgard", 1), "OPTIM.KWARGS.amsgard.*no such argument.*mean amsgrad"),
        (("OPTIM.KWARGS.rho", 1), "no such argument.*one of maximize"),
        (("OPTIM.LAYER_DECAY", 0.5), "OPTIM.LAYER_DECAY: Sequential has no group matcher"),
        (("FINETUNE.LR_MULT.fc", 3), "FINETUNE.LR_MULT.fc: 'fc' is the name of no parameter or module; the model has"),
        (("FINETUNE.LR_MULT.*", 2, "FINETUNE.LR_MULT.0", 3), "FINETUNE.LR_MULT.0: matches only what is frozen or what"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            build_optimizer(make_cfg(*words), small_model())
    make_cfg("OPTIM.NAME", "rmsprop", "OPTIM.MOMENTUM", 0)  # a conflict with the settings of sgd only


def test_the_learning_rate_is_scaled_by_the_batch():
    for policy, factor in [("linear", 8.0), ("sqrt", math.sqrt(8.0))]:
        cfg = make_cfg("OPTIM.LR_SCALE", policy, "OPTIM.LR_SCALE_BATCH", 128, "OPTIM.BASE_LR", 0.1)
        assert scaled_lr(cfg, 1024) == pytest.approx(0.1 * factor)
        plain, scaled = build_lr(cfg, 128), build_lr(cfg, 1024)
        expected = [factor * plain(epoch) for epoch in (0, 3, 50, 99)]
        assert [scaled(epoch) for epoch in (0, 3.5, 50, 99)] == pytest.approx(expected)
        assert build_optimizer(cfg, small_model(), 1024).defaults["lr"] == scaled_lr(cfg, 1024)


def test_another_optimizer_is_refused_on_resuming(copied_run, small_cfg):
    with pytest.raises(CheckpointError, match="of OPTIM.NAME sgd, here it is adamw; .* TRAIN.LOAD_OPT"):
        train_model(small_cfg("OPTIM.NAME", "adamw"))
    with pytest.raises(CheckpointError, match="parameter groups"):
        train_model(small_cfg(*NO_DECAY))


def with_gradients(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3).double()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = scale * 10.0 ** (number % 5 - 4) * torch.randn_like(parameter)
    return model


@each_row(("words", "said"), [
    ("OPTIM.NAME adamw OPTIM.KWARGS.betas [0.9,0.9]", "OPTIM.KWARGS.betas (command line): is an option; fix"),
    ("OPTIM.KWARGS.weight_decay 1", "fix: set OPTIM.WEIGHT_DECAY instead"), ("OPTIM.KWARGS.lr 1", "set OPTIM.BASE_LR"),
    ("OPTIM.KWARGS.momentum 1", "set OPTIM.MOMENTUM"), ("OPTIM.KWARGS.nesterov 1", "set OPTIM.NESTEROV"),
    ("OPTIM.KWARGS.fused True", "is set by the trainer; fix: remove it"),
])  # fmt: skip
def test_what_an_option_sets_and_what_conflicts_is_refused_when_the_config_is_read(words, said):
    (problem,) = problems_of(load_cfg, None, words.split())
    assert said in problem


@pytest.mark.parametrize("limit", [1e-3, 1e6])
def test_clipping_by_the_norm_has_the_bits_of_torch(limit):
    ours, theirs = with_gradients(), with_gradients()
    next(ours.parameters()).grad = next(theirs.parameters()).grad = None
    build_clipper(make_cfg("OPTIM.CLIP_NORM", limit))(ours.parameters())
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    for mine, peer in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is peer.grad is None or torch.equal(mine.grad, peer.grad)
    build_clipper(make_cfg("OPTIM.CLIP_NORM", limit))(nn.Linear(1, 1).parameters())  # without gradients


def test_a_resume_takes_factors_and_schedules_from_the_config_and_not_from_the_checkpoint():
    words = ("OPTIM.WEIGHT_DECAY", 0.04, "OPTIM.MAX_EPOCH", 5)
    before = build_optimizer(make_cfg(*words), small_model(), 1)
    for group in before.param_groups:
        group["lr_scale"] = 10.0
    after = build_optimizer(make_cfg(*words[2:], "OPTIM.WEIGHT_DECAY", 0.1), small_model(), 1)
    load_optimizer(after, before.state_dict(), "x")
    set_lr(after, 0.5)
    assert [(group["lr"], group["weight_decay"]) for group in after.param_groups] == [(0.5, 0.1)]
    for policy in ("tri", "cos_after_warmup"):  # it may end with its warm-up
        lr_at = build_lr(make_cfg("OPTIM.LR_POLICY", policy, "OPTIM.MAX_EPOCH", 5, "OPTIM.WARMUP_EPOCHS", 5), 1)
        assert lr_at(1) < lr_at(3) < lr_at(4.9)
