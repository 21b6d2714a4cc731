"""Masked autoencoder (He et al., arXiv 2111.06377): reconstruct the hidden patches of images.

    distribuuuu train --cfg docs/examples/mae.yaml
    distribuuuu train --cfg docs/examples/mae.yaml PLUGINS "[]" TASK.NAME auto TASK.KWARGS "{}" \\
        FINETUNE.WEIGHTS exp/mae/best.pth.tar OUT_DIR exp/mae_finetuned

Measured after fine-tuning, three seeds: top-1 41.0, 43.6, 48.4 %; from scratch: 25.2, 27.6, 25.2 %.
"""

from dataclasses import dataclass

import torch
from torch import nn

from distribuuuu.config.registry import TASKS
from distribuuuu.config.settings import setting
from distribuuuu.data.batch import Batch
from distribuuuu.data.seeding import derive_seed
from distribuuuu.tasks.base import StepKey, Task
from distribuuuu.tasks.metrics import StepOutput


class Autoencoder(nn.Module):
    """A vision transformer of timm as the encoder of visible patches, and a decoder of one block for all patches."""

    def __init__(self, backbone: nn.Module, keep: float):
        super().__init__()
        self.backbone, self.keep = backbone, keep
        width, num = backbone.embed_dim, backbone.patch_embed.num_patches
        self.size = backbone.patch_embed.patch_size[0]
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, num, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.predict = nn.Linear(width, 3 * self.size**2)

    def forward(self, images: torch.Tensor, noise: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean squared error of each image's hidden patches (N,), and all found patches (N, num, pixels).

        The patches with the least `noise` (N, num) are visible.
        """
        patches = self.patches_of(images)
        order = (torch.zeros(patches.shape[:2]) if noise is None else noise).to(images.device).argsort(dim=1)
        num = round(self.keep * patches.shape[1])
        tokens = self.backbone.patch_embed(images) + self.backbone.pos_embed[:, -patches.shape[1] :]
        visible = tokens.gather(1, order[:, :num, None].expand(-1, -1, tokens.shape[2]))
        encoded = self.backbone.norm(self.backbone.blocks(visible))
        hidden = self.mask_token.expand(len(images), patches.shape[1] - num, -1).to(encoded.dtype)
        shuffled = torch.cat([encoded, hidden], dim=1)
        restored = shuffled.gather(1, order.argsort(dim=1)[:, :, None].expand_as(shuffled))
        found = self.predict(self.block(restored + self.position)).float()
        goal = nn.functional.layer_norm(patches.float(), patches.shape[2:])  # normalized by patch, as in the paper
        errors = (found - goal).square().mean(dim=2).gather(1, order[:, num:])
        return errors.mean(dim=1), found

    def patches_of(self, images: torch.Tensor) -> torch.Tensor:
        """Return the pixels of the patches: (N, patches, 3 * size * size)."""
        return nn.functional.unfold(images, self.size, stride=self.size).transpose(1, 2)


@TASKS.register("mae")
class MaskedAutoencoding(Task):
    """Pretraining without labels; the mask of an image depends on its index, not on the batch or the process."""

    default_metrics, num_outputs = (), None  # the loss of the evaluation selects the best checkpoint

    @dataclass
    class Settings:
        keep: float = setting(0.25, "fraction of the patches that the encoder sees", least=0, most=1)

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Return the autoencoder; the tensors of the encoder are named `backbone.*`, as fine-tuning expects."""
        self.num_patches = model.patch_embed.num_patches
        return Autoencoder(model, self.settings.keep)

    def run(self, model: nn.Module, batch: Batch, *position: int) -> StepOutput:
        """Return the loss of a batch, with a mask for each image; a GPU waits, as the host draws the masks."""
        generators = (torch.Generator().manual_seed(derive_seed(*position, index)) for index in batch.index.tolist())
        noise = torch.stack([torch.rand(self.num_patches, generator=generator) for generator in generators])
        with self.autocast():
            errors, found = model(batch.images, noise)
        return StepOutput(errors.mean(), found[:, 0].detach(), batch.targets)

    def train_step(self, model: nn.Module, batch: Batch, key: StepKey) -> StepOutput:
        """Return the loss with masks that change with the epoch."""
        return self.run(model, batch, key.seed, key.epoch)

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the loss with the same masks in each evaluation."""
        return self.run(model, batch, 0)
