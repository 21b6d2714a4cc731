"""Further loaders of a task: batches of other data sets in each step, a function of the position in the run."""

import multiprocessing

import pytest
import torch
from support.batches import ALONE, CPU, WAYS, assert_same_batches, batches_of, own_task
from support.images import draw_folder
from support.runs import assert_same_run, train_and_kill
from support.tables import slow

from distribuuuu.config import ConfigError
from distribuuuu.data.loader import BadImageError, build_loader
from distribuuuu.data.workers import ProcessPool
from distribuuuu.launch.detect import Launch
from distribuuuu.tasks.classification import Classification
from distribuuuu.trainer import train_model


@pytest.fixture
def unlabeled(tmp_path):
    """Return the options of a loader of 20 images in one folder, 8 for each 12 of the config."""
    draw_folder(tmp_path / "more", "unlabeled", {"any": 20})
    return {"TRAIN.DATASET": str(tmp_path / "more"), "TRAIN.SPLIT": "unlabeled", "TRAIN.BATCH_SIZE": 8}


@pytest.fixture
def task(monkeypatch, unlabeled):
    """Return the words of a task that gets two views of unlabeled images, the second one smaller."""
    views = {"unlabeled": [{}, {"TRAIN.IM_SIZE": 12, "AUG.POLICY": "randaugment"}]}
    return own_task(monkeypatch, lambda cfg, loader: views.get(loader, [{}]), lambda cfg: {"unlabeled": unlabeled})


@pytest.mark.parametrize("way", WAYS)
def test_batches_of_all_loaders_are_equal_however_they_are_made(small_cfg, task, way):
    expected = batches_of(small_cfg(*task))
    assert_same_batches(batches_of(small_cfg(*task, *way)), expected)
    assert_same_batches([batch._replace(extra={}) for batch in expected], batches_of(small_cfg()))
    assert [view.shape for view in expected[0].extra["unlabeled"].images] == [(8, 3, 16, 16), (8, 3, 12, 12)]


def indices_from(loader, epoch: int, step: int) -> list[list[int]]:
    return [batch.extra["unlabeled"].index.tolist() for batch in loader.batches_from(3, epoch, step)]


@pytest.mark.slow
def test_a_short_set_wraps_around_with_a_new_order_and_another_augmentation_from_any_step(small_cfg, task):
    loader = build_loader(small_cfg(*task), ALONE, CPU, train=True)
    epochs = [indices_from(loader, epoch, 0) for epoch in range(3)]
    assert all(indices_from(loader, epoch, step) == epochs[epoch][step:] for epoch in range(3) for step in range(4))
    steps = sum(epochs, [])  # four steps an epoch, two of which are a pass over the 20 images
    passes = [steps[first] + steps[first + 1] for first in range(0, 12, 2)]
    assert all(len(set(order)) == 16 for order in passes) and len(set(map(tuple, passes))) == 6
    batches = [batch.extra["unlabeled"] for batch in loader.batches_from(3, 0, 0)]
    seen = {}
    for batch in batches:
        for index, image in zip(batch.index.tolist(), batch.images[0], strict=True):
            assert index not in seen or not torch.equal(seen[index], image)
            seen[index] = image


