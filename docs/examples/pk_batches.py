"""Batches of P classes with K images each, as losses on pairs of images need them (Hermans et al., arXiv 1703.07737).

distribuuuu train --cfg docs/examples/pk_batches.yaml
"""

from dataclasses import dataclass

import numpy as np
import torch

from distribuuuu.config.registry import TASKS
from distribuuuu.config.settings import setting
from distribuuuu.tasks.classification import Classification


@TASKS.register("pk_batches")
class PkBatches(Classification):
    """Classification with batches of few classes."""

    @dataclass
    class Settings:
        images: int = setting(4, "images of a class in a batch (K)", least=2)

    def prepare_training(self, plan, images, num_steps) -> None:
        super().prepare_training(plan, images, num_steps)
        self.labels = torch.as_tensor(np.asarray(images.labels))

    def order_images(self, epoch, generator, plan) -> torch.Tensor:
        """Return as many batches as there are in the data, each of random classes and random images of them."""
        k, present = self.settings.images, self.labels.unique()
        members = {int(label): (self.labels == label).nonzero()[:, 0] for label in present}
        order = []
        for _ in range(len(self.labels) // plan.global_batch):
            chosen = present[torch.randperm(len(present), generator=generator)].repeat(plan.global_batch)
            batch = []
            for label in chosen[: -(-plan.global_batch // k)].tolist():
                own = members[label]
                batch.append(own[torch.randint(len(own), (k,), generator=generator)])
            order.append(torch.cat(batch)[: plan.global_batch])
        return torch.cat(order)
