"""Batches made ahead for expected passes: early, bounded, exact, and invisible if another pass follows."""

import itertools
import multiprocessing
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from distribuuuu.data.batch import PREFETCH, Pass, Samples
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.loader import start_workers
from distribuuuu.data.samplers import EvalSampler, ResumableDistributedSampler
from distribuuuu.data.transforms import CenterCrop

BATCH = 4
WAYS = [("process", 0), ("process", 2), ("thread", 3)]
AHEAD = WAYS[1:]


class Counted(ImageDataset):
    """Gray squares, each of its number; the number of reads is known in all processes."""

    classes = ("all",)

    def __init__(self, num: int, broken: int = -1):
        self.labels, self.broken = np.zeros(num, int), broken
        self._reads = multiprocessing.Value("q", 0)

    @property
    def num_reads(self) -> int:
        return self._reads.value

    def read(self, index: int) -> np.ndarray:
        with self._reads:
            self._reads.value += 1
        if index == self.broken:
            raise OSError("cannot be read")
        return np.full((8, 8, 3), index, dtype=np.uint8)


class Pool:
    """The passes of a training and of an evaluation set that share workers."""

    def __init__(self, kind: str, num: int, val: Counted | None = None):
        self.data = Counted(48), val or Counted(30)
        train, val_samples = (Samples(images, CenterCrop(8, 8), "auto", skip_broken=True) for images in self.data)
        self.train = Pass(train, ResumableDistributedSampler(48, BatchPlan(BATCH, 1, 1), 0))
        self.val = Pass(val_samples, EvalSampler(30, BATCH, 0, 1))
        self.train_batches, self.val_batches = start_workers([self.train, self.val], kind, num, pin_memory=False)
        self.most_ahead = BATCH * PREFETCH * num

    def epoch(self, epoch: int, first_step: int = 0, seed: int = 1) -> Pass:
        sampler = replace(self.train.sampler, seed=seed, epoch=epoch, first_step=first_step)
        return Pass(self.train.samples, sampler)

    def read(self, one: Pass):
        """Return the batches of a pass, which the loaders would read the same way."""
        if one.samples is self.val.samples:
            return iter(self.val_batches)
        self.train.sampler.set_position(one.sampler.seed, one.sampler.epoch, one.sampler.first_step)
        batches = iter(self.train_batches)
        self.train.sampler.set_position(7, 7, 7)  # the position is that of the call above
        return batches

    def num_reads(self) -> int:
        return sum(images.num_reads for images in self.data)

    def wait_for_reads(self, num: int) -> None:
        deadline = time.monotonic() + 60
        while self.num_reads() < num and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.num_reads() >= num


def numbers(batches) -> list[list[int]]:
    return [batch.images[:, 0, 0, 0].tolist() for batch, _ in batches]


def expected(one: Pass) -> list[list[int]]:
    return [[index for _, index in keys] for keys in one.sampler]


@pytest.mark.parametrize("kind, num", AHEAD)
def test_workers_continue_with_the_expected_passes_within_their_bound(kind, num):
    pool = Pool(kind, num)
    passes = [pool.epoch(0, first_step=9), pool.val, pool.epoch(1), pool.val]
    assert pool.num_reads() == 0
    pool.train_batches.pool.expected = iter(passes[1:])
    taken = 0
    for number, one in enumerate(passes):
        for batch, keys in zip(pool.read(one), expected(one), strict=True):
            assert numbers([batch]) == [keys]
            taken += len(keys)
            assert pool.num_reads() <= taken + pool.most_ahead
        if number < 2:  # before the next pass is requested
            pool.wait_for_reads(taken + pool.most_ahead - BATCH)  # the last batch of the evaluation is smaller
            time.sleep(0.05)
            assert pool.num_reads() <= taken + pool.most_ahead
    assert pool.num_reads() == taken, "a batch was made twice"


@pytest.mark.parametrize("kind, num", WAYS)
def test_what_is_requested_is_read_whatever_was_expected(kind, num):
    pool = Pool(kind, num)
    start, rolled_back = pool.epoch(0), pool.epoch(0, seed=2)
    actual = [pool.val, rolled_back, pool.epoch(1), pool.epoch(0, first_step=3), pool.epoch(1, first_step=12), pool.val]
    for one in actual:
        pool.train_batches.pool.expected = [pool.epoch(1)._replace(num=2), pool.val]
        assert numbers(pool.read(start)) == expected(start)
        assert numbers(pool.read(one)) == expected(one)
    assert expected(rolled_back) != expected(start)
    for left_early in (0, 1, 3):
        pool.train_batches.pool.expected = [pool.val]
        batches = pool.read(start)
        assert numbers(itertools.islice(batches, left_early)) == expected(start)[:left_early]
        assert numbers(pool.read(pool.val)) == expected(pool.val)
        assert numbers(pool.read(start)) == expected(start)


@pytest.mark.parametrize("kind, num", WAYS)
def test_passes_can_be_read_in_turn(kind, num):
    pool = Pool(kind, num)
    pool.train_batches.pool.expected = [pool.val, pool.epoch(1)]
    batches, keys = pool.read(pool.epoch(0)), expected(pool.epoch(0))
    for step in range(0, 12, 4):
        assert numbers(next(batches) for _ in range(4)) == keys[step : step + 4]
        assert numbers(pool.read(pool.val)) == expected(pool.val)
    assert list(batches) == []
    pairs = list(zip(pool.read(pool.val), pool.read(pool.val), strict=True))
    assert numbers(one for one, _ in pairs) == numbers(other for _, other in pairs) == expected(pool.val)


class SlowEnd(Counted):
    """The last image takes so long that later batches of other workers arrive before it."""

    def read(self, index: int) -> np.ndarray:
        time.sleep(0.5 * (index == len(self) - 1))
        return super().read(index)


def test_a_batch_that_arrives_during_an_evaluation_can_be_trained_on():
    pool = Pool("process", 2, SlowEnd(30))
    pool.val_batches.pool.expected = [pool.epoch(0)]
    with torch.inference_mode():
        assert numbers(pool.read(pool.val)) == expected(pool.val)
    assert not any(batch.targets.is_inference() for batch, _ in pool.read(pool.epoch(0)))
