"""Seeds of the generators."""

import random

import numpy as np
import torch

from distribuuuu.data.seeding import seed_cpu


def test_every_generator_of_the_cpu_is_seeded():
    def draw(seed: int) -> tuple[float, float, float]:
        seed_cpu(seed)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    first, again, other = draw(7), draw(7), draw(8)
    assert first == again and all(one != two for one, two in zip(first, other, strict=True))
