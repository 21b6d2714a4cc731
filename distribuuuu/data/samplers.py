"""Samplers: which images a step takes, in which order, and at which size.

Both samplers yield micro-batches as sample keys; a key identifies the image and seeds its augmentation. Workers are
started once, so the epoch travels in the key if the transform depends on it.
"""

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from distribuuuu.config import ConfigError
from distribuuuu.config.derived import part_of_epoch
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.seeding import SampleKey, SampleRNG, derive_seed

# Attributes of a sampler whose epochs take all images.
WHOLE: dict[str, Any] = {"chosen": None, "order": None, "choice": 0, "last": None}
# How many substitutes for a broken image are drawn for a step, if the task chose images.
_NUM_SUBSTITUTES = 21
# Keys that are computed at a time.
_BLOCK = 2**16


class BatchKeys:
    """The keys of a batch, and what comes along with it.

    Attributes:
        rows: a `SampleKey` in each row: int64 (N, 2 to 4).
        extra: the keys of the batches of other data sets by name.
        substitutes: images that may take the place of broken ones; empty: all.
        block, first: the rows of this and neighboring batches, and the first one of this batch among them.
    """

    def __init__(
        self, rows: Any, extra: "Mapping[str, BatchKeys] | None" = None, substitutes: Sequence[int] = (),
        block: Any = None, first: int = 0
    ):  # fmt: skip
        self.rows, self.extra, self.substitutes = np.asarray(rows, np.int64), extra or {}, substitutes
        self.block, self.first = self.rows if block is None else block, first

    def __reduce__(self) -> Any:  # without the block
        return BatchKeys, (self.rows, self.extra, self.substitutes)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[SampleKey]:
        return map(tuple, self.rows.tolist())

    def __getitem__(self, rows: slice) -> "BatchKeys":
        return BatchKeys(self.rows[rows])


def split_block(block: np.ndarray, size: int) -> Iterator[BatchKeys]:
    """Yield keys (N, 2 to 4) in batches of a size; the last one may be smaller."""
    for first in range(0, len(block), size):
        yield BatchKeys(block[first : first + size], block=block, first=first)


def split_images(indices: range, size: int) -> Iterator[BatchKeys]:
    """Yield the keys of images that are evaluated, in batches of a size; the last one may be smaller."""
    index = np.arange(indices.start, indices.stop, indices.step)
    return split_block(np.stack([np.zeros_like(index), index], axis=1), size)


