"""bf16 and fp16: what computes in which type, loss scaling against its rules, and resuming with the scale."""

import pytest
import torch
from support.failing_models import FaultyModel
from torch import nn

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager, NonFiniteError, find_nonfinite
from distribuuuu.config.registry import MODELS
from distribuuuu.optim.precision import Precision
from distribuuuu.trainer import train_model


@pytest.mark.parametrize(
    ("name", "dtype"), [("none", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_forward_pass_computes_in_the_type_and_the_weights_stay_float32(name, dtype):
    precision, net = Precision(name), nn.Linear(4, 2)
    with precision.autocast():
        logits = net(torch.ones(3, 4))
    assert logits.dtype == dtype
    precision.backward(logits.float().sum())
    precision.step(torch.optim.SGD(net.parameters(), lr=0.1), lambda parameters: None)
    assert net.weight.dtype == net.weight.grad.dtype == torch.float32


def small_step(precision: Precision, factor: float) -> tuple[nn.Linear, torch.Tensor]:
    """Take a step on a gradient of `factor`; return the net and its weight before."""
    net = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(net.weight)
    before = net.weight.detach().clone()
    with precision.autocast():
        logits = net(torch.full((1, 2), 1.0))
    precision.backward((logits.float() * factor).sum())
    precision.step(torch.optim.SGD(net.parameters(), lr=1.0), lambda parameters: None)
    return net, before


def test_float16_keeps_gradients_that_would_vanish_and_leaves_out_steps_that_overflow():
    net, before = small_step(Precision("fp16"), 1e-7)  # below half of float16's least number
    assert (before - net.weight).tolist()[0] == pytest.approx([1e-7] * 2, rel=0.3)
    precision = Precision("fp16")
    scale = precision.state_dict()["scale"]
    net, before = small_step(precision, 1e3)
    assert torch.equal(net.weight, before), "the step was left out"
    assert precision.state_dict()["scale"] == scale / 2


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
