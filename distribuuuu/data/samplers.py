"""Which images a step takes: a function of position, never of what was drawn before.

Both samplers yield micro-batches as lists of positions: `key` seeds the augmentation together with the index. Workers
are started once and for all, so a size of the image that changes with the epoch travels with its position.
"""

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler

from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.class_balance import ClassBalance
from distribuuuu.data.draws import SampleKey
from distribuuuu.data.seeding import derive_seed

Batch = list[SampleKey]


class ResumableDistributedSampler(Sampler[Batch]):
    """The micro-batches of one process, from any step of any epoch on.

    Step k takes the same images whatever the number of processes: the k-th piece of `plan.global_batch` images of
    the epoch's order, dealt out by micro-batch, then by rank. The last incomplete piece of an epoch is left out.

    With repeats (Hoffer et al., arXiv 1901.09335) a step has m = global_batch / repeats different images, rounded up,
    and place p of it takes image p mod m, with another augmentation each time; so neighbours are different images.
    Where repeats does not divide the global batch, some images come once less. An epoch has as many steps as without,
    and sees 1 / repeats of the images.

    Args:
        num_images: images of the set.
        plan: how a step falls into processes and micro-batches.
        rank: this process's number.
        repeats: how often an image comes in a step.
        im_size_at: from an epoch to the side of its images, in pixels; None: the transform's own.
        balance: draws the images of an epoch, as many as there are, with replacement; each time that an image comes it
            is augmented otherwise. None: a permutation.
    """

    def __init__(
        self,
        num_images: int,
        plan: BatchPlan,
        rank: int,
        repeats: int = 1,
        im_size_at: Callable[[int], int] | None = None,
        balance: ClassBalance | None = None,
    ):
        self.num_images = num_images
        self.plan = plan
        self.rank = rank
        self.repeats = repeats
        self.im_size_at = im_size_at
        self.balance = balance
        self.set_position(seed=0, epoch=0, first_step=0)

    @property
    def num_steps(self) -> int:
        """Steps of a whole epoch."""
        return self.num_images // self.plan.global_batch

    def set_position(self, seed: int, epoch: int, first_step: int) -> None:
        """Say where the next iteration begins."""
        self.seed, self.epoch, self.first_step = seed, epoch, first_step

    def epoch_order(self) -> torch.Tensor:
        """Return the epoch's images in their order: int64 (num_images,), a function of (seed, epoch)."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        if self.balance:
            return self.balance.draw(self.num_images, generator)
        return torch.randperm(self.num_images, generator=generator)

    def __len__(self) -> int:
        return max(0, self.num_steps - self.first_step) * self.plan.accum_steps

    def __iter__(self) -> Iterator[Batch]:
        plan, order, key = self.plan, self.epoch_order(), derive_seed(self.seed, self.epoch)
        num_different = -(-plan.global_batch // self.repeats)
        keys = [key, *(derive_seed(key, repeat) for repeat in range(1, self.repeats))]
        size = (self.im_size_at(self.epoch),) if self.im_size_at else ()
        for step in range(self.first_step, self.num_steps):
            for micro in range(plan.accum_steps):
                begin = (micro * plan.world_size + self.rank) * plan.micro_batch
                places = torch.arange(begin, begin + plan.micro_batch)
                draws = step * num_different + places % num_different
                own = [keys[repeat] for repeat in (places // num_different).tolist()]
                if self.balance:  # an image may come again
                    own = [derive_seed(key, draw) for key, draw in zip(own, draws.tolist(), strict=True)]
                yield [(key, index, *size) for key, index in zip(own, order[draws].tolist(), strict=True)]


class EvalSampler(Sampler[Batch]):
    """Every `world_size`-th image from `rank` on, in order, without padding: each image once over all processes."""

    def __init__(self, num_images: int, batch_size: int, rank: int, world_size: int):
        self.indices = range(rank, num_images, world_size)
        self.batch_size = batch_size
        # The most batches that any process has.
        self.max_num_batches = -(-len(range(0, num_images, world_size)) // batch_size)

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for begin in range(0, len(self.indices), self.batch_size):
            yield [(0, index) for index in self.indices[begin : begin + self.batch_size]]