@dataclass
class ResumableDistributedSampler(Sampler[BatchKeys]):
    """The micro-batches of one process, from any step of any epoch.

    Step k takes the same images for any number of processes: the k-th chunk of `plan.global_batch` images of the
    epoch's order, distributed by micro-batch, then by rank. The last incomplete chunk of an epoch is dropped.

    With repeats (Hoffer et al., arXiv 1901.09335) a step has m = global_batch / repeats distinct images, rounded up,
    and its position p takes image p mod m with an augmentation of its own; so neighbors are distinct images. The number
    of steps per epoch stays the same, and an epoch covers 1 / repeats of the images.

    Attributes:
        repeats: how often each image appears in a step.
        keys_have_epoch: whether a key tells the epoch, for a transform that depends on it.
        balance: a `ClassBalance`, which draws the images of an epoch with replacement, `num_images` of them, each draw
            with an augmentation of its own; None: a permutation.
        alternating: the share of the images that are flipped in the first epoch; each later one flips exactly those
            that the epoch before did not; None: the transform draws.
        last: an epoch and the fraction of it that is trained, if it ends early, see OPTIM.LAST_EPOCH.
        extra: by name, the samplers of other data sets, whose micro-batches come along with those of this one. Each
            continues from epoch to epoch, and restarts in a new order after its last image.
        seed, epoch, first_step: where the next iteration starts.
        chosen: which images an epoch takes, bool (num_images,), see `choose`; None: all. Samplers with other choices
            differ by `choice`, so no batch that was made ahead under one is used under another.
        order: the images of an epoch in order, int64, which may occur repeatedly, each time with an augmentation of its
            own; None: a permutation.
    """

    num_images: int
    plan: BatchPlan
    rank: int
    repeats: int = 1
    keys_have_epoch: bool = False
    balance: Any = None
    alternating: float | None = None
    last: tuple[int, float] | None = None
    extra: "dict[str, ResumableDistributedSampler]" = field(default_factory=dict)
    seed: int = 0
    epoch: int = 0
    first_step: int = 0
    chosen: torch.Tensor | None = field(default=None, compare=False)
    order: torch.Tensor | None = field(default=None, compare=False)
    choice: int = 0

    @property
    def batch_size(self) -> int:
        """Images of a micro-batch."""
        return self.plan.micro_batch

    @property
    def num_steps(self) -> int:
        """Steps per whole epoch; fewer if some images are chosen."""
        if self.order is not None:
            return len(self.order) // self.plan.global_batch
        num_images = self.num_images if self.chosen is None else int(self.chosen.sum())
        return num_images // self.plan.global_batch

    def steps_of(self, epoch: int) -> int:
        """Return the steps of an epoch, from 0."""
        if self.last is None or self.last[0] != epoch:
            return self.num_steps
        return part_of_epoch(self.num_steps, self.last[1])

    @property
    def max_num_batches(self) -> int:
        """Micro-batches left in the epoch; all processes have equally many."""
        return len(self)

    def set_position(self, seed: int, epoch: int, first_step: int) -> None:
        """Set where the next iteration starts."""
        self.seed, self.epoch, self.first_step = seed, epoch, first_step

    def choose(self, indices: Any, in_order: bool = False) -> None:
        """Let the epochs from the next iteration on take these images only; None: all. See `TrainLoader.choose`."""
        self.chosen, self.order, self.choice = None, None, 0
        if indices is None:
            return
        wanted = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
        problem = ""
        if self.balance:
            problem = "DATA.SAMPLING draws the images; expected uniform"
        elif len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < self.num_images:
            problem = f"expected indices from 0 to {self.num_images - 1}"
        elif in_order and self.repeats > 1:
            problem = "DATA.REPEATS repeats the images; expected 1"
        elif len(wanted if in_order else wanted.unique()) < max(len(wanted), self.plan.global_batch):
            kind = "" if in_order else "distinct "
            problem = f"expected at least {self.plan.global_batch} {kind}ones, which a step takes"
        if problem:
            raise ConfigError(f"TASK.NAME: the task chose {len(wanted)} images for an epoch; {problem}")
        if in_order:
            self.order, self.choice = wanted, 1 + zlib.crc32(wanted.numpy().tobytes())
            return
        self.chosen = torch.zeros(self.num_images, dtype=torch.bool).index_fill_(0, wanted, True)
        self.choice = 1 + zlib.crc32(self.chosen.numpy().tobytes())

    def epoch_order(self) -> torch.Tensor:
        """Return the image indices of the epoch in order: int64 (N,), a function of (seed, epoch) and the choice."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        if self.order is not None:
            return self.order
        if self.balance:
            return self.balance.draw(self.num_images, generator)
        order = torch.randperm(self.num_images, generator=generator)
        return order if self.chosen is None else order[self.chosen[order]]

    def __len__(self) -> int:
        return max(0, self.steps_of(self.epoch) - self.first_step) * self.plan.accum_steps

    def __iter__(self) -> Iterator[BatchKeys]:
        position = self.epoch * (self.num_images // self.plan.global_batch) + self.first_step
        others = {name: sampler._follow(self, name, position) for name, sampler in self.extra.items()}
        for keys in self._own_batches(self.epoch):
            keys.extra = {name: next(batches) for name, batches in others.items()}
            yield keys

    def _follow(self, other: "ResumableDistributedSampler", name: str, position: int) -> Iterator[BatchKeys]:
        """Yield the micro-batches that come along with those of another sampler, from a step of the run on."""
        seed = derive_seed(other.seed, zlib.crc32(name.encode()))
        first_epoch, first_step = divmod(position, self.num_steps)
        for epoch in itertools.count(first_epoch):
            at = replace(self, seed=seed, epoch=epoch, first_step=first_step, last=None)
            yield from at._own_batches(other.epoch)
            first_step = 0

    def _own_batches(self, run_epoch: int) -> Iterator[BatchKeys]:
        """Yield the micro-batches; `run_epoch` is the epoch of the run, on which a transform may depend."""
        plan, order, epoch_seed = self.plan, self.epoch_order(), derive_seed(self.seed, self.epoch)
        first, end, per_block = self.first_step, self.steps_of(self.epoch), max(1, _BLOCK // self.plan.per_process)
        for start in range(first, end, per_block):
            steps = range(start, min(start + per_block, end))
            batches = split_block(self._draw_block(order.numpy(), epoch_seed, steps, run_epoch), plan.micro_batch)
            for step in steps:
                draws = range(_NUM_SUBSTITUTES if self.choice else 0)
                substitutes = [int(order[derive_seed(epoch_seed, step, draw) % len(order)]) for draw in draws]
                for keys in itertools.islice(batches, plan.accum_steps):
                    keys.substitutes = substitutes
                    yield keys

    def _draw_block(self, order: np.ndarray, epoch_seed: int, steps: range, run_epoch: int) -> np.ndarray:
        """Return the keys of this process in some steps, step by step: int64 (N, 2 to 4)."""
        plan, num_distinct = self.plan, -(-self.plan.global_batch // self.repeats)
        repeat_seeds = [epoch_seed, *(derive_seed(epoch_seed, repeat) for repeat in range(1, self.repeats))]
        micros = (np.arange(plan.accum_steps) * plan.world_size + self.rank) * plan.micro_batch
        repeat, within = np.divmod(micros[:, None] + np.arange(plan.micro_batch), num_distinct)
        chosen = (np.array(steps)[:, None, None] * num_distinct + within).ravel()
        seeds, indices = np.tile(np.array(repeat_seeds, np.uint64)[repeat.ravel()], len(steps)), order[chosen]
        if self.balance or self.order is not None:  # the same image may be drawn again
            seeds = derive_seed(seeds, chosen.astype(np.uint64))
        columns = [seeds.astype(np.int64), indices]
        if self.keys_have_epoch or self.alternating is not None:
            columns.append(np.full_like(indices, run_epoch))
        if self.alternating is not None:
            is_flipped = SampleRNG(self.seed, indices.astype(np.uint64)).uniform() < self.alternating
            columns.append((is_flipped != bool(self.epoch % 2)).astype(np.int64))
        return np.stack(columns, axis=1)


class EvalSampler(Sampler[BatchKeys]):
    """Every `world_size`-th image from `rank`, in order, without padding: each image once over all processes."""

    def __init__(self, num_images: int, batch_size: int, rank: int, world_size: int):
        self.indices = range(rank, num_images, world_size)
        self.batch_size = batch_size
        # The largest number of batches of any process.
        self.max_num_batches = -(-len(range(0, num_images, world_size)) // batch_size)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[BatchKeys]:
        return split_images(self.indices, self.batch_size)
