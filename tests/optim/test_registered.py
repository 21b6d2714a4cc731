"""Registered optimizers and schedules: one new file, or a decorated function in a user's script, and no other edit."""

import sys

import pytest
import torch
from support.runs import newest
from torch import nn

from distribuuuu.config.registry import OPTIMIZERS, SCHEDULES
from distribuuuu.optim.optimizer import build_optimizer
from distribuuuu.optim.schedules import build_lr
from distribuuuu.trainer import train_model

OPTIMIZER = """\
import torch

from distribuuuu.config.registry import OPTIMIZERS


@OPTIMIZERS.register
def rprop(params, lr, weight_decay):
    return torch.optim.Rprop(params, lr)
"""
SCHEDULE = """\
from distribuuuu.config.registry import SCHEDULES


@SCHEDULES.register
def sqrt(epoch, *, max_epoch):
    return (1 - epoch / max_epoch) ** 0.5
"""


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """Restore both registries after the test."""
    for registry in (OPTIMIZERS, SCHEDULES):
        monkeypatch.setattr(registry, "_table", dict(registry._table))
        registry.names()
        monkeypatch.delitem(vars(registry), "_declared")


@pytest.fixture
def new_files(monkeypatch, tmp_path):
    """Add the two files to a copy of the package that the registries search."""
    package = tmp_path / "registered_optim"
    package.mkdir()
    for name, text in {"__init__": "", "rprop": OPTIMIZER, "sqrt": SCHEDULE}.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (OPTIMIZERS, SCHEDULES):
        monkeypatch.setattr(registry, "package", package.name)
    yield
    for module in [module for module in sys.modules if module.startswith(package.name)]:
        del sys.modules[module]


def test_one_new_file_is_enough(new_files, small_cfg):
    assert len(OPTIMIZER.splitlines()) <= 8 and len(SCHEDULE.splitlines()) <= 6
    overrides = ("OPTIM.NAME", "rprop", "OPTIM.LR_POLICY", "sqrt", "OPTIM.WARMUP_EPOCHS", 0)
    cfg = small_cfg(*overrides, "OPTIM.MAX_EPOCH", 4, "OPTIM.BASE_LR", 0.1)
    assert [build_lr(cfg, 1)(epoch) for epoch in (0, 3)] == [0.1, 0.05]
    assert type(build_optimizer(cfg, nn.Linear(2, 2))) is torch.optim.Rprop
    train_model(small_cfg(*overrides, "OPTIM.MAX_EPOCH", 1))
    train_model(small_cfg(*overrides, "OPTIM.MAX_EPOCH", 2))  # resumes
    content = newest(cfg.OUT_DIR)
    assert content["epoch"] == 1 and "step_size" in content["optimizer"]["state"][0]
