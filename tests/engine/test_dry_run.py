"""The dry run: errors of a model before the first step, unused parameters, a model left unchanged."""

import pytest
import torch
from support.failing_models import Idle
from support.processes import on_processes
from support.runs import assert_close, newest

from distribuuuu.config import ConfigError
from distribuuuu.config.registry import MODELS
from distribuuuu.engine.dry_run import dry_run_training
from distribuuuu.models import build_model
from distribuuuu.trainer import train_model


class Skipping(Idle):
    num_passes = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.num_passes += 1
        if self.training and self.num_passes % 2 == 0:
            return self.used(images)
        return self.used(images) + self.idle(torch.ones(1, 5)).mean()


class TwoHeads(Idle):
    def forward(self, images: torch.Tensor):
        return (self.used(images), 0) if self.training else self.used(images)


@pytest.fixture(autouse=True)
def registered_models(monkeypatch):
    assert "resnet8" in MODELS  # so that the table is filled
    for name, model in (("idle", Idle), ("skipping", Skipping), ("two_heads", TwoHeads)):
        monkeypatch.setitem(MODELS._table, name, lambda num_classes, model=model: model(num_classes))


def test_a_dry_run_restores_the_model(small_cfg):
    model = build_model(small_cfg())
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert dry_run_training(small_cfg(), model, torch.randn(12, 3, 16, 16), 3) == ([], False)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("words, num, px, said", [
    (("MODEL.ARCH", "resnet18"), 1, 32,
     r"MODEL.ARCH \(command line\).*: resnet18 fails on an input of shape \(1, 3, 32, 32\)"),
    (("MODEL.ARCH", "torchvision/inception_v3"), 2, 40,
     r"torchvision/inception_v3 fails .* shape \(2, 3, 40, 40\).*\(torchvision/models/inception.py:\d+\)$"),
    (("MODEL.ARCH", "two_heads"), 2, 16, r"two_heads: model output is a tuple; expected logits \(2, 3\); fix: turn"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
def test_errors_of_a_step_are_reported(small_cfg, words, num, px, said):
    cfg = small_cfg(*words)
    with pytest.raises(ConfigError, match=said):
        dry_run_training(cfg, build_model(cfg), torch.zeros(num, 3, px, px), 3)


@pytest.mark.parametrize("words, said", [
    (("MODEL.ARCH", "timm/vit_tiny_patch16_224", "TRAIN.IM_SIZE", 32, "TEST.IM_SIZE", 64, "TEST.CROP_SIZE", 48),
     r"TEST.CROP_SIZE \(command line\), .* timm/vit_tiny.*fails .*\(1, 3, 48, 48\)"),
    (("MODEL.ARCH", "torchvision/alexnet", "TRAIN.IM_SIZE", 64, "TEST.IM_SIZE", 64, "TRAIN.IM_SIZE_MULTIPLE", 1,
      "TRAIN.IM_SIZE_START", 4, "TRAIN.IM_SIZE_EPOCHS", "[0, 5]"),
     r"TRAIN.IM_SIZE_START \(command line\), TRAIN.BATCH_SIZE .* torchvision/alexnet fails on .*\(2, 3, 4, 4\)"),
])  # fmt: skip
def test_errors_of_an_evaluation_and_of_the_first_image_size_are_reported_early(small_cfg, words, said):
    with pytest.raises(ConfigError, match=said):
        train_model(small_cfg(*words))


def test_unused_parameters_are_logged_and_do_not_change_a_run(small_cfg, tmp_path):
    """On one process, and with DDP, which waits for the gradient of every trainable parameter."""
    words = ("MODEL.ARCH", "idle", "TRAIN.GLOBAL_BATCH_SIZE", 12, "TRAIN.BATCH_SIZE", 3)
    for num in (1, 2):
        cfg = small_cfg(*words, "OUT_DIR", tmp_path / f"{num}")
        on_processes(num, train_model, cfg) if num > 1 else train_model(cfg)
        log = (tmp_path / f"{num}" / "train.log").read_text()
        assert "2 parameters without a gradient, not trained: idle.weight, idle.bias" in log
    one, two = newest(tmp_path / "1"), newest(tmp_path / "2")
    assert_close(one, two, 1e-5)
    assert len(two["optimizer"]["state"]) == len(one["optimizer"]["state"]) == 4


def test_layers_that_some_steps_skip_are_trained(small_cfg, tmp_path):
    """DDP waits for all gradients in each step unless it looks for unused parameters."""
    words = ("MODEL.ARCH", "skipping", "LOSS.LABEL_SMOOTHING", 0.1, "OPTIM.MAX_EPOCH", 1, "TRAIN.BATCH_SIZE", 6)
    cfg = small_cfg(*words)
    assert dry_run_training(cfg, Skipping(3), torch.zeros(2, 3, 16, 16), 3) == ([], False)
    skipping = Skipping(3)
    skipping.num_passes = 1
    assert dry_run_training(cfg, skipping, torch.zeros(2, 3, 16, 16), 3) == ([], True)
    on_processes(2, train_model, cfg)
    assert len(newest(tmp_path / "out")["optimizer"]["state"]) == 6
