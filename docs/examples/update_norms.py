"""Quantities known only after a step: the norm of the update, and its largest value.

distribuuuu train --cfg docs/examples/update_norms.yaml
"""

import torch
from torch.nn.utils import parameters_to_vector

from distribuuuu.config.registry import TASKS
from distribuuuu.tasks.classification import Classification


@TASKS.register("update_norms")
class UpdateNorms(Classification):
    """Classification that adds the norm of the update of a step to the row of metrics of that step."""

    @torch.no_grad()
    def flat(self) -> torch.Tensor:
        return parameters_to_vector(self.state.model.parameters()).clone()

    def update(self, step) -> None:
        before = self.flat()
        super().update(step)
        moved = self.flat() - before
        step.record(update_norm=moved.norm(), largest_update=moved.abs().max())
