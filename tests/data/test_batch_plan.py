"""The arithmetic of a step."""

import pytest

from distribuuuu.config import ConfigError
from distribuuuu.data.batch_plan import plan_batches


def test_a_global_batch_falls_into_equal_parts():
    for batch_size, global_batch, world_size, micro, accum_steps in [
        (32, 0, 1, 32, 1), (32, 0, 8, 32, 1), (32, 256, 8, 32, 1), (128, 8192, 64, 128, 1), (128, 8192, 2, 128, 32),
        (32, 48, 3, 16, 1), (32, 100, 1, 25, 4), (64, 12, 3, 4, 1), (1, 6, 2, 1, 3),
    ]:  # fmt: skip
        plan = plan_batches(batch_size, global_batch, world_size)
        assert (plan.micro_batch, plan.accum_steps) == (micro, accum_steps)
        assert plan.global_batch == (global_batch or batch_size * world_size)


def test_what_does_not_fit_says_what_would():
    for batch_size, global_batch, world_size in [(32, 100, 3), (32, 37, 1), (8, 2, 3), (64, 254, 2)]:
        with pytest.raises(ConfigError, match="fix: set it to") as caught:
            plan_batches(batch_size, global_batch, world_size)
        offered = [int(word) for word in str(caught.value).split(";")[-1].split() if word.isdigit()]
        assert offered
        for size in offered:
            assert plan_batches(batch_size, size, world_size).global_batch == size
