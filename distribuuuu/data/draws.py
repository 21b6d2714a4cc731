"""Random numbers as functions of position: the n-th draw for a sample depends on (key, index, n) and nothing else."""

import numpy as np

from distribuuuu.data.seeding import derive_seed

# Which sample, and all that its randomness follows from: (key, index), or (key, index, side of the image in pixels).
SampleKey = tuple[int, ...]
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class SampleRNG:
    """The draws for one sample, by SplitMix64 (Steele et al., OOPSLA 2014).

    It holds all of its state, so threads can draw at the same time, and a draw takes a microsecond; seeding one of
    the usual generators takes ten.
    """

    def __init__(self, key: int, index: int):
        self._state = derive_seed(key, index)

    def uniform(self) -> float:
        """Return the next number, from 0 up to but without 1."""
        self._state = (self._state + _STEP) & _MASK
        mixed = ((self._state ^ (self._state >> 30)) * _MIX[0]) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * _MIX[1]) & _MASK
        return ((mixed ^ (mixed >> 31)) >> 11) * 2.0**-53

    def seed(self) -> int:
        """Return a whole number of 53 bits, to seed a usual generator with."""
        return int(self.uniform() * 2**53)


class BatchRNG:
    """The same draws for many samples at a time, as arrays: float64 (N,)."""

    def __init__(self, positions: list[SampleKey]):
        self._state = np.array([derive_seed(*position[:2]) for position in positions], dtype=np.uint64)

    def uniform(self) -> np.ndarray:
        """Return the next number of each sample."""
        self._state = self._state + np.uint64(_STEP)
        mixed = (self._state ^ (self._state >> np.uint64(30))) * np.uint64(_MIX[0])
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX[1])
        return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
