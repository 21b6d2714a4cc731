"""Learning rates, the average of the weights, and bf16 and fp16, against their formulas."""

import json
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.failing_models import FaultyModel
from support.runs import make_cfg, newest, records
from support.states import make_state
from torch import nn

import distribuuuu
from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager, find_nonfinite
from distribuuuu.checkpoint.weights_files import by_precedence, find_weights_file
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import NonFiniteError
from distribuuuu.config.registry import MODELS
from distribuuuu.optim.ema import Ema, build_averages
from distribuuuu.optim.precision import Precision
from distribuuuu.optim.schedules import build_lr
from distribuuuu.trainer import evaluate_weights, train_model


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


def test_the_rate_is_held_for_the_epoch_unless_it_is_updated_by_step():
    held, moving = schedule(), schedule("OPTIM.LR_UPDATE", "step")
    assert held(7.99) == held(7)
    assert moving(7.99) < moving(7.5) < moving(7) == held(7)
    assert schedule("OPTIM.WARMUP_EPOCHS", 0)(0) == 0.2


def test_in_timm_the_warmup_replaces_the_cosine():
    lr_at = schedule("OPTIM.BASE_LR", 1, "OPTIM.LR_POLICY", "cos_timm", "OPTIM.WARMUP_FACTOR", 0.2)
    assert [lr_at(epoch) for epoch in range(5)] == pytest.approx([0.2, 0.36, 0.52, 0.68, 0.84], rel=1e-12)
    assert [lr_at(epoch) for epoch in range(5, 100)] == [schedule("OPTIM.BASE_LR", 1)(epoch) for epoch in range(5, 100)]


@pytest.mark.parametrize(("policy", "factor"), [
    ("lin", lambda epoch: 1 - 0.95 * epoch / 16),
    ("cos_after_warmup", lambda epoch: 0.95 * (1 + math.cos(math.pi * max(0, epoch - 2.5) / 13.5)) / 2 + 0.05),
    ("tri", lambda epoch: np.interp(epoch, [2.5, 16], [1, 0.05])),
])  # fmt: skip
def test_each_policy_is_its_formula_times_the_warmup(policy, factor):
    words = ("OPTIM.LR_POLICY", policy, "OPTIM.LR_UPDATE", "step", "OPTIM.WARMUP_EPOCHS", 2.5, "OPTIM.MIN_LR", 0.05)
    lr_at = schedule(*words, "OPTIM.WARMUP_FACTOR", 0.1, "OPTIM.MAX_EPOCH", 16, "OPTIM.BASE_LR", 2)
    for epoch in (0, 0.5, 2.5, 3, 9.25, 16):
        assert lr_at(epoch) == pytest.approx(2 * min(1, 0.1 + 0.9 * epoch / 2.5) * factor(epoch), rel=1e-12)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def walk(net: nn.Module, num: int):
    """Yield after each of `num` random changes of all that a net holds."""
    torch.manual_seed(1)
    for _ in range(num):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter))
        net(torch.randn(8, 3))  # moves the statistics
        yield


@pytest.mark.parametrize("ramp_up", [0.0, 0.25])
def test_it_is_the_loop_in_float64(ramp_up):
    net = make_net()
    ema, captured = (Ema(net, half_life=50, ramp_up=ramp_up) for _ in range(2))
    expected = {key: value.double().clone() for key, value in net.state_dict().items()}
    for step, _ in enumerate(walk(net, 40), start=1):
        ema.finish_step(0, step, 8 * step, 8)
        captured.update(torch.tensor(captured.share(0, step, 8 * step, 8)))  # as a CUDA graph does
        half_life = min(50, ramp_up * 8 * step) if ramp_up else 50
        decay = 2.0 ** (-8 / half_life)
        for key, value in net.state_dict().items():
            copied = key.endswith("tracked")
            expected[key] = value.double() if copied else decay * expected[key] + (1 - decay) * value.double()
    for key, value in ema.model.state_dict().items():
        torch.testing.assert_close(value.double(), expected[key], rtol=1e-5, atol=1e-6, msg=key)
        assert torch.equal(value, captured.model.state_dict()[key])
    assert not any(parameter.requires_grad for parameter in ema.model.parameters()) and not ema.model.training


def test_it_is_updated_every_few_steps_of_an_epoch_and_copies_before_its_start():
    net, batch, num_steps = nn.Linear(1, 1, bias=False), 4, 5
    ema, expected = Ema(net, half_life=16, every_steps=2, start_epoch=1), net.weight.item()
    torch.manual_seed(2)
    for number in range(3 * num_steps):
        nn.init.normal_(net.weight)
        epoch, step = divmod(number, num_steps)
        ema.finish_step(epoch, step, (number + 1) * batch, batch)
        if step in (0, 2, 4):
            share = 1 if (epoch, step) <= (1, 0) else 1 - 2.0 ** (-8 / 16)
            expected += share * (net.weight.item() - expected)
        assert ema.model.weight.item() == pytest.approx(expected, abs=1e-6), (epoch, step)


def test_it_counts_the_images_of_epochs_of_different_lengths(tmp_path):
    state, seen = make_state(), []
    state.averages = {"ema": SimpleNamespace(model=state.model, finish_step=lambda *place: seen.append(place[2]))}
    for num_steps in (1, 3, 2):
        for _ in range(num_steps):
            state.finish_step()
        state.finish_epoch()
    assert seen == [8, 16, 24, 32, 40, 48]
    state.load_dict(state.to_dict(), tmp_path)
    state.finish_step()
    assert seen[-1] == 56


