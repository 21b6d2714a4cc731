"""The division of a step, class balance, chosen images, and image sizes that grow over the epochs, in any worker."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.batches import ALONE, CPU, assert_same_batches
from support.images import draw_folder
from support.tables import slow

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.batch import Pass
from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.data.class_balance import CLASS_POWERS, ClassBalance
from distribuuuu.data.loader import build_loader
from distribuuuu.data.samplers import EvalSampler, ResumableDistributedSampler
from distribuuuu.data.views import progressive_im_size
from distribuuuu.models import build_model, check_model

GROWING = ("TRAIN.IM_SIZE_START", 8, "TRAIN.IM_SIZE_EPOCHS", [1, 5], "TRAIN.IM_SIZE_MULTIPLE", 2)
WAYS = [(), ("TRAIN.WORKERS", 2), ("TRAIN.WORKERS", 2, "DATA.WORKER_KIND", "thread"), ("DATA.LOADER", "device")]
# Class 2 has no image, class 4 a single one.
COUNTS = {0: 400, 1: 90, 2: 0, 3: 9, 4: 1}
LABELS = [label for label, count in COUNTS.items() for _ in range(count)]


def sampler(batch_size: int, world_size: int, rank: int, repeats: int = 1, balanced: bool = True):
    plan = plan_batches(batch_size, 24, world_size)
    balance = ClassBalance(LABELS, 0.0) if balanced else None
    return ResumableDistributedSampler(500, plan, rank, repeats, balance=balance)


def epoch_of(samplers, seed=3, epoch=1, first_step=0):
    """Return the sample keys of each step over all processes, in the order of the global batch."""
    for one in samplers:
        one.set_position(seed, epoch, first_step)
    plan = samplers[0].plan
    micros = list(zip(*map(list, samplers), strict=True))
    flat = [[key for part in micro for key in part] for micro in micros]
    return [sum(flat[start : start + plan.accum_steps], []) for start in range(0, len(flat), plan.accum_steps)]


@pytest.mark.parametrize("policy", CLASS_POWERS)
def test_classes_come_as_often_as_their_weights_say_and_images_of_a_class_equally(policy):
    num = 200_000
    drawn = ClassBalance(LABELS, CLASS_POWERS[policy]).draw(num, torch.Generator().manual_seed(0))
    weights = {label: count ** CLASS_POWERS[policy] if count else 0 for label, count in COUNTS.items()}
    found = Counter(LABELS[index] for index in drawn.tolist())
    for label, weight in weights.items():
        share = weight / sum(weights.values())
        assert abs(found[label] - num * share) <= 5 * math.sqrt(num * share * (1 - share))
    of_class_3 = Counter(index for index in drawn.tolist() if LABELS[index] == 3)
    assert len(of_class_3) == 9 and max(of_class_3.values()) < 1.2 * min(of_class_3.values())


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("repeats", [1, 3])
def test_steps_are_a_function_of_seed_and_epoch_whatever_the_processes(repeats, balanced):
    whole = epoch_of([sampler(24, 1, 0, repeats, balanced)])
    assert len(whole) == 20 and all(len(step) == 24 for step in whole)
    for world_size, batch_size in ((2, 12), (2, 4), (3, 8), (3, 2), (4, 6), (1, 6)):
        parts = [sampler(batch_size, world_size, rank, repeats, balanced) for rank in range(world_size)]
        assert epoch_of(parts) == whole
        assert epoch_of(parts, first_step=7) == whole[7:] and epoch_of(parts, first_step=20) == []
    for position in ({"epoch": 2}, {"seed": 4}):
        assert epoch_of([sampler(24, 1, 0, repeats, balanced)], **position) != whole
    indices = [index for step in whole for _, index in step]
    assert balanced or len(set(indices)) == 480 // repeats


def test_repeats_bring_each_image_of_a_step_so_often_with_other_augmentation():
    plain, seen = epoch_of([sampler(24, 1, 0, 1, balanced=False)]), []
    for places in epoch_of([sampler(24, 1, 0, 3, balanced=False)]):
        indices = [index for _, index in places]
        assert indices == indices[:8] * 3 and len(set(places)) == 24
        seen += places[:8]
    assert seen == sum(plain, [])[:160]  # the first time, an image is augmented as without repeats
    for repeats in (5, 7, 24, 30):  # where they do not divide a step, some images come once less
        for places in epoch_of([sampler(4, 2, rank, repeats, balanced=False) for rank in range(2)]):
            counts = Counter(index for _, index in places).values()
            assert len(counts) == -(-24 // repeats) and max(counts) - min(counts) <= 1 and len(set(places)) == 24
            assert len(counts) == 1 or all(places[place][1] != places[place ^ 1][1] for place in range(24))


def test_evaluation_takes_each_image_exactly_once():
    for num_images, batch_size, world_size in [(37, 8, 1), (37, 8, 2), (37, 1, 3), (2, 4, 5)]:
        parts = [EvalSampler(num_images, batch_size, rank, world_size) for rank in range(world_size)]
        taken = [index for sampler in parts for batch in sampler for _, index in batch]
        assert sorted(taken) == list(range(num_images))
        assert [len(sampler) for sampler in parts] == [len(list(sampler)) for sampler in parts]


def test_sizes_are_those_of_ffcv_with_ends_as_they_were_set_and_multiples_between():
    for start, end, first, last in [(160, 192, 65, 76), (160, 192, 12, 14), (96, 224, 0, 33)]:
        for epoch in range(100):
            line = np.interp([epoch], [first, last], [start, end])
            assert progressive_im_size(epoch, start, end, first, last, 32) == int(np.round(line[0] / 32)) * 32
    sizes = [progressive_im_size(epoch, 88, 176, 3, 20, 32) for epoch in range(30)]
    assert sizes[:4] == [88] * 4 and sizes[20:] == [176] * 10 and sizes == sorted(sizes)
    assert set(sizes) == {88, 96, 128, 160, 176}


def test_a_model_for_one_size_only_is_an_error_and_others_may_grow():
    words = "TRAIN.IM_SIZE_START 32 TRAIN.IM_SIZE 64 TEST.IM_SIZE 64 TRAIN.IM_SIZE_EPOCHS [0,5] MODEL.ARCH"
    growing = words.split()
    with pytest.raises(ConfigError, match="botnet50 has one fixed image size.*; fix: set TRAIN.IM_SIZE_START 0$"):
        check_model(load_cfg(None, [*growing, "botnet50"]))
    vit = [*growing, "timm/vit_tiny_patch16_224"]
    with pytest.raises(ConfigError, match="IM_SIZE_START 0, or MODEL.KWARGS.dynamic_img_size True$"):
        build_model(load_cfg(None, vit))
    model = build_model(load_cfg(None, [*vit, "MODEL.KWARGS.dynamic_img_size", "True"])).eval()
    with torch.inference_mode():
        assert all(model(torch.zeros(1, 3, side, side)).shape == (1, 1000) for side in (32, 64))


@pytest.mark.parametrize("way", [WAYS[0], slow(WAYS[1]), *WAYS[2:]])
def test_an_alternating_flip_is_undone_in_the_next_epoch(small_cfg, way):
    words = ("DATA.CROP", "pad", "DATA.CROP_PADDING", 2, *way)
    flipped = {}
    for mode in ("alternating", "random"):
        loader = build_loader(small_cfg(*words, "DATA.FLIP_MODE", mode), ALONE, CPU, train=True)
        plain = build_loader(small_cfg(*words, "DATA.FLIP", 0), ALONE, CPU, train=True)
        for epoch in range(3):
            flipped[mode, epoch] = found = set()
            batches = zip(loader.batches_from(3, epoch, 0), plain.batches_from(3, epoch, 0), strict=True)
            for (images, _, index, *_), (upright, *_) in batches:
                for image, original, number in zip(images, upright, index.tolist(), strict=True):
                    assert torch.equal(image, original) or torch.equal(image.flip(-1), original)
                    found |= set() if torch.equal(image, original) else {number}
    first, second, third = (flipped["alternating", epoch] for epoch in range(3))
    assert first == third and first.isdisjoint(second) and len(first | second) == 48 and 12 < len(first) < 36
    assert len({frozenset(flipped["random", epoch]) for epoch in range(3)} | {frozenset(first)}) == 4


@pytest.mark.parametrize("way", WAYS)
def test_a_substitute_is_one_of_the_chosen_images_and_precise_batch_norm_takes_all(small_cfg, chosen_data, way):
    (chosen_data[1] / "train" / "ant" / "003.jpg").write_bytes(b"damaged")
    words = (*chosen_data, "DATA.ON_BAD_IMAGE", "skip", *way)
    loader, other = (build_loader(small_cfg(*words), launch, CPU, train=True) for launch in (ALONE, ALONE))
    loader.choose(range(5))
    taken = [batch.index.tolist() for epoch in range(8) for batch in loader.batches_from(3, epoch, 0)]
    assert loader.num_broken and set(itertools.chain(*taken)) == {0, 1, 2, 4}
    assert sum(map(len, loader.iter_images(3, 0, 24))) == 24 and loader.num_steps == 1
    for mine, theirs in zip(loader.iter_images(3, 1, 24), other.iter_images(3, 1, 24), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_takes_the_chosen_images_whatever_was_made_ahead(small_cfg, chosen_data, way):
    loader, alone = (build_loader(small_cfg(*chosen_data, *more), ALONE, CPU, train=True) for more in (way, ()))
    assert loader.num_steps == 6
    choices = [None, range(0, 24, 2), range(17), None]
    for epoch, chosen in enumerate(choices):
        for one in (loader, alone):
            one.choose(chosen)
        assert loader.num_steps == loader.steps_of(epoch) == (24 if chosen is None else len(chosen)) // 4
        batches = loader.batches_from(3, epoch, 0)
        samples, sampler = loader.samples, loader.sampler
        loader.expect([Pass(samples, replace(sampler, seed=3, epoch=epoch + 1, first_step=0))])  # of an older choice
        found = list(batches)
        taken = torch.cat([batch.index for batch in found]).tolist()
        assert set(taken) <= set(range(24) if chosen is None else chosen) and len(set(taken)) == len(taken)
        assert_same_batches(found, list(alone.batches_from(3, epoch, 0)))
        assert_same_batches(found[1:], list(alone.batches_from(3, epoch, 1)))


@pytest.fixture
def chosen_data(tmp_path):
    draw_folder(tmp_path, "train", {"ant": 12, "bee": 12})
    draw_folder(tmp_path, "val", {"ant": 1, "bee": 1})
    return ("TRAIN.DATASET", tmp_path, "MODEL.NUM_CLASSES", 2, "TRAIN.BATCH_SIZE", 4)


@pytest.mark.parametrize(("images", "in_order"), [(torch.arange(100, 350), False), (torch.arange(250) % 7, True)])
def test_processes_share_the_chosen_images_of_a_step(images, in_order):
    alone, *shared = (
        ResumableDistributedSampler(500, plan_batches(4, 24, world_size), rank)
        for world_size, rank in ((1, 0), (3, 0), (3, 1), (3, 2))
    )
    for one in (alone, *shared):
        one.choose(images, in_order)
    assert epoch_of([alone]) == epoch_of(shared) and len(epoch_of([alone])) == 10
    rows = [tuple(row) for keys in alone for row in keys.rows.tolist()]
    assert len({*rows}) == 240 and (not in_order or [row[1] for row in rows] == images[:240].tolist())


@pytest.mark.parametrize("chosen", [[*range(12), 0], range(11), range(12, 25)])
def test_images_that_cannot_be_chosen_are_an_error(chosen):
    with pytest.raises(ConfigError, match="TASK.NAME: the task chose"):
        ResumableDistributedSampler(24, plan_batches(12, 12, 1), 0).choose(chosen)
    with pytest.raises(ConfigError, match="DATA.SAMPLING"):
        sampler(24, 1, 0).choose(range(100))
    with pytest.raises(ConfigError, match="DATA.REPEATS"):
        ResumableDistributedSampler(24, plan_batches(12, 12, 1), 0, repeats=2).choose([0] * 24, in_order=True)


def test_a_global_batch_falls_into_equal_parts():
    for batch_size, global_batch, world_size, micro, accum_steps in [
        (32, 0, 1, 32, 1), (32, 0, 8, 32, 1), (32, 256, 8, 32, 1), (128, 8192, 64, 128, 1), (128, 8192, 2, 128, 32),
        (32, 48, 3, 16, 1), (32, 100, 1, 25, 4), (64, 12, 3, 4, 1), (1, 6, 2, 1, 3),
    ]:  # fmt: skip
        plan = plan_batches(batch_size, global_batch, world_size)
        assert (plan.micro_batch, plan.accum_steps) == (micro, accum_steps)
        assert plan.global_batch == (global_batch or batch_size * world_size)


def test_what_does_not_fit_says_what_would():
    for batch_size, global_batch, world_size in [(32, 100, 3), (32, 37, 1), (8, 2, 3), (64, 254, 2)]:
        with pytest.raises(ConfigError, match="fix: set it to") as caught:
            plan_batches(batch_size, global_batch, world_size)
        offered = [int(word) for word in str(caught.value).split(";")[-1].split() if word.isdigit()]
        assert offered
        for size in offered:
            assert plan_batches(batch_size, size, world_size).global_batch == size
