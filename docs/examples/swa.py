"""Stochastic weight averaging (Izmailov et al., arXiv 1803.05407): the mean of the weights after each late epoch.

The average is evaluated, saved as best_swa.pth.tar, and reported like the EMA of the weights.

    distribuuuu train --cfg docs/examples/swa.yaml
    distribuuuu test exp/swa

The paper recomputes the statistics of batch norms for the average: MODEL.PRECISE_BN.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from distribuuuu.config.registry import TASKS
from distribuuuu.config.settings import setting
from distribuuuu.optim.ema import Ema
from distribuuuu.tasks.classification import Classification


class Swa(Ema):
    """The mean over the ends of the epochs from `start_epoch` on, from 0; before, the weights themselves."""

    num_steps = 0  # per epoch, set before training

    def finish_step(self, epoch: int, step: int, images_seen: int, global_batch: int) -> None:
        """Update the average after the last step of an epoch; the share of its weights follows from the position."""
        if step + 1 == self.num_steps:
            self.update(1 / max(1, epoch + 1 - self.start_epoch))


@TASKS.register("swa")
class StochasticWeightAveraging(Classification):
    """Classification with an average of the weights of the late epochs."""

    @dataclass
    class Settings:
        from_epoch: int = setting(4, "the first epoch, from 1, that is averaged", least=1)

    def averages(self, model: nn.Module) -> dict[str, Any]:
        """Return the average, which is evaluated and saved as `swa`."""
        self.swa = Swa(model, half_life=0, start_epoch=self.settings.from_epoch - 1)
        return {"swa": self.swa}

    def prepare_training(self, plan, images, num_steps: int) -> None:
        """Keep the number of steps of a whole epoch."""
        super().prepare_training(plan, images, num_steps)
        self.num_steps = num_steps

    def begin_epoch(self, epoch: int) -> str | None:
        """Tell the average the number of steps of this epoch, of which the task may choose fewer images."""
        chosen, optim = self.state.chosen, self.cfg.OPTIM
        num_steps = self.num_steps if chosen is None else len(chosen) // self.state.global_batch
        is_last = epoch + 1 == optim.MAX_EPOCH
        self.swa.num_steps = math.ceil(num_steps * optim.LAST_EPOCH - 1e-9) if is_last else num_steps
        return super().begin_epoch(epoch)
