"""Which images a step takes: a function of position, never of what was drawn before.

Both samplers yield micro-batches as lists of (key, index): `key` seeds the augmentation together with the index.
"""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from distribuuuu.batching import BatchPlan
from distribuuuu.seeding import derive_seed

Batch = list[tuple[int, int]]


class ResumableDistributedSampler(Sampler[Batch]):
    """The micro-batches of one process, from any step of any epoch on.

    Step k takes the same images whatever the number of processes: the k-th piece of `plan.global_batch` images of
    the epoch's order, dealt out by micro-batch, then by rank. The last incomplete piece of an epoch is left out.
    """

    def __init__(self, num_images: int, plan: BatchPlan, rank: int):
        self.num_images = num_images
        self.plan = plan
        self.rank = rank
        self.set_position(seed=0, epoch=0, first_step=0)

    @property
    def num_steps(self) -> int:
        """Steps of a whole epoch."""
        return self.num_images // self.plan.global_batch

    def set_position(self, seed: int, epoch: int, first_step: int) -> None:
        """Say where the next iteration begins."""
        self.seed, self.epoch, self.first_step = seed, epoch, first_step

    def epoch_order(self) -> torch.Tensor:
        """Return the epoch's permutation of all images: int64 (num_images,), a function of (seed, epoch)."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        return torch.randperm(self.num_images, generator=generator)

    def __len__(self) -> int:
        return max(0, self.num_steps - self.first_step) * self.plan.num_micro

    def __iter__(self) -> Iterator[Batch]:
        plan, order, key = self.plan, self.epoch_order(), derive_seed(self.seed, self.epoch)
        for step in range(self.first_step, self.num_steps):
            for micro in range(plan.num_micro):
                begin = step * plan.global_batch + (micro * plan.world_size + self.rank) * plan.micro_batch
                yield [(key, index) for index in order[begin : begin + plan.micro_batch].tolist()]


class EvalSampler(Sampler[Batch]):
    """Every `world_size`-th image from `rank` on, in order, without padding: each image once over all processes."""

    def __init__(self, num_images: int, batch_size: int, rank: int, world_size: int):
        self.indices = range(rank, num_images, world_size)
        self.batch_size = batch_size
        # The most batches that any process has.
        self.num_rounds = -(-len(range(0, num_images, world_size)) // batch_size)

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for begin in range(0, len(self.indices), self.batch_size):
            yield [(0, index) for index in self.indices[begin : begin + self.batch_size]]
