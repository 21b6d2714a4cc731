"""Views: several transforms of an image that is decoded once; stages: augmentation that changes at an epoch."""

import pytest
import torch
from support.batches import ALONE, CPU, WAYS, assert_same_batches, batches_of, own_task
from support.runs import assert_same_run, records
from support.tables import pairwise

from distribuuuu.config import ConfigError
from distribuuuu.data.decode import open_lazy_image
from distribuuuu.data.loader import build_loader
from distribuuuu.data.seeding import SampleRNG, derive_seed
from distribuuuu.trainer import train_model

SIZES = [{}, {"AUG.POLICY": "trivialaugment", "DATA.FLIP": 0}, {"TRAIN.IM_SIZE": 12}]


@pytest.fixture
def sizes(monkeypatch):
    """Return the words of a task with three views, the last one smaller."""
    return own_task(monkeypatch, views=lambda cfg, loader: SIZES)


@pytest.mark.parametrize("way, crop", pairwise(WAYS, ["resized", "pad"]))
def test_views_are_bitwise_equal_however_they_are_made_and_the_first_is_that_of_one_view(small_cfg, sizes, way, crop):
    cfg = small_cfg(*sizes, "DATA.CROP", crop)
    expected = batches_of(cfg)
    assert_same_batches(batches_of(small_cfg(*sizes, *way, "DATA.CROP", crop)), expected)
    plain = batches_of(small_cfg("DATA.CROP", crop))
    assert_same_batches([batch._replace(images=batch.first_images) for batch in expected], plain)
    assert [view.shape[2] for view in expected[0].images] == [16, 16, 12]


def test_a_view_is_that_of_a_loader_of_its_own_with_the_seed_of_the_view(small_cfg, sizes):
    loader = build_loader(small_cfg(*sizes), ALONE, CPU, train=True)
    keys = next(iter(loader.sampler))[:5]
    found, _ = loader.samples.batch(keys)
    for number, options in enumerate(SIZES[1:], 1):
        words = [word for pair in options.items() for word in pair]
        alone = build_loader(small_cfg(*words), ALONE, CPU, train=True).samples
        expected, _ = alone.batch([(derive_seed(seed, index), index) for seed, index in keys])
        assert expected.images.shape == found.images[number].shape
        for image, (seed, index) in zip(found.images[number], keys, strict=True):
            decoded = open_lazy_image(alone.images.read(index), "auto")
            assert torch.equal(image, alone.transform(decoded, SampleRNG(derive_seed(seed, index), number)))


def test_data_views_repeats_the_augmentation_with_other_numbers(small_cfg, monkeypatch):
    words = (*own_task(monkeypatch), "AUG.POLICY", "randaugment", "AUG.ERASING", 0.5)
    one, two, three = batches_of(small_cfg(*words, "DATA.VIEWS", 3))[0].images
    expected = batches_of(small_cfg(*words))
    assert torch.equal(one, expected[0].images) and not any(torch.equal(one, other) for other in (two, three))
    assert not torch.equal(two, three)
    with pytest.raises(ConfigError, match="DATA.VIEWS.*: got 2; TASK.NAME auto takes one view"):
        small_cfg("DATA.VIEWS", 2)


def test_views_grow_together_and_only_at_one_size(small_cfg, sizes, monkeypatch):
    growing = ("TRAIN.IM_SIZE_START", 8, "TRAIN.IM_SIZE_EPOCHS", [0, 2], "TRAIN.IM_SIZE_MULTIPLE", 4)
    words = (*own_task(monkeypatch), "DATA.VIEWS", 2, *growing)
    for way in ((), ("TRAIN.WORKERS", 1), ("DATA.LOADER", "device", "DATA.CROP", "pad")):
        assert [view.shape[2] for view in batches_of(small_cfg(*words, *way))[0].images] == [12, 12]
    assert build_loader(small_cfg(*growing), ALONE, CPU, train=True).preview(3, 5).shape == (5, 3, 8, 8)
    own_task(monkeypatch, views=lambda cfg, loader: [])
    with pytest.raises(ConfigError, match="TASK.NAME: .*.views returns no view of loader train"):
        build_loader(small_cfg(*sizes), ALONE, CPU, train=True)
    own_task(monkeypatch, views=lambda cfg, loader: SIZES)
    with pytest.raises(ConfigError, match="TRAIN.IM_SIZE_START.*: got 8; with views of several sizes, expected 0"):
        build_loader(small_cfg(*sizes, *growing), ALONE, CPU, train=True)


AUGMENTED = ("DATA.CROP", "pad", "AUG.ERASING", 0.9)
GROWING = ("TRAIN.IM_SIZE_START", 8, "TRAIN.IM_SIZE_EPOCHS", [0, 2], "TRAIN.IM_SIZE_MULTIPLE", 2)


def epoch_of(cfg, epoch: int):
    return list(build_loader(cfg, ALONE, CPU, train=True).batches_from(5, epoch, 0))


@pytest.mark.parametrize("way, sizes", pairwise(WAYS, [(), GROWING]))
def test_the_last_epochs_are_those_of_a_run_without_augmentation_and_the_others_of_one_with_it(small_cfg, way, sizes):
    words = ("OPTIM.MAX_EPOCH", 4, *sizes)
    loader = build_loader(small_cfg(*AUGMENTED, *words, *way, "AUG.OFF_EPOCHS", 2), ALONE, CPU, train=True)
    on, off = small_cfg(*AUGMENTED, *words), small_cfg(*AUGMENTED, *words, "AUG.ERASING", 0)
    for epoch, expected in ((1, on), (2, off), (3, off), (0, on)):  # also an earlier one
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


@pytest.mark.slow
def test_the_end_of_mixing_and_augmentation_is_recorded_and_resumes_bitwise(small_cfg, tmp_path):
    words = (*AUGMENTED, "AUG.MIXUP", 0.8, "OPTIM.MAX_EPOCH", 3, "AUG.OFF_EPOCHS", 2)
    whole, parts = (small_cfg(*words, "OUT_DIR", str(tmp_path / name)) for name in ("whole", "parts"))
    train_model(whole)
    train_model(parts, stop_epoch=1)
    train_model(parts)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    stages = [(entry["epoch"], entry.get("stage")) for entry in records(tmp_path / "whole")]
    assert {*stages} == {(1, None), (2, "AUG.ERASING 0.0"), (3, "AUG.ERASING 0.0")}