EMA = ("EMA.HALF_LIFE", 30, "EMA.RAMP_UP", 0)


def test_both_kinds_of_weights_are_evaluated_saved_and_have_a_best_each(small_cfg, tmp_path):
    cfg = small_cfg(*EMA)
    best = train_model(cfg)
    content, log = newest(cfg.OUT_DIR), (tmp_path / "out" / "train.log").read_text()
    evaluations = {kind: [e for e in records(cfg.OUT_DIR) if e["kind"] == kind] for kind in ("eval", "eval_ema")}
    tops = {kind: max(entry["top1"] for entry in found) for kind, found in evaluations.items()}
    assert (content["best_acc1"], content["best_ema_acc1"]) == (tops["eval"], tops["eval_ema"])
    assert best == max(tops.values()) and [len(found) for found in evaluations.values()] == [2, 2]
    named = f"best ema top1: {tops['eval_ema']:.2f} (epoch {content['best_ema_epoch'] + 1}); weights: "
    assert ", ema: top1" in log and named in log and "best_ema.pth.tar" in log
    raw, averaged = (read_checkpoint(tmp_path / "out" / name) for name in ("best.pth.tar", "best_ema.pth.tar"))
    assert raw["state_dict"].keys() == averaged["state_dict"].keys() == content["ema_state_dict"].keys()
    assert not torch.equal(raw["state_dict"]["fc.weight"], averaged["state_dict"]["fc.weight"])
    assert "optimizer" not in averaged and "ema_state_dict" not in averaged
    evaluate_weights(small_cfg(*EMA, "MODEL.WEIGHTS", os.path.relpath(tmp_path / "out" / "best_ema.pth.tar")))
    assert list(json.loads((tmp_path / "out" / "test_results.json").read_text())["accuracy"]) == ["ema"]


def test_averages_of_a_task_have_names_of_their_own_and_precede_the_moving_average():
    given = {"b": 1, "a": 2}
    assert list(build_averages(make_cfg("EMA.HALF_LIFE", 30), make_net(), given)) == ["ema", "b", "a"]
    assert by_precedence(["raw", "b", "ema", "a"]) == ["a", "b", "ema", "raw"]
    for name in ("raw", "ema", "My avg"):
        with pytest.raises(ConfigError, match=f"TASK.NAME: got '{name}' from averages; expected a name of a-z"):
            build_averages(make_cfg(), make_net(), {name: 1})


def test_a_run_without_an_average_may_continue_with_one_and_vice_versa(copied_run, small_cfg):
    train_model(small_cfg(*EMA, "OPTIM.MAX_EPOCH", 3))
    assert "the weights; it starts from the raw weights" in (copied_run / "train.log").read_text()
    assert "ema_state_dict" in newest(copied_run)
    assert (copied_run / "best_ema.pth.tar").exists()
    assert distribuuuu.train(cfg := small_cfg("OPTIM.MAX_EPOCH", 4)).weights == copied_run / "best.pth.tar"
    assert "ema_state_dict" not in newest(cfg.OUT_DIR)
    assert find_weights_file(cfg.OUT_DIR) == copied_run / "best.pth.tar", "not the average of an earlier part"


@pytest.mark.parametrize("name, dtype", [("none", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_forward_pass_computes_in_the_type_and_the_weights_stay_float32(name, dtype):
    precision, net = Precision(name), nn.Linear(4, 2)
    with precision.autocast():
        logits = net(torch.ones(3, 4))
    assert logits.dtype == dtype
    precision.backward(logits.float().sum())
    precision.step(torch.optim.SGD(net.parameters(), lr=0.1), lambda parameters: None)
    assert net.weight.dtype == net.weight.grad.dtype == torch.float32


def test_float16_keeps_gradients_that_would_vanish_and_leaves_out_steps_that_overflow():
    for factor, moved, scale in [(1e-7, 1e-7, 1.0), (1e3, 0.0, 0.5)]:  # 1e-7: below half of float16's least number
        weight, precision = nn.Parameter(torch.zeros(1, 2)), Precision("fp16")
        before = precision.state_dict()["scale"]
        with precision.autocast():
            logits = nn.functional.linear(torch.ones(1, 2), weight)
        precision.backward((logits.float() * factor).sum())
        precision.step(torch.optim.SGD([weight], lr=1.0), lambda parameters: None)
        assert weight.tolist()[0] == pytest.approx([-moved] * 2, rel=0.3)
        assert precision.state_dict()["scale"] == before * scale


def test_no_checkpoint_holds_the_loss_of_a_step_that_overflowed(small_cfg, tmp_path, monkeypatch):
    """The step is left out, so the weights are finite; the loss would make each resume stop at its next row."""

    def overflow(model):  # from the next step on
        model.register_forward_hook(lambda module, images, logits: logits * float("inf"))

    build = lambda num_classes: FaultyModel(num_classes, overflow, 2, -1)  # noqa: E731
    monkeypatch.setitem(MODELS._table, "overflowing", build)
    words = ("MODEL.ARCH", "overflowing", "TRAIN.AMP", "fp16", "CHECKPOINT.EVERY_STEPS", 1, "TRAIN.PRINT_FREQ", 4)
    with pytest.raises(NonFiniteError, match="the training loss is nan in epoch 1, by step 3.*002.* is finite"):
        train_model(small_cfg(*words))
    paths = CheckpointManager(tmp_path / "out").list()
    assert len(paths) == 2 and all(find_nonfinite(read_checkpoint(path)) is None for path in paths)
