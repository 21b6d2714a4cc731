"""Batches: the index of every image, and targets of every kind."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.batches import ALONE, CPU, WAYS, assert_same_batches, batches_of, own_task, register
from support.images import draw_folder
from support.packs import pack
from support.runs import assert_same_run, train_and_kill
from support.tables import pairwise, slow

from distribuuuu.config import ConfigError
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.loader import build_loader
from distribuuuu.data.mixup import build_mixer
from distribuuuu.tasks.classification import Classification
from distribuuuu.tasks.metrics import StepOutput
from distribuuuu.trainer import train_model


@pytest.mark.parametrize("broken, way", pairwise([(), (17,), range(16, 24)], WAYS))
def test_the_index_is_that_of_the_image_shown_and_a_broken_one_is_marked(small_cfg, tmp_path, way, broken):
    """One of the second batch, or all."""
    for split in ("train", "val"):
        draw_folder(tmp_path / "data", split, {"ant": 12, "bee": 12})
    words = ("TRAIN.DATASET", tmp_path / "data", "MODEL.NUM_CLASSES", 2, "DATA.ON_BAD_IMAGE", "skip", *way)
    whole = build_loader(small_cfg(*words), ALONE, CPU, train=False)
    crops = torch.cat([batch.images for batch in whole])
    for number in broken:
        (tmp_path / "data" / "val" / "bee" / f"{number - 12:03d}.jpg").write_bytes(b"torn")
    for batch in (loader := build_loader(small_cfg(*words), ALONE, CPU, train=False)):
        marks = torch.zeros(len(batch.index), dtype=torch.bool) if batch.broken is None else batch.broken
        assert batch.index[marks].tolist() == [number for number in batch.index.tolist() if number in broken]
        assert all((image == image[:, :1, :1]).all() for image in batch.images[marks]), "nothing is in its place"
        shown = [(crops == image).flatten(1).all(1).nonzero().item() for image in batch.images[~marks]]
        assert batch.index.dtype == torch.int64 and batch.index[~marks].tolist() == shown
        assert batch.targets.tolist() == [whole.images.label(index) for index in batch.index.tolist()]
    assert loader.num_broken == len(broken)


@pytest.mark.parametrize("words", [
    (), slow(("DATA.REPEATS", 3)), ("DATA.SAMPLING", "balanced"),
    slow(("TRAIN.GLOBAL_BATCH_SIZE", 24)),
], ids=str)  # fmt: skip
def test_the_index_of_a_training_image_is_that_of_its_key_for_every_order(small_cfg, image_folder, tmp_path, words):
    pack(tmp_path / "pack", "TRAIN.DATASET", image_folder, "MODEL.NUM_CLASSES", 3, split="both")
    words = ("DATA.NAME", "packed", "TRAIN.DATASET", tmp_path / "pack", *words)
    batches = batches_of(small_cfg(*words))
    loader = build_loader(small_cfg(*words), ALONE, CPU, train=True)
    loader.sampler.set_position(5, 1, 1)
    for batch, keys in zip(batches, loader.sampler, strict=True):
        assert batch.index.tolist() == [index for _, index in keys]
        assert batch.targets.tolist() == [loader.images.label(index) for index in batch.index.tolist()]
    for way in WAYS[1:]:
        assert_same_batches(batches_of(small_cfg(*words, *way)), batches)


class Boxes(ImageDataset):
    """Gray squares with a class, a box, and parts of other types."""

    classes = ("even", "odd", "none")
    targets = "structured"
    has_splits = False

    @classmethod
    def from_cfg(cls, cfg, train):
        return cls()

    def __len__(self):
        return 30

    def read(self, index):
        return np.full((20, 20, 3), 5 * index, dtype=np.uint8)

    def label(self, index):
        mask = np.full((4, 5), index, dtype=np.uint8)
        return {"class": index % 2, "box": np.array([0, 1, index, 0.5]), "parts": (index, index / 2, mask)}


@pytest.fixture
def boxes(monkeypatch):
    """Return the words of a data set with structured targets and of a task for them."""
    register(monkeypatch, DATASETS, "boxes", Boxes)
    return "DATA.NAME", "boxes", *own_task(monkeypatch, base=Located)


class Located(Classification):
    """Classifies, and regresses the box from the logits."""

    def prepare_batch(self, batch, key):
        return batch

    def both(self, model, batch):
        logits = model(batch.images)
        box = F.l1_loss(logits.float(), batch.targets["box"][:, :3] / 30)
        labels = batch.targets["class"]
        return StepOutput(F.cross_entropy(logits, labels) + box, logits.detach(), labels)

    def train_step(self, model, batch, key):
        return self.both(model, batch)

    def eval_step(self, model, batch):
        return self.both(model, batch)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("train", [True, False])
def test_structured_targets_are_stacked_by_kind(small_cfg, boxes, way, train):
    batches = batches_of(small_cfg(*boxes, *way), train)
    assert_same_batches(batches, batches_of(small_cfg(*boxes), train))
    for batch in batches:
        expected = [Boxes().label(index) for index in batch.index.tolist()]
        (number, half, mask), box = batch.targets["parts"], batch.targets["box"]
        assert [tensor.dtype for tensor in (batch.targets["class"], number, mask)] == [torch.int64] * 3
        assert (box.dtype, half.dtype, mask.shape[1:]) == (torch.float32, torch.float32, (4, 5))
        for row, label in enumerate(expected):
            assert box[row].tolist() == label["box"].tolist() and batch.targets["class"][row] == label["class"]
            assert [number[row], half[row]] == [*label["parts"][:2]] and (mask[row] == label["parts"][0]).all()


@pytest.mark.slow
def test_a_run_on_structured_targets_resumes_and_is_evaluated_and_recorded(small_cfg, boxes, tmp_path):
    words = (*boxes, "CHECKPOINT.EVERY_STEPS", 1, "TEST.BATCH_SIZE", 7, "TRAIN.WORKERS", 1)
    train_and_kill(small_cfg(*words, "OUT_DIR", tmp_path / "resumed"), (1, 1))
    for name in ("resumed", "whole"):
        train_model(small_cfg(*words, "OUT_DIR", tmp_path / name))
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")
    with np.load(tmp_path / "whole" / "predictions.npz") as stored:
        assert stored["label"].tolist() == [index % 2 for index in range(30)] and stored["logits"].shape == (30, 3)


def test_what_needs_labels_says_so(small_cfg, boxes):
    with pytest.raises(ConfigError, match="TASK.NAME.*: got auto; the data has structured targets; fix: set a"):
        small_cfg("DATA.NAME", "boxes")
    cfg = small_cfg(*boxes, "AUG.MIXUP", 0.2)
    loader = build_loader(cfg, ALONE, CPU, train=True)
    batch = next(loader.batches_from(3, 0, 0))
    with pytest.raises(ConfigError, match="AUG.MIXUP: got structured targets or several views"):
        build_mixer(cfg, loader.plan)(batch.images, batch.targets, 3, 0, 0, 0)
