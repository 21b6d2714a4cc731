"""Config files: the baselines against the published table, and the format of every file."""

from pathlib import Path

import pytest
import torch
import yaml
from support.baselines import BASELINES, FILES
from support.runs import ROOT

from distribuuuu.config import get_cfg, load_cfg
from distribuuuu.config.config_node import get_value
from distribuuuu.config.options import OPEN_SECTIONS
from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.models import build_model, count_parameters
from distribuuuu.optim.schedules import build_schedule


def baseline(name: str):
    return load_cfg(str(ROOT / "configs" / "imagenet" / f"{name}.yaml"))


def test_each_row_of_the_table_has_a_file():
    assert {path.stem for path in (ROOT / "configs" / "imagenet").glob("*.yaml")} >= set(BASELINES)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_match_the_table(name):
    arch, num_m, global_batch, base_lr, weight_decay, gpus, top1, top5 = BASELINES[name]
    cfg = baseline(name)
    plan = plan_batches(cfg.TRAIN.BATCH_SIZE, cfg.TRAIN.GLOBAL_BATCH_SIZE, gpus)
    assert (cfg.MODEL.ARCH, plan.global_batch, plan.accum_steps) == (arch, global_batch, 1)
    assert (cfg.OPTIM.BASE_LR, cfg.OPTIM.WEIGHT_DECAY) == (base_lr, weight_decay)
    assert cfg.OPTIM.BASE_LR == pytest.approx(0.1 * global_batch / 128)
    header = (ROOT / "configs" / "imagenet" / f"{name}.yaml").read_text()
    assert all(number in header for number in (num_m, top1, top5, str(global_batch)))


@pytest.mark.parametrize("name", BASELINES)
def test_the_learning_rate_of_each_epoch_matches_the_formula(name):
    import math

    cfg = baseline(name)
    lr_at = build_schedule(cfg)
    for epoch in range(100):
        warmup = 0.1 * (1 - epoch / 5) + epoch / 5 if epoch < 5 else 1
        expected = cfg.OPTIM.BASE_LR * (1 + math.cos(math.pi * epoch / 100)) / 2 * warmup
        assert abs(lr_at(epoch) - expected) < 1e-12


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_file_loads_and_sets_no_option_to_its_default(path: Path):
    cfg = load_cfg(str(path))
    with torch.device("meta"):
        model = build_model(cfg)
    if path.stem in BASELINES and path.parent.name == "imagenet":
        assert f"{count_parameters(model) / 1e6:.3f}" == BASELINES[path.stem][1]
    defaults = get_cfg()
    for key in cfg.origins:
        if not key.startswith(OPEN_SECTIONS):
            same = get_value(cfg, key) == get_value(defaults, key)
            assert not same, f"{key} is set to its default"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_file_is_short_and_its_header_has_the_command_and_the_accuracy(path: Path):
    lines = path.read_text().splitlines()
    header = "\n".join(line for line in lines if line.startswith("#"))
    assert len(lines) <= 25
    assert f"--cfg {path.relative_to(ROOT)}" in header
    assert "top-1" in header and ("easured" in header)
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_imagenet_configs_load_with_all_cores():
    for path in FILES:
        if path.parent.name == "imagenet":
            assert load_cfg(str(path)).TRAIN.WORKERS == -1, path
