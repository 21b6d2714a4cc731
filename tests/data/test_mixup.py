"""Mixup and cutmix: as the papers have them, the same on any number of processes, from position alone."""

import math

import numpy as np
import pytest
import torch
from support.runs import make_cfg

from distribuuuu.config import ConfigError
from distribuuuu.data.batch_plan import BatchPlan, plan_batches
from distribuuuu.data.mixup import PairMixer, build_mixer

NUM_CLASSES = 7


def mixer(global_batch: int = 24, world_size: int = 1, batch_size: int = 24, rank: int = 0, **options) -> PairMixer:
    plan = plan_batches(batch_size, global_batch, world_size)
    return PairMixer(plan, rank, NUM_CLASSES, **options)


def batch(num: int = 24, side: tuple[int, int] = (12, 17), last: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(num, 3, *side, generator=generator)
    labels = torch.randint(0, NUM_CLASSES, (num,), generator=generator)
    return images.to(memory_format=torch.channels_last) if last else images, labels


def mixed(mix: PairMixer, images: torch.Tensor, labels: torch.Tensor, *position: int):
    return mix(images.clone(memory_format=torch.preserve_format), labels, *(position or (5, 1, 3, 0)))


def naive(mix: PairMixer, images: torch.Tensor, labels: torch.Tensor, *position: int) -> tuple[np.ndarray, np.ndarray]:
    """Mix image by image with numpy, as the papers' formulas say, with the parameters that the mixer draws."""
    drawn, arrays = mix.draw(*position[:3]), images.double().numpy()
    height, width = arrays.shape[2:]
    results, targets = [], []
    for number, array in enumerate(arrays):
        group = number // mix.group
        partner, kept = number ^ 1, float(drawn.lam[group])
        result = array.copy()
        if not drawn.mixed[group]:
            kept = 1.0
        elif drawn.use_cutmix[group]:
            cut_height, cut_width = (int(side * math.sqrt(1 - kept)) for side in (height, width))
            middle = int(drawn.row[group] * height), int(drawn.column[group] * width)
            top, bottom = max(middle[0] - cut_height // 2, 0), min(middle[0] + cut_height // 2, height)
            left, right = max(middle[1] - cut_width // 2, 0), min(middle[1] + cut_width // 2, width)
            result[:, top:bottom, left:right] = arrays[partner][:, top:bottom, left:right]
            kept = 1 - (bottom - top) * (right - left) / (height * width)
        else:
            result = kept * array + (1 - kept) * arrays[partner]
        target = np.zeros(NUM_CLASSES)
        target[labels[number]] += kept
        target[labels[partner]] += 1 - kept
        results.append(result)
        targets.append(target)
    return np.stack(results), np.stack(targets)


KINDS = {
    "mixup": {"mixup": 0.8}, "cutmix": {"cutmix": 1.0}, "both": {"mixup": 0.2, "cutmix": 1.0, "cutmix_share": 0.4},
    "some": {"mixup": 0.8, "cutmix": 1.0, "probability": 0.6}, "by step": {"mixup": 0.8, "cutmix": 1.0, "group": 24},
    "groups of 10": {"mixup": 0.2, "cutmix": 1.0, "probability": 0.6, "group": 10},  # the last one has 4 images
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_images_and_targets_are_those_of_the_papers_formulas(kind):
    for step in range(10, 22):  # of two blocks
        images, labels = batch(last=step % 2 == 1)
        mix, position = mixer(**KINDS[kind]), (5, 1, step, 0)
        results, targets = mixed(mix, images, labels, *position)
        expected, expected_targets = naive(mix, images, labels, *position)
        np.testing.assert_allclose(results.numpy(), expected, atol=1e-5)
        np.testing.assert_allclose(targets.numpy(), expected_targets, atol=1e-6)
        assert results.dtype == targets.dtype == torch.float32 and targets.shape == (24, NUM_CLASSES)
        assert results.stride() == images.stride()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_mixed_alike_on_any_number_of_processes_and_micro_batches(kind):
    images, labels = batch()
    whole, whole_targets = mixed(mixer(**KINDS[kind]), images, labels, 5, 1, 3, 0)
    for world_size in (1, 2, 3):
        for batch_size in (24, 6, 4, 2):
            plan = plan_batches(batch_size, 24, world_size)
            for rank in range(world_size):
                mix = PairMixer(plan, rank, NUM_CLASSES, **KINDS[kind])
                for micro in range(plan.accum_steps):
                    begin = (micro * world_size + rank) * plan.micro_batch
                    part = slice(begin, begin + plan.micro_batch)
                    results, targets = mixed(mix, images[part], labels[part], 5, 1, 3, micro)
                    assert torch.equal(results, whole[part]) and torch.equal(targets, whole_targets[part])


def test_the_shares_are_drawn_from_beta_and_each_kind_has_its_own():
    mix = mixer(20000, 1, 20000, mixup=0.2, cutmix=1.0, cutmix_share=0.3, probability=0.8)
    drawn = mix.draw(0, 0, 0)
    assert abs(drawn.use_cutmix.mean() - 0.3) < 0.02 and abs(drawn.mixed.mean() - 0.8) < 0.02
    for is_cutmix, alpha in ((True, 1.0), (False, 0.2)):
        lam = drawn.lam[drawn.use_cutmix == is_cutmix]
        assert 0 <= lam.min() and lam.max() <= 1 and abs(lam.mean() - 0.5) < 0.02
        assert abs(lam.var() - 1 / (4 * (2 * alpha + 1))) < 0.01
    assert abs(np.corrcoef(drawn.row, drawn.column)[0, 1]) < 0.04
    assert len(set(mixer(mixup=0.8).draw(0, 0, 0).lam.tolist())) == 12


def mixing_cfg(*words):
    return make_cfg("MODEL.NUM_CLASSES", NUM_CLASSES, *words)


def test_the_config_says_how_to_mix():
    words = ("AUG.MIXUP", 0.2, "AUG.CUTMIX", 1, "AUG.MIX_PROB", 0.9, "AUG.CUTMIX_SHARE", 0.3, "AUG.MIX_BY", "step")
    plan = BatchPlan(4, 1, 1)
    expected = PairMixer(plan, 0, NUM_CLASSES, 0.2, 1.0, 0.9, 0.3, group=4)
    assert str(build_mixer(mixing_cfg(*words), plan)) == str(expected)
    plan, words = BatchPlan(8, 2, 3), ("AUG.CUTMIX", 1)
    groups = [build_mixer(mixing_cfg(*words, "AUG.MIX_GROUP", num), plan, rank=0) for num in (0, 2, 10, 48, 512)]
    assert [mix.group for mix in groups] == [2, 2, 10, 48, 512]
    drawn = [mix.draw(5, 0, 1) for mix in groups[2:]]
    assert [len(each.lam) for each in drawn] == [5, 1, 1] and drawn[1].lam == drawn[2].lam


def test_pairs_need_an_even_number_of_images():
    for key in ("MIXUP", "CUTMIX"):
        with pytest.raises(ConfigError, match=rf"AUG.{key} \(command line\): got micro-batches of 5 images .* fix: "):
            build_mixer(mixing_cfg(f"AUG.{key}", 0.5), plan_batches(5, 10, 2), rank=0)
