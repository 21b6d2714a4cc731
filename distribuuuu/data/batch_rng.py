"""The random numbers of many samples at a time, as `SampleRNG` gives them for one."""

from collections.abc import Sequence

import numpy as np

from distribuuuu.data.seeding import STEP, SampleKey, mix


class BatchRNG:
    """The same random numbers for many samples at a time, as arrays: float64 (N,)."""

    def __init__(self, keys: Sequence[SampleKey]):
        seeds, indices = np.array([key[:2] for key in keys], dtype=np.uint64).T
        self._state = mix(mix(seeds + STEP) + indices + STEP) >> 1  # derive_seed of each key
        self._flipped = np.array([key[3] for key in keys if len(key) > 3], dtype=bool)

    def flip(self, probability: float) -> np.ndarray:
        """Return whether to flip each sample, see `SampleRNG.flip`: bool (N,)."""
        drawn = self.uniform() < probability
        return self._flipped if len(self._flipped) else drawn

    def uniform(self) -> np.ndarray:
        """Return the next number of each sample."""
        self._state = self._state + STEP
        return (mix(self._state) >> 11) * 2.0**-53
