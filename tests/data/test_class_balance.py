"""Classes drawn equally often, or by the root of their size: frequencies, position, and runs on such draws."""

import math
from collections import Counter

import pytest
import torch
from support.images import draw_folder
from support.processes import on_processes
from support.runs import assert_close, assert_same_run, small_options, train_and_read, train_and_stop

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.batch_plan import plan_batches
from distribuuuu.data.class_balance import POWERS, ClassBalance, build_balance
from distribuuuu.data.loader import build_loader
from distribuuuu.data.samplers import ResumableDistributedSampler
from distribuuuu.launch.detect import detect_launch
from distribuuuu.trainer import train_model

# Class 2 has no image, class 4 a single one.
COUNTS = {0: 400, 1: 90, 2: 0, 3: 9, 4: 1}
LABELS = [label for label, count in COUNTS.items() for _ in range(count)]


def sampler(batch_size: int, world_size: int, rank: int, repeats: int = 1) -> ResumableDistributedSampler:
    plan = plan_batches(batch_size, 20, world_size)
    return ResumableDistributedSampler(500, plan, rank, repeats, balance=ClassBalance(LABELS, 0.0))


def epoch_of(samplers, seed=3, epoch=1, first_step=0):
    """Return the positions of each step over all processes, in the order of the global batch."""
    for one in samplers:
        one.set_position(seed, epoch, first_step)
    plan = samplers[0].plan
    micros = list(zip(*map(list, samplers), strict=True))
    flat = [[position for part in micro for position in part] for micro in micros]
    return [sum(flat[begin : begin + plan.accum_steps], []) for begin in range(0, len(flat), plan.accum_steps)]


@pytest.mark.parametrize("policy", POWERS)
def test_classes_come_as_often_as_their_weights_say_and_images_of_a_class_equally(policy):
    num = 200_000
    drawn = ClassBalance(LABELS, POWERS[policy]).draw(num, torch.Generator().manual_seed(0))
    weights = {label: count ** POWERS[policy] if count else 0 for label, count in COUNTS.items()}
    found = Counter(LABELS[index] for index in drawn.tolist())
    for label, weight in weights.items():
        share = weight / sum(weights.values())
        assert abs(found[label] - num * share) <= 5 * math.sqrt(num * share * (1 - share))
    of_class_3 = Counter(index for index in drawn.tolist() if LABELS[index] == 3)
    assert len(of_class_3) == 9 and max(of_class_3.values()) < 1.2 * min(of_class_3.values())


def test_labels_in_any_order_belong_to_their_images():
    labels = torch.tensor([2, 0, 2, 1, 0, 2, 2])
    drawn = ClassBalance(labels, 0.0).draw(9000, torch.Generator().manual_seed(1))
    found = Counter(labels[drawn].tolist())
    assert set(drawn.tolist()) == set(range(7)) and all(abs(found[label] - 3000) < 250 for label in range(3))


@pytest.mark.parametrize("repeats", [1, 2])
def test_the_draw_is_a_function_of_seed_and_epoch_whatever_the_processes(repeats):
    whole = epoch_of([sampler(20, 1, 0, repeats)])
    assert len(whole) == 25 and all(len(step) == 20 for step in whole)
    for world_size, batch_size in ((2, 10), (2, 5), (4, 5), (1, 5)):
        parts = [sampler(batch_size, world_size, rank, repeats) for rank in range(world_size)]
        assert epoch_of(parts) == whole
        assert epoch_of(parts, first_step=7) == whole[7:]
    assert epoch_of([sampler(20, 1, 0, repeats)], epoch=2) != whole != epoch_of([sampler(20, 1, 0, repeats)], seed=4)


def test_an_image_that_comes_again_is_augmented_otherwise():
    positions = sum(epoch_of([sampler(20, 1, 0)]), [])
    single = [position for position in positions if LABELS[position[1]] == 4]
    assert len(single) > 50 and len(set(single)) == len(single)
    twice = sum(epoch_of([sampler(20, 1, 0, repeats=2)]), [])
    assert len(set(twice)) == len(twice) == 500


def test_uniform_is_the_permutation_it_was(small_cfg):
    cfg = small_cfg()
    loader = build_loader(cfg, detect_launch(), torch.device("cpu"), train=True)
    assert build_balance(cfg, loader.images) is None
    assert sorted(loader.sampler.epoch_order().tolist()) == list(range(48))
    with pytest.raises(ConfigError, match="DATA.SAMPLING .*did you mean balanced"):
        small_cfg("DATA.SAMPLING", "balance")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    root = tmp_path_factory.mktemp("uneven")
    draw_folder(root, "train", {"ant": 30, "bee": 5, "cat": 1})
    draw_folder(root, "val", {"ant": 3, "bee": 3, "cat": 3})
    return root


def test_runs_on_draws_resume_and_do_not_depend_on_workers_processes_or_the_loader(uneven, tmp_path, monkeypatch):
    def config(name, *words):
        shared = ("DATA.SAMPLING", "balanced", "TRAIN.GLOBAL_BATCH_SIZE", 12, "CHECKPOINT.EVERY_STEPS", 1)
        return load_cfg(None, small_options(uneven, tmp_path / name, *shared, "MODEL.KWARGS.norm", "group", *words))

    whole = train_and_read(config("whole"))
    train_and_stop(config("parts"), (0, 2), monkeypatch)
    train_model(config("parts", "TRAIN.WORKERS", 2))
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert_close(on_processes(2, train_and_read, config("two"))[0], whole, 1e-5)
    assert_close(train_and_read(config("device", "DATA.LOADER", "device")), whole, 1e-5)
    loader = build_loader(config("labels"), detect_launch(), torch.device("cpu"), train=True)
    labels = Counter(
        label for epoch in range(20) for _, batch in loader.batches_from(3, epoch, 0) for label in batch.tolist()
    )
    assert all(abs(labels[label] - 240) < 60 for label in range(3)) and loader.num_steps == 3
