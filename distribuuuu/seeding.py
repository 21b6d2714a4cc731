"""Randomness from position: every generator is seeded from (seed, epoch, sample or step), so none has to be saved."""

import random
import secrets

import numpy as np
import torch

_MASK = (1 << 64) - 1


def derive_seed(*parts: int) -> int:
    """Return 63 well-mixed bits from whole numbers, e.g. (RNG_SEED, epoch, sample index).

    Each part goes through the finalizer of SplitMix64 (Steele et al., OOPSLA 2014).
    """
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def draw_seed() -> int:
    """Return a fresh seed, for a run whose config names none."""
    return secrets.randbits(31)


def seed_cpu(value: int) -> None:
    """Seed torch's CPU generator, numpy and random.

    The generator's own `manual_seed` takes 1 us; `torch.manual_seed` visits every device and takes 64 us.
    """
    torch.default_generator.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


def seed_step(value: int, device: torch.device) -> None:
    """Seed what a model draws from inside a step (dropout, drop path): the generators of the CPU and of `device`."""
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(value)
    elif device.type == "mps":
        torch.mps.manual_seed(value)
