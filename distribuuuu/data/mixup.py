"""Mixup (Zhang et al., arXiv 1710.09412) and CutMix (Yun et al., arXiv 1905.04899) of the images of a batch, in pairs.

The image at position p of a step's global batch is mixed with the one at p ^ 1. The order of an epoch is random, so the
pairs are; and the division into processes and micro-batches does not change them. Both images of a pair have the same
lambda and the same box, each filled from the other. Consecutive pairs may share them as a group; timm and torchvision
share them within the batch of a GPU.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from distribuuuu.config import ConfigError
from distribuuuu.data.batch import copy_to_device
from distribuuuu.data.batch_plan import BatchPlan, check_pairs
from distribuuuu.data.seeding import derive_seed
from distribuuuu.distributed import comm as dist

# Separates the random numbers of mixing from others of the same step.
_STREAM = 0x6D69786564
# Consecutive steps whose weights are computed together, and moved to the device by one copy.
_BLOCK = 16


class MixParams(NamedTuple):
    """Random parameters of groups of pairs: arrays (groups,), or (steps, groups).

    Attributes:
        lam: lambda, the fraction of an image that is kept.
        use_cutmix: replace a box (CutMix) instead of blending the full image (mixup).
        mixed: whether the group is mixed at all.
        row, column: center of the box, in [0, 1).
    """

    lam: np.ndarray
    use_cutmix: np.ndarray
    mixed: np.ndarray
    row: np.ndarray
    column: np.ndarray

    def weights(self, height: int, width: int) -> np.ndarray:
        """Return float32 (..., 6): the partner's weight in the box, the box's edges, the partner's total weight.

        The edges are top, bottom, left and right, in pixels; for mixup those of the image. A box is clipped at the
        borders, as in the paper's code, so the total weight is that of its clipped area.
        """
        edges = []
        for side, middle in ((height, self.row), (width, self.column)):
            half = (side * np.sqrt(1 - self.lam)).astype(np.int64) // 2
            center = (middle * side).astype(np.int64)
            edges.append(np.where(self.use_cutmix, np.maximum(center - half, 0), 0))
            edges.append(np.where(self.use_cutmix, np.minimum(center + half, side), side))
        top, bottom, left, right = edges
        inside = np.where(self.use_cutmix, 1.0, 1 - self.lam) * self.mixed
        total = inside * (bottom - top) * (right - left) / (height * width)
        return np.stack([inside, *edges, total], axis=-1).astype(np.float32)


@dataclass(frozen=True, eq=False)
class PairMixer:
    """Mixes each pair of neighbors.

    Attributes:
        plan: how a step is divided into processes and micro-batches, whose size is even.
        mixup, cutmix: the alpha of each; 0: off.
        probability: fraction of the groups that are mixed.
        cutmix_share: fraction of CutMix when both are on.
        group: consecutive images of the global batch that share their parameters, an even number; the last group of a
            step may have fewer.
    """

    plan: BatchPlan
    rank: int
    num_classes: int
    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    cutmix_share: float = 0.5
    group: int = 2
    _block_weights: Any = field(default_factory=lambda: functools.lru_cache(4)(_block_weights), repr=False)

    def __call__(
        self, images: torch.Tensor, labels: torch.Tensor, seed: int, epoch: int, step: int, micro: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix a micro-batch in place and return it with soft targets, float32 (N, classes), which are not smoothed.

        It does not synchronize. The images are of any float type, (N, C, H, W), N the plan's micro_batch; the labels
        are int64 (N,), or soft targets (N, classes).
        """
        if not isinstance(images, torch.Tensor) or not isinstance(labels, torch.Tensor):
            message = "got structured targets or several views; expected labels and one view"
            raise ConfigError(f"AUG.MIXUP: {message}; fix: set AUG.MIXUP 0 and AUG.CUTMIX 0, or mix in the task")
        height, width = images.shape[-2:]
        weights = self._block_weights(self, seed, epoch, step // _BLOCK, (height, width), images.device)[step % _BLOCK]
        if weights.shape[0] > 1:
            first = (micro * self.plan.world_size + self.rank) * self.plan.micro_batch // 2
            weights = weights[first : first + self.plan.micro_batch // 2]
        inside = _pixel_weights(weights, height, width) if self.cutmix else weights[:, :1, None, None]
        blend_pairs(images, inside.to(images.dtype))
        targets = soften(labels, self.num_classes)
        blend_pairs(targets, weights[:, 5:])
        return images, targets

    def draw(self, seed: int, epoch: int, step: int) -> MixParams:
        """Return the parameters of all groups of a step, the same on every process."""
        generator = np.random.Generator(np.random.PCG64(derive_seed(seed, epoch, step, _STREAM)))
        num = -(-self.plan.global_batch // self.group)
        mixed, chosen, row, column = generator.random((4, num))
        by_mixup = generator.beta(self.mixup, self.mixup, num) if self.mixup else 1.0
        by_cutmix = generator.beta(self.cutmix, self.cutmix, num) if self.cutmix else 1.0
        use_cutmix = chosen < (self.cutmix_share if self.mixup and self.cutmix else float(self.cutmix > 0))
        return MixParams(np.where(use_cutmix, by_cutmix, by_mixup), use_cutmix, mixed < self.probability, row, column)


def build_mixer(cfg, plan: BatchPlan, rank: int | None = None) -> PairMixer:
    """Return the mixer of a config, of a rank of the process group (by default this one)."""
    aug = cfg.AUG
    check_pairs(cfg, plan)
    return PairMixer(
        plan,
        dist.rank() if rank is None else rank,
        cfg.MODEL.NUM_CLASSES,
        aug.MIXUP,
        aug.CUTMIX,
        aug.MIX_PROB,
        aug.CUTMIX_SHARE,
        aug.MIX_GROUP or {"pair": 2, "step": plan.global_batch}[aug.MIX_BY],
    )


def soften(labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return labels (N,), or soft targets (N, classes), as a new float32 (N, classes)."""
    if labels.ndim == 2:
        return labels.to(torch.float32, copy=True)
    return labels.unsqueeze(1).eq(torch.arange(num_classes, device=labels.device)).float()


def blend_pairs(values: torch.Tensor, weights: torch.Tensor) -> None:
    """Blend values[2 i] and values[2 i + 1] in place; in each, the other one gets weights[i].

    Weights of 0 and 1 are exact. The temporary memory is half that of the values.
    """
    first, second = values[::2], values[1::2]
    blended = torch.lerp(first, second, weights)
    second.lerp_(first, weights)
    first.copy_(blended)


def _block_weights(mixer: PairMixer, seed: int, epoch: int, block: int, shape: tuple[int, int], device: torch.device):
    """Return the weights of the pairs of a block of steps, (steps, pairs, 6); (steps, 1, 6) if a step is one group."""
    drawn = [mixer.draw(seed, epoch, step) for step in range(block * _BLOCK, (block + 1) * _BLOCK)]
    weights = MixParams(*map(np.array, zip(*drawn, strict=True))).weights(*shape)
    if weights.shape[1] > 1:
        weights = weights[:, np.arange(mixer.plan.global_batch // 2) // (mixer.group // 2)]
    return copy_to_device(torch.from_numpy(weights), device)


def _pixel_weights(weights: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return the partner's weight at each pixel: (pairs, 1, H, W), 0 outside the box."""
    inside, top, bottom, left, right, _ = weights.view(-1, 6, 1, 1, 1).unbind(1)
    rows = torch.arange(height, device=weights.device).view(-1, 1)
    columns = torch.arange(width, device=weights.device)
    return inside * ((rows >= top) & (rows < bottom)) * ((columns >= left) & (columns < right))
