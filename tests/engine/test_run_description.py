"""The log of a start: the crops, the mean, the standard deviation and the sampling that a run uses."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.baselines import FILES as RECIPES

from distribuuuu.config import load_cfg
from distribuuuu.config.config_node import get_value
from distribuuuu.data.datasets.base import ImageDataset, get_dataset
from distribuuuu.data.loader import build_loaders
from distribuuuu.engine.run_description import describe_training
from distribuuuu.launch.detect import Launch
from distribuuuu.trainer import evaluate_weights as evaluate_model
from distribuuuu.trainer import train_model


def log_of(cfg, name: str = "train.log") -> str:
    return (Path(cfg.OUT_DIR) / name).read_text()


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ((), ["training: random resized crop 16 px, area 0.08-1, bilinear, flip 0.5",
              "validation: shorter side 18 px, center crop 16 px, bilinear",
              "mean 0.485 0.456 0.406, std 0.229 0.224 0.225; sampling: uniform"]),
        (("DATA.CROP", "pad", "DATA.FLIP", 0, "DATA.MEAN", "[0.5,0.5,0.5]", "DATA.SAMPLING", "sqrt",
          "TEST.INTERPOLATION", "bicubic", "AUG.ERASING", 0.1, "TRAIN.IM_SIZE_START", 8,
          "TRAIN.IM_SIZE_EPOCHS", "[0,1]", "TRAIN.IM_SIZE_MULTIPLE", 8),
         ["training: shorter side 16 px, padding 4 px, random crop 16 px, flip 0; from 8 px on",
          "validation: shorter side 18 px, center crop 16 px, bicubic",
          "mean 0.5 0.5 0.5, std 0.229 0.224 0.225; sampling: sqrt"]),
    ],
)  # fmt: skip
def test_the_start_logs_what_reaches_the_model(options, lines, small_cfg):
    cfg = small_cfg("OPTIM.MAX_EPOCH", 1, "OPTIM.WARMUP_EPOCHS", 0, *options)
    train_model(cfg)
    for line in lines:
        assert f" {line}\n" in log_of(cfg)
    evaluate_model(cfg)
    assert f" {lines[1]}\n" in log_of(cfg, "test.log")
    assert f" {lines[2].partition(';')[0]}\n" in log_of(cfg, "test.log") and "training:" not in log_of(cfg, "test.log")


def test_a_recipe_is_the_same_for_images_in_folders():
    """A recipe states each value that DATA.NAME imagefolder would change."""
    folder = get_dataset("imagefolder")
    for path in map(str, RECIPES):
        own, cfg = (
            get_dataset(load_cfg(path).DATA.NAME),
            load_cfg(path, ["DATA.NAME", "imagefolder", "DATA.TABLE", "{}"]),
        )
        assert cfg.DATA.CROP != "auto" or folder.crop == own.crop, path
        for key, attribute in (("DATA.MEAN", "mean"), ("DATA.STD", "std")):
            assert get_value(cfg, key) or getattr(folder, attribute) == getattr(own, attribute), (path, key)


def test_the_values_written_out_are_those_of_the_data_set():
    for name in ("cifar10/resnet20_fast", "fashion_mnist/resnet14", "shapes/resnet14"):
        data, dataset = load_cfg(name).DATA, get_dataset(load_cfg(name).DATA.NAME)
        assert (data.MEAN, data.STD) == (dataset.mean, dataset.std)
        assert data.CROP in ("auto", dataset.crop) and (data.CROP != "auto" or dataset.crop == ImageDataset.crop)


@pytest.mark.parametrize(("device", "words", "logged"), [
    ("cuda", (), "speed options that are off: TRAIN.AMP bf16, MODEL.CHANNELS_LAST True, MODEL.COMPILE default"),
    ("cuda", ("TRAIN.AMP", "bf16", "MODEL.CHANNELS_LAST", True, "MODEL.COMPILE", "default", "TRAIN.WORKERS", -1), ""),
    ("cpu", (), ""),
])  # fmt: skip
def test_on_cuda_the_start_logs_the_options_of_speed_that_are_off(device, words, logged, small_cfg, caplog):
    cfg = small_cfg(*words)
    train, val = build_loaders(cfg, Launch("test"), torch.device("cpu"))
    train.device = torch.device(device)
    state = SimpleNamespace(model=torch.nn.Linear(2, 2), classes=train.images.classes, seed=0, epoch=0, step=0)
    with caplog.at_level("INFO", logger="distribuuuu"):
        describe_training(cfg, state, train, val)
    lines = [line for line in caplog.messages if line.startswith("speed options")]
    assert len(lines) == bool(logged) and all(logged in line for line in lines)
