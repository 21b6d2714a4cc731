"""Data pruning by the loss (InfoBatch's idea in its simplest form; Qin et al., arXiv 2303.04947): train on hard images.

From the second epoch on, an epoch takes the images whose last loss is the highest.

    distribuuuu train --cfg docs/examples/data_pruning.yaml
"""

from dataclasses import dataclass

import torch

from distribuuuu.config.registry import TASKS
from distribuuuu.config.settings import setting
from distribuuuu.distributed import comm
from distribuuuu.tasks.classification import Classification
from distribuuuu.tasks.metrics import StepOutput


@TASKS.register("data_pruning")
class DataPruning(Classification):
    """Classification that keeps the last loss of each image."""

    @dataclass
    class Settings:
        keep: float = setting(0.5, "fraction of the images that an epoch takes", least=0, most=1)

    def prepare_training(self, plan, images, num_steps) -> None:
        super().prepare_training(plan, images, num_steps)
        self.losses = torch.zeros(len(images), device=self.device)

    def train_step(self, model, batch, key) -> StepOutput:
        """Return the mean loss, and keep that of each image; all processes know the losses of all images."""
        with self.autocast():
            logits = model(batch.images)
        losses = self.criterion(logits, batch.targets, reduction="none")
        sums = self.losses.new_zeros(2, len(self.losses)).index_add_(
            1, batch.index, torch.stack([losses.detach(), torch.ones_like(losses)])
        )
        comm.scaled_all_reduce([sums], scale=1.0)
        self.losses = torch.where(sums[1] > 0, sums[0] / sums[1].clamp(min=1), self.losses)
        return StepOutput(losses.mean(), logits.detach(), self.metric_targets(batch.targets))

    def choose_images(self, epoch: int) -> torch.Tensor | None:
        """Return the images with the highest losses."""
        return self.losses.topk(round(self.settings.keep * len(self.losses))).indices if epoch else None

    def state_dict(self) -> dict:
        return {**super().state_dict(), "losses": self.losses}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.losses = state["losses"].to(self.device)
