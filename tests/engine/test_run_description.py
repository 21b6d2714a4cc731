"""The log of a start: the crops, the mean, the standard deviation and the sampling that a run uses."""

from pathlib import Path

from distribuuuu.trainer import evaluate_weights as evaluate_model
from distribuuuu.trainer import train_model


def log_of(cfg, name: str = "train.log") -> str:
    return (Path(cfg.OUT_DIR) / name).read_text()


def test_the_start_logs_what_reaches_the_model(small_cfg):
    options = ("DATA.CROP", "pad", "DATA.FLIP", 0, "DATA.MEAN", "[0.5,0.5,0.5]", "DATA.SAMPLING", "sqrt",
               "TEST.INTERPOLATION", "bicubic", "AUG.ERASING", 0.1, "TRAIN.IM_SIZE_START", 8,
               "TRAIN.IM_SIZE_EPOCHS", "[0,1]", "TRAIN.IM_SIZE_MULTIPLE", 8)  # fmt: skip
    lines = ["training: shorter side 16 px, padding 4 px, random crop 16 px, flip 0; from 8 px on",
             "validation: shorter side 18 px, center crop 16 px, bicubic",
             "mean 0.5 0.5 0.5, std 0.229 0.224 0.225; sampling: sqrt"]  # fmt: skip
    cfg = small_cfg("OPTIM.MAX_EPOCH", 1, "OPTIM.WARMUP_EPOCHS", 0, *options)
    train_model(cfg)
    for line in lines:
        assert f" {line}\n" in log_of(cfg)
    evaluate_model(cfg)
    assert f" {lines[1]}\n" in log_of(cfg, "test.log")
    assert f" {lines[2].partition(';')[0]}\n" in log_of(cfg, "test.log") and "training:" not in log_of(cfg, "test.log")
