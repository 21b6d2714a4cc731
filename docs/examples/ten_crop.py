"""Ten-crop evaluation (Krizhevsky et al., 2012): four corners, the center, and their mirror images.

    distribuuuu test exp/run PLUGINS docs/examples/ten_crop.py TASK.MIXINS "[ten_crop]"

`TEST.CROP_SIZE` must be at least the side of a crop, e.g. `TEST.CROP_SIZE 36 TASK.KWARGS.size 32`.
"""

from dataclasses import dataclass

import torch

from distribuuuu.config.registry import TASKS
from distribuuuu.config.settings import setting
from distribuuuu.tasks.base import Task


@TASKS.register("ten_crop")
class TenCrop(Task):
    """Any task of classification: its scores are the mean over ten crops."""

    @dataclass
    class Settings:
        size: int = setting(28, "side of a crop in pixels", least=1)

    def predict_step(self, model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
        size, (height, width) = self.settings.size, images.shape[-2:]
        corners = [(0, 0), (0, width - size), (height - size, 0), (height - size, width - size),
                   ((height - size) // 2, (width - size) // 2)]  # fmt: skip
        crops = [images[..., top : top + size, left : left + size] for top, left in corners]
        scores = [super(TenCrop, self).predict_step(model, view) for crop in crops for view in (crop, crop.flip(-1))]
        return torch.stack(scores).mean(dim=0)
