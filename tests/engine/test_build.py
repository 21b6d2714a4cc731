"""Set-up of a run: the settings of torch that options change, and the seed of the initial weights."""

import random

import numpy as np
import pytest
import torch

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.seeding import seed_cpu
from distribuuuu.engine.build import check_warmup
from distribuuuu.trainer import train_model


def test_initial_weights_depend_on_the_seed_whichever_generator_a_model_draws_from():
    def draw(seed: int) -> list[float]:
        seed_cpu(seed)
        return [torch.rand(()).item(), float(np.random.rand()), random.random()]

    first, other = draw(2**40 + 5), draw(6)
    assert draw(2**40 + 5) == first and all(a != b for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("words", ["OPTIM.MAX_EPOCH 2", "OPTIM.MAX_EPOCH 5 OPTIM.LR_POLICY tri"])
def test_a_new_run_is_longer_than_its_warmup(words, small_cfg):
    with pytest.raises(ConfigError, match=r"OPTIM.WARMUP_EPOCHS: got 5; expected (at most|less than) OPTIM.MAX_EPOCH"):
        check_warmup(load_cfg(None, words.split()))
    check_warmup(load_cfg(None, ["OPTIM.MAX_EPOCH", "5"]))
    with pytest.raises(ConfigError, match="never reaches"):
        train_model(small_cfg("OPTIM.WARMUP_EPOCHS", 5, *words.split()))