@pytest.mark.parametrize("num, accum", [(1, 3), slow(3, 2)])
def test_a_step_has_the_same_images_for_any_division(small_cfg, task, unlabeled, tmp_path, num, accum):
    draw_folder(tmp_path / "more", "unlabeled", {"any": 60})
    unlabeled["TRAIN.BATCH_SIZE"] = 24  # twice the images of the config, as TRAIN.BATCH_SIZE is 12
    whole = batches_of(small_cfg(*task))
    unlabeled["TRAIN.BATCH_SIZE"] = 2 * 12 // num // accum
    words = (*task, "TRAIN.GLOBAL_BATCH_SIZE", 12, "TRAIN.BATCH_SIZE", 12 // num // accum)
    shares = []
    for rank in range(num):
        loader = build_loader(small_cfg(*words), Launch("one of several", rank, rank, num, num), CPU, train=True)
        shares.append(list(loader.batches_from(5, 1, 1)))
    for step, batch in enumerate(whole):
        parts = [shares[rank][step * accum + micro] for micro in range(accum) for rank in range(num)]
        joined = torch.cat([part.extra["unlabeled"].images[1] for part in parts])
        assert torch.equal(joined, batch.extra["unlabeled"].images[1])
        assert torch.equal(torch.cat([part.images for part in parts]), batch.images)


@pytest.mark.parametrize("options, message", [
    ({"TRAIN.SPLIT": "unlabelled"}, r"TRAIN.SPLIT \(loader unlabeled\): .*did you mean unlabeled"),
    ({"TRAIN.BATCH_SIZE": 512}, r"TRAIN.BATCH_SIZE \(loader unlabeled\): got 512 images per step"),
    ({"AUG.MIXUP": 0.5}, r"AUG.MIXUP \(loader unlabeled\): has no effect here; expected TRAIN.BATCH_SIZE"),
])  # fmt: skip
def test_wrong_options_of_a_loader_name_it(small_cfg, task, unlabeled, options, message):
    unlabeled |= options
    with pytest.raises(ConfigError, match=message):
        build_loader(small_cfg(*task), ALONE, CPU, train=True)


def test_broken_images_of_a_loader_are_named_or_replaced(small_cfg, task, tmp_path):
    (tmp_path / "more" / "unlabeled" / "any" / "007.jpg").write_bytes(b"torn")
    loader = build_loader(small_cfg(*task, "DATA.ON_BAD_IMAGE", "skip"), ALONE, CPU, train=True)
    seen = {index for batch in indices_from(loader, 0, 0) for index in batch}
    assert 7 not in seen and loader.num_broken > 0
    with pytest.raises(BadImageError, match="any/007.jpg"):
        list(build_loader(small_cfg(*task), ALONE, CPU, train=True).batches_from(3, 0, 0))


class Both(Classification):
    """Adds the mean logits of the unlabeled images, by index, to the loss."""

    @classmethod
    def views(cls, cfg, loader="train"):
        return [{}, {"AUG.POLICY": "randaugment"}] if loader == "unlabeled" else [{}]

    def train_step(self, model, batch, key):
        output = super().train_step(model, batch, key)
        other = batch.extra["unlabeled"]
        weak, strong = (model(view).float().softmax(1) for view in other.images)
        output.loss = output.loss + ((weak - strong) ** 2).mean() * (1 + other.index.float().mean() / 100)
        return output


@pytest.mark.slow
@pytest.mark.parametrize("place", [(1, 0), (1, 3)])
def test_a_run_resumes_bitwise_and_does_not_depend_on_the_workers(small_cfg, monkeypatch, unlabeled, tmp_path, place):
    words = own_task(monkeypatch, extra=lambda cfg: {"unlabeled": unlabeled}, base=Both)
    cfg = small_cfg(*words, "TRAIN.WORKERS", 2, "CHECKPOINT.EVERY_STEPS", 1, "OUT_DIR", tmp_path / "resumed")
    train_and_kill(cfg, place)
    train_model(cfg)
    restarts, clear = [], ProcessPool.clear
    monkeypatch.setattr(ProcessPool, "clear", lambda self: restarts.append(1) or clear(self))
    before = {*multiprocessing.active_children()}
    for name, number in (("alone", 0), ("shared", 2)):
        train_model(small_cfg(*words, "TRAIN.WORKERS", number, "OUT_DIR", tmp_path / name))
        assert_same_run(tmp_path / "resumed", tmp_path / name)
    assert len(restarts) == 1, "the workers make the batches of all loaders in one pass"
    assert len({*multiprocessing.active_children()} - before) <= 2
    log = (tmp_path / "alone" / "train.log").read_text()
    assert "loader unlabeled: 20 images, 8 per step; view 1: random resized crop" in log
