"""Random numbers as functions of position, so that no generator's state has to be saved.

Seeds derive from (run seed, epoch, sample or step). The n-th number of a sample depends on its seed, its index and n
only, so it is the same in every worker. All mixing is SplitMix64's (Steele et al., OOPSLA 2014).
"""

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

# Identifies a sample and seeds its augmentation: (seed, index), (seed, index, epoch), or (seed, index, epoch, flipped).
SampleKey = tuple[int, ...]

# Constants of SplitMix64.
_MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def derive_seed(*parts: Any) -> Any:
    """Return 63 well-mixed bits from integers, e.g. (RNG_SEED, epoch, sample index); of arrays of uint64, an array."""
    state: Any = 0
    for part in parts:  # SplitMix64 without a call for each part: every step and every sample derives seeds
        state = (state + part + STEP) & _MASK
        state = (state ^ (state >> 30)) * _MIX_1 & _MASK
        state = (state ^ (state >> 27)) * _MIX_2 & _MASK
        state ^= state >> 31
    return state >> 1


class SampleRNG:
    """The random numbers of one sample; or of many, as arrays, from arrays of uint64 in place of each part of a key.

    The object holds all of its state, so threads can draw at the same time. A number takes a microsecond; seeding a
    generator of numpy or torch takes ten.
    """

    def __init__(self, seed: Any, index: Any, *chosen: Any):
        self._state, self._chosen = derive_seed(seed, index), chosen

    def flip(self, probability: float) -> Any:
        """Return whether to flip: as the key says, whose end is `chosen`; else with a probability."""
        is_drawn = self.uniform() < probability  # in any case, so that the other numbers stay the same
        return self._chosen[1] != 0 if len(self._chosen) > 1 else is_drawn

    def uniform(self) -> Any:
        """Return the next number in [0, 1)."""
        self._state = bits = (self._state + STEP) & _MASK
        bits = (bits ^ (bits >> 30)) * _MIX_1 & _MASK  # as in `derive_seed`
        bits = (bits ^ (bits >> 27)) * _MIX_2 & _MASK
        return ((bits ^ (bits >> 31)) >> 11) * 2.0**-53

    def seed(self) -> int:
        """Return a 53-bit integer to seed another generator with."""
        return int(self.uniform() * 2**53)

    def split(self, num: int) -> "list[SampleRNG]":
        """Return this generator and further ones, that of each view of the sample."""
        return [self, *(SampleRNG(self._state, number) for number in range(1, num))]


def seed_cpu(seed: int) -> None:
    """Seed torch's CPU generator, numpy and random.

    The generator's own `manual_seed` takes 1 us; `torch.manual_seed` visits every device and takes 64 us.
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def seed_step(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device`, from which a step draws, e.g. dropout."""
    seed_cpu(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


# ------------------------------------------------------------------------- global generators, one thread at a time

_GENERATORS = threading.RLock()
_OWN = threading.local()


class locked_generators:  # a function with `contextmanager` costs each step twice the calls
    """Keep other threads from seeding the global generators within the block, e.g. loader workers during a step."""

    def __enter__(self) -> None:
        _GENERATORS.acquire()
        _OWN.depth = getattr(_OWN, "depth", 0) + 1

    def __exit__(self, *error: object) -> None:
        _OWN.depth -= 1
        _GENERATORS.release()


@contextlib.contextmanager
def unlocked_generators() -> Iterator[None]:
    """Let other threads own the generators within the block, in which this thread waits for them."""
    depth = getattr(_OWN, "depth", 0)
    for _ in range(depth):
        _GENERATORS.release()
    try:
        yield
    finally:
        for _ in range(depth):
            _GENERATORS.acquire()


@contextlib.contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed what this thread draws from torch, numpy and random within the block; restore the generators afterwards."""
    with locked_generators():
        states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
        seed_cpu(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])
