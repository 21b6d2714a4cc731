"""Stages: augmentation that changes at an epoch."""

import pytest
import torch
from support.batches import ALONE, CPU, WAYS, assert_same_batches, own_task
from support.runs import assert_same_run, records

from distribuuuu.data.loader import build_loader
from distribuuuu.trainer import train_model

AUGMENTED = ("DATA.CROP", "pad", "AUG.ERASING", 0.9)
GROWING = ("TRAIN.IM_SIZE_START", 8, "TRAIN.IM_SIZE_EPOCHS", [0, 2], "TRAIN.IM_SIZE_MULTIPLE", 2)


def epoch_of(cfg, epoch: int):
    return list(build_loader(cfg, ALONE, CPU, train=True).batches_from(5, epoch, 0))


@pytest.mark.parametrize("sizes", [(), GROWING], ids=["one size", "growing"])
@pytest.mark.parametrize("way", WAYS)
def test_the_last_epochs_are_those_of_a_run_without_augmentation_and_the_others_of_one_with_it(small_cfg, way, sizes):
    words = ("OPTIM.MAX_EPOCH", 4, *sizes)
    loader = build_loader(small_cfg(*AUGMENTED, *words, *way, "AUG.OFF_EPOCHS", 2), ALONE, CPU, train=True)
    on, off = small_cfg(*AUGMENTED, *words), small_cfg(*AUGMENTED, *words, "AUG.ERASING", 0)
    for epoch, expected in ((1, on), (2, off), (3, off), (0, on)):  # the last one as after a rollback
        assert_same_batches(list(loader.batches_from(5, epoch, 0)), epoch_of(expected, epoch))


def test_a_task_changes_the_augmentation_of_all_its_views_by_epoch(small_cfg, monkeypatch):
    views = [{}, {"TRAIN.IM_SIZE": 12}]
    stages = {3: {"DATA.FLIP": 1.0}, 1: {"DATA.FLIP": 0.0}}
    words = ("OPTIM.MAX_EPOCH", 5)
    plain = own_task(monkeypatch, views=lambda cfg, loader: views)
    expected = [epoch_of(small_cfg(*plain, *words, "DATA.FLIP", flip), epoch)
                for epoch, flip in enumerate((0.5, 0, 0, 1, 1))]  # fmt: skip
    staged = own_task(monkeypatch, views=lambda cfg, loader: views, stages=lambda cfg: stages)
    loader = build_loader(small_cfg(*staged, *words, "TRAIN.WORKERS", 2), ALONE, CPU, train=True)
    for epoch in range(5):
        assert_same_batches(list(loader.batches_from(5, epoch, 0)), expected[epoch])
    assert not torch.equal(expected[0][0].images[0], expected[1][0].images[0])


def test_the_end_of_mixing_and_augmentation_is_recorded_and_resumes_bitwise(small_cfg, tmp_path):
    words = (*AUGMENTED, "AUG.MIXUP", 0.8, "OPTIM.MAX_EPOCH", 3, "AUG.OFF_EPOCHS", 2)
    whole, parts = (small_cfg(*words, "OUT_DIR", str(tmp_path / name)) for name in ("whole", "parts"))
    train_model(whole)
    train_model(parts, stop_epoch=1)
    train_model(parts)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    stages = [(entry["epoch"], entry.get("stage")) for entry in records(tmp_path / "whole")]
    assert {*stages} == {(1, None), (2, "AUG.ERASING 0.0"), (3, "AUG.ERASING 0.0")}
