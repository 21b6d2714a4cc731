"""Published recipes in configs/imagenet: their values against the table, and two steps of each recipe."""

import math

import pytest
import torch
from support.images import draw_folder
from support.recipe_table import PYCLS, RECIPES
from support.runs import ROOT
from support.tiers import slow

from distribuuuu.config import load_cfg
from distribuuuu.config.config_node import get_value
from distribuuuu.data.loader import build_loader
from distribuuuu.engine.setup import build_run
from distribuuuu.launch.detect import detect_launch
from distribuuuu.models import build_model, count_parameters
from distribuuuu.optim.optimizer import build_lr, scaled_lr
from distribuuuu.trainer import train_epoch

IMAGES = 1_281_167  # training images of ImageNet
# Small models of three sources; two steps of the others are marked slow.
QUICK = ("deit_tiny", "resnet18_ffcv_16", "regnetx_004_pycls")
# The large models of pycls differ from its small ones only in the architecture.
SMALL = [name for name in RECIPES if name not in PYCLS or RECIPES[name]["params"] < 10]


def recipe_cfg(name: str, *overrides):
    return load_cfg(str(ROOT / "configs" / "imagenet" / f"{name}.yaml"), [str(word) for word in overrides])


def derived(cfg) -> dict:
    """Return the values of the table that are computed from several options."""
    batch, half_life = cfg.TRAIN.GLOBAL_BATCH_SIZE, cfg.EMA.HALF_LIFE
    lr = scaled_lr(cfg, batch)
    return {
        "crop": cfg.TEST.CROP_SIZE or cfg.TRAIN.IM_SIZE,
        "warmup_lr": cfg.OPTIM.WARMUP_FACTOR * lr,
        "min_lr": cfg.OPTIM.MIN_LR * lr,
        "ema_decay": 0.5 ** (batch / half_life) if half_life else 0,
        "decoupled_decay": cfg.OPTIM.WEIGHT_DECAY * lr,
        "warmup_steps": round(cfg.OPTIM.WARMUP_EPOCHS * (IMAGES // batch), -1),
    }


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_published_values(name):
    cfg, expected = recipe_cfg(name), dict(RECIPES[name])
    for number in expected.pop("reported"):
        assert number in (ROOT / "configs" / "imagenet" / f"{name}.yaml").read_text()
    with torch.device("meta"):
        assert f"{count_parameters(build_model(cfg)) / 1e6:.3f}" == f"{expected.pop('params'):.3f}"
    for key, value in expected.items():
        found = derived(cfg)[key] if key in derived(cfg) else get_value(cfg, key)
        assert found == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key


def test_the_half_life_of_the_torchvision_recipe_matches_its_decay():
    cfg = recipe_cfg("resnet50_torchvision_v2")
    # The script updates every 32 steps, and multiplies 1 - decay by (images of 32 steps) / epochs.
    share = (1 - 0.99998) * 1024 * 32 / 600
    assert cfg.EMA.HALF_LIFE == pytest.approx(32 * 1024 * math.log(2) / -math.log(1 - share), rel=1e-5)


def test_schedules_reach_the_base_rate_and_decay():
    for name in SMALL:
        cfg = recipe_cfg(name)
        lr_at, top = build_lr(cfg, cfg.TRAIN.GLOBAL_BATCH_SIZE), scaled_lr(cfg, cfg.TRAIN.GLOBAL_BATCH_SIZE)
        epochs = [epoch / 4 for epoch in range(4 * cfg.OPTIM.MAX_EPOCH)]
        assert 0.9 * top < max(map(lr_at, epochs)) <= top
        assert min(lr_at(epoch) for epoch in epochs[len(epochs) // 2 :]) < 0.11 * top


@pytest.fixture(scope="module")
def twenty_images(tmp_path_factory):
    root = tmp_path_factory.mktemp("twenty")
    for split, num in (("train", 2), ("val", 1)):
        draw_folder(root, split, {f"class{number}": num for number in range(10)}, size=(80, 72))
    return root


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in SMALL])
def test_two_steps_of_a_recipe(name, twenty_images, tmp_path):
    overrides = ["TRAIN.DATASET", twenty_images, "MODEL.NUM_CLASSES", 10, "TRAIN.BATCH_SIZE", 8, "TRAIN.WORKERS", 0,
                 "TRAIN.GLOBAL_BATCH_SIZE", 8, "TRAIN.IM_SIZE", 64, "TEST.IM_SIZE", 64, "TEST.CROP_SIZE", 0,
                 "RNG_SEED", 1, "OUT_DIR", tmp_path, "LOG.TENSORBOARD", False]  # fmt: skip
    overrides += ["OPTIM.WARMUP_EPOCHS", 0]  # a warm-up starts at a learning rate of 0
    if recipe_cfg(name).TRAIN.IM_SIZE_START:
        overrides += ["TRAIN.IM_SIZE_START", 32]
    if recipe_cfg(name).TRAIN.AMP == "fp16":  # takes 20 s on a CPU, and skips the first steps
        overrides += ["TRAIN.AMP", "bf16"]
    cfg = recipe_cfg(name, *overrides)
    launch, device = detect_launch(), torch.device("cpu")
    loader = build_loader(cfg, launch, device, train=True)
    run = build_run(cfg, loader, build_loader(cfg, launch, device, train=False))
    before = [parameter.detach().clone() for parameter in run.state.model.parameters()]
    state, rows = run.state, []
    with run.stop, run.log:
        run.log.train = lambda *record: rows.append(record[3])
        train_epoch(run)
    assert state.step == loader.num_steps == 2 and rows[-1]["count"] == 16 and math.isfinite(rows[-1]["loss"])
    changed = [not torch.equal(old, new) for old, new in zip(before, state.model.parameters(), strict=True)]
    assert sum(changed) > 0.9 * len(changed)
