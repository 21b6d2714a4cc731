"""Resumption, several processes and exact evaluation with many features enabled together."""

from pathlib import Path

import pytest
import torch
from support.processes import on_processes
from support.runs import GROUP_NORM, assert_close, newest, records, timeless, train_and_kill, train_and_stop
from support.tiers import slow

from distribuuuu.trainer import train_model

EVERYTHING = (
    "OPTIM.NAME", "adamw", "OPTIM.BASE_LR", 0.002, "OPTIM.NORM_WEIGHT_DECAY", 0, "OPTIM.CLIP_NORM", 0.5,
    "OPTIM.LR_UPDATE", "step", "OPTIM.LR_SCALE", "sqrt", "EMA.HALF_LIFE", 40, "EMA.EVERY_STEPS", 2,
    "EMA.START_EPOCH", 1, "LOSS.NAME", "bce", "LOSS.LABEL_SMOOTHING", 0.1, "AUG.POLICY", "rand-m7-mstd0.5-inc1",
    "AUG.COLOR_JITTER", "(0.3,)", "AUG.ERASING", 0.5, "AUG.MIXUP", 0.4, "AUG.CUTMIX", 1.0, "AUG.MIX_GROUP", 8,
    "DATA.REPEATS", 2, "DATA.SAMPLING", "balanced", "TRAIN.IM_SIZE_START", 12, "TRAIN.IM_SIZE_EPOCHS", "(0, 1)",
    "TRAIN.IM_SIZE_MULTIPLE", 4, "TRAIN.GLOBAL_BATCH_SIZE", 12, "TRAIN.BATCH_SIZE", 2,
    "TEST.FLIP", True, "CHECKPOINT.EVERY_STEPS", 1, "FINETUNE.LR_MULT.stem", 0.5,
)  # fmt: skip
BATCH_NORM = ("MODEL.PRECISE_BN", 24, "TRAIN.AMP", "bf16", "MODEL.CHANNELS_LAST", True)


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Compare all tensors of the newest checkpoints of two runs, bit by bit."""
    one, other = newest(one), newest(other)
    for key in ("state_dict", "ema_state_dict"):
        assert one[key].keys() == other[key].keys()
        assert all(torch.equal(one[key][name], other[key][name]) for name in one[key]), key
    for mine, theirs in zip(one["optimizer"]["state"].values(), other["optimizer"]["state"].values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    # `checkpoints` lists the checkpoints in the folder: a stopped run has one more.
    time_and_place = {"seconds", "timing", "peak_memory_mib", "config", "checkpoints"}  # config: OUT_DIR, TRAIN.WORKERS
    left_out = {"state_dict", "ema_state_dict", "optimizer", "meter"} | time_and_place
    assert {k: v for k, v in one.items() if k not in left_out} == {k: v for k, v in other.items() if k not in left_out}


@pytest.fixture(scope="module")
def teacher(image_folder, tmp_path_factory):
    """Return the overrides that select a teacher trained for one epoch."""
    from support.runs import small_options

    from distribuuuu.config import load_cfg

    out_dir = tmp_path_factory.mktemp("teacher")
    train_model(load_cfg(None, small_options(image_folder, out_dir, "OPTIM.MAX_EPOCH", 1)))
    return ("DISTILL.TEACHER", "resnet8", "DISTILL.WEIGHTS", out_dir / "best.pth.tar", "DISTILL.TEMPERATURE", 2)


@pytest.mark.parametrize("place", [slow((0, 2)), (1, 0), slow((1, 3))])
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_run(small_cfg, tmp_path, monkeypatch, teacher, place):
    overrides = (*EVERYTHING, *BATCH_NORM, *teacher)
    whole = small_cfg(*overrides, "OUT_DIR", tmp_path / "whole")
    train_model(whole)
    train_and_stop(small_cfg(*overrides), place, monkeypatch)
    train_model(small_cfg(*overrides, "TRAIN.WORKERS", 2))
    assert_same_checkpoint(tmp_path / "out", tmp_path / "whole")
    assert timeless(tmp_path / "out") == timeless(tmp_path / "whole")


def train_and_read(cfg) -> dict:
    train_model(cfg)
    return newest(cfg.OUT_DIR)


@pytest.mark.parametrize("num", [2, slow(3)])
def test_processes_that_share_a_global_batch_train_the_same_model(small_cfg, tmp_path, teacher, num):
    # Not AdamW: it normalizes gradients, so the rounding of gradients close to zero would decide the sign of steps.
    overrides = (*EVERYTHING, *GROUP_NORM, *teacher, "OPTIM.NAME", "sgd", "OPTIM.BASE_LR", 0.01)
    alone = train_and_read(small_cfg(*overrides, "OUT_DIR", tmp_path / "alone"))
    shared = on_processes(num, train_and_read, small_cfg(*overrides))[0]
    assert_close(shared, alone, 1e-5)
    averages = ({"state_dict": content["ema_state_dict"]} for content in (shared, alone))
    assert_close(*averages, 1e-5)
    for kind in ("eval", "eval_ema"):
        one, other = ([e for e in records(tmp_path / out) if e["kind"] == kind] for out in ("alone", "out"))
        assert [(e["count"], e["top1"]) for e in one] == [(e["count"], e["top1"]) for e in other]
        assert one[0]["count"] == 37


@pytest.mark.slow
def test_two_processes_resume_bitwise(small_cfg, tmp_path):
    overrides = (*EVERYTHING, *BATCH_NORM, "MODEL.SYNCBN", True)
    on_processes(2, train_and_read, small_cfg(*overrides, "OUT_DIR", tmp_path / "whole"))
    on_processes(2, train_and_kill, small_cfg(*overrides), (1, 1))
    on_processes(2, train_and_read, small_cfg(*overrides))
    assert_same_checkpoint(tmp_path / "out", tmp_path / "whole")


@pytest.mark.slow
def test_the_kind_of_workers_does_not_change_the_weights(small_cfg, tmp_path):
    overrides = (*EVERYTHING, "OPTIM.MAX_EPOCH", 1)
    for name, how in (("alone", ("TRAIN.WORKERS", 0)), ("threads", ("TRAIN.WORKERS", 3, "DATA.WORKER_KIND", "thread")),
                      ("processes", ("TRAIN.WORKERS", 2))):  # fmt: skip
        train_model(small_cfg(*overrides, *how, "OUT_DIR", tmp_path / name))
    assert_same_checkpoint(tmp_path / "threads", tmp_path / "alone")
    assert_same_checkpoint(tmp_path / "processes", tmp_path / "alone")
