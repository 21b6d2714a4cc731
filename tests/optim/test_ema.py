"""The average of the weights against a loop in float64, whatever the size of a batch."""

import pytest
import torch
from support.runs import newest, records, train_and_read
from torch import nn

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.optim.ema import Ema
from distribuuuu.trainer import train_model


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


@pytest.mark.parametrize(("ramp_up", "buffers"), [(0.0, "average"), (0.0, "copy"), (0.25, "average")])
def test_it_is_the_loop_in_float64(ramp_up, buffers):
    net = make_net()
    ema = Ema(net, half_life=50, ramp_up=ramp_up, buffers=buffers)
    expected = {key: value.double().clone() for key, value in net.state_dict().items()}
    for step, _ in enumerate(walk(net, 40), start=1):
        ema.update(8, 8 * step)
        half_life = min(50, ramp_up * 8 * step) if ramp_up else 50
        decay = 2.0 ** (-8 / half_life)
        for key, value in net.state_dict().items():
            copied = key.endswith("tracked") or (buffers == "copy" and "running" in key)
            expected[key] = value.double() if copied else decay * expected[key] + (1 - decay) * value.double()
    for key, value in ema.model.state_dict().items():
        torch.testing.assert_close(value.double(), expected[key], rtol=1e-5, atol=1e-6, msg=key)
    assert not any(parameter.requires_grad for parameter in ema.model.parameters()) and not ema.model.training


def test_it_is_updated_every_few_steps_of_an_epoch_and_copies_before_its_start():
    net, batch, num_steps = nn.Linear(1, 1, bias=False), 4, 5
    ema, expected = Ema(net, half_life=16, every_steps=2, start_epoch=1), net.weight.item()
    for number, _ in enumerate(walk_weights(net, 3 * num_steps)):
        epoch, step = divmod(number, num_steps)
        ema.finish_step(epoch, step, (number + 1) * batch, batch)
        if step in (0, 2, 4):
            share = 1 if (epoch, step) <= (1, 0) else 1 - 2.0 ** (-8 / 16)
            expected += share * (net.weight.item() - expected)
        assert ema.model.weight.item() == pytest.approx(expected, abs=1e-6), (epoch, step)


def walk_weights(net: nn.Module, num: int):
    """Yield after each of `num` random values of a net's only weight."""
    torch.manual_seed(2)
    for _ in range(num):
        nn.init.normal_(net.weight)
        yield


EMA = ("EMA.HALF_LIFE", 30, "EMA.RAMP_UP", 0)


def test_both_kinds_of_weights_are_evaluated_saved_and_have_a_best_each(small_cfg, tmp_path):
    cfg = small_cfg(*EMA)
    best = train_model(cfg)
    content, log = newest(cfg.OUT_DIR), (tmp_path / "out" / "train.log").read_text()
    evaluations = {kind: [e for e in records(cfg.OUT_DIR) if e["kind"] == kind] for kind in ("eval", "eval_ema")}
    assert [len(found) for found in evaluations.values()] == [2, 2]
    tops = {kind: max(entry["top1"] for entry in found) for kind, found in evaluations.items()}
    assert (content["best_acc1"], content["best_ema_acc1"]) == (tops["eval"], tops["eval_ema"])
    assert best == max(tops.values())
    assert ", ema: top1" in log and "best ema top1: " in log and "best_ema.pth.tar" in log
    raw, averaged = (read_checkpoint(tmp_path / "out" / name) for name in ("best.pth.tar", "best_ema.pth.tar"))
    assert raw["state_dict"].keys() == averaged["state_dict"].keys() == content["ema_state_dict"].keys()
    assert not torch.equal(raw["state_dict"]["fc.weight"], averaged["state_dict"]["fc.weight"])
    assert "optimizer" not in averaged and "ema_state_dict" not in averaged


def test_a_run_without_an_average_may_continue_with_one_and_vice_versa(copied_run, small_cfg):
    train_model(small_cfg(*EMA, "OPTIM.MAX_EPOCH", 3))
    assert "the weights; it starts from the raw weights" in (copied_run / "train.log").read_text()
    assert "ema_state_dict" in newest(copied_run)
    assert "ema_state_dict" not in train_and_read(small_cfg("OPTIM.MAX_EPOCH", 4))
