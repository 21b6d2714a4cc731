"""Batches: the index of every image, in every form of a batch."""

import pytest
import torch
from support.batches import ALONE, CPU, WAYS, assert_same_batches, batches_of
from support.images import draw_folder
from support.packs import pack
from torch.utils.data._utils import pin_memory

from distribuuuu.data.batch import Batch, map_leaves
from distribuuuu.data.loader import build_loader

# The index


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("broken", [False, True])
def test_the_index_is_that_of_the_image_shown_also_of_a_substitute(small_cfg, tmp_path, way, broken):
    for split in ("train", "val"):
        draw_folder(tmp_path / "data", split, {"ant": 12, "bee": 12})
    words = ("TRAIN.DATASET", tmp_path / "data", "MODEL.NUM_CLASSES", 2, "DATA.ON_BAD_IMAGE", "skip", *way)
    whole = build_loader(small_cfg(*words), ALONE, CPU, train=False)
    crops = torch.cat([batch.images for batch in whole])
    if broken:
        (tmp_path / "data" / "val" / "bee" / "005.jpg").write_bytes(b"torn")
    for batch in build_loader(small_cfg(*words), ALONE, CPU, train=False):
        shown = [(crops == image).flatten(1).all(1).nonzero().item() for image in batch.images]
        assert batch.index.dtype == torch.int64 and batch.index.tolist() == shown
        assert (17 in batch.index.tolist()) == (not broken and len(batch.index) == 8)
        assert batch.targets.tolist() == [whole.images.label(index) for index in batch.index.tolist()]


@pytest.mark.parametrize("words", [
    (), ("DATA.REPEATS", 3), ("DATA.SAMPLING", "balanced"), ("DATA.SHUFFLE", "blocks"), ("TRAIN.GLOBAL_BATCH_SIZE", 24),
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


def test_the_thread_that_pins_memory_keeps_the_form_of_a_batch(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self + 0)
    zero = torch.zeros(2)
    batch = Batch((zero, zero), {"pair": (zero, zero)}, zero, {"other": Batch(zero, zero)})
    pinned, broken = pin_memory.pin_memory((batch, ("a message",)))
    moved = map_leaves(torch.Tensor, lambda tensor: tensor + 1, pinned)
    assert isinstance(moved.images, tuple) and isinstance(moved.targets["pair"], tuple) and len(broken) == 1
    assert torch.equal(moved.extra["other"].images, zero + 1) and moved.extra["other"].index is None
    assert map_leaves(int, str, [1, (2, None)]) == ("1", ("2", None)), "some versions of torch make lists of tuples"
