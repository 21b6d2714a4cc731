"""Randomness from position: every generator is seeded from (seed, epoch, sample or step), so none has to be saved."""

import contextlib
import random
import secrets
import threading
from collections.abc import Iterator

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

_MASK = (1 << 64) - 1
# What draws with torch, by the name of the function; each takes a generator.
_DRAWING = {
    *("bernoulli", "multinomial", "normal", "poisson", "rand", "randint", "randn", "randperm"),
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
}
_TURN = threading.Lock()


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


class OwnGenerator(TorchFunctionMode):
    """Within it, what this thread draws with torch on the CPU comes from a generator of its own.

    torch's default generator belongs to the steps (see `seed_step`), which another thread may be computing.
    """

    def __init__(self, seed: int):
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in _DRAWING:
            kwargs = {"generator": self._generator, **kwargs}
        return function(*args, **kwargs)


@contextlib.contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Let what this thread draws with torch, numpy and random follow from `seed`, and put everything back.

    All threads share the generators of numpy and random, so only one at a time is let in.
    """
    with _TURN:
        of_numpy, of_python = np.random.get_state(), random.getstate()
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)
        try:
            with OwnGenerator(seed):
                yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)
