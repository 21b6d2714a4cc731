"""Images of a batch blended in pairs: mixup (Zhang et al., arXiv 1710.09412) and cutmix (Yun et al., arXiv 1905.04899).

The partner of the image at place p of a step's global batch is the one at place p ^ 1. The order of an epoch is random,
so partners are; and how the batch is cut into processes and micro-batches changes nothing. Both of a pair have the same
share and the same box, each from the other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from distribuuuu.data.batch_plan import BatchPlan, check_pairs
from distribuuuu.data.seeding import derive_seed
from distribuuuu.distributed import comm as dist
from distribuuuu.launch.host import copy_to_device

# (images, labels, seed, epoch, step, micro) -> (images, targets)
Mixer = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# Sets the draws of the mixing apart from others of the same step.
_STREAM = 0x6D69786564


@dataclass(frozen=True)
class MixParams:
    """What is drawn for pairs: arrays (pairs,), or (1,) for all of them.

    Attributes:
        lam: the share of an image that stays, lambda.
        use_cutmix: whether the rest comes as a box, by cutmix; else all over, by mixup.
        mixed: whether anything is mixed.
        row, column: where the middle of the box is, of 1.0.
    """

    lam: np.ndarray
    use_cutmix: np.ndarray
    mixed: np.ndarray
    row: np.ndarray
    column: np.ndarray

    def weights(self, height: int, width: int) -> np.ndarray:
        """Return float32 (pairs, 6): the partner's weight in the box, the box's four edges, the partner's whole share.

        The edges are top, bottom, left and right, in pixels; for mixup those of the image.
        A box reaches as far to all sides of its middle and is cut off at the borders, as in the paper's code; so the
        share is that of its real area.
        """
        edges = []
        for side, middle in ((height, self.row), (width, self.column)):
            half = (side * np.sqrt(1 - self.lam)).astype(np.int64) // 2
            centre = (middle * side).astype(np.int64)
            edges += [
                np.where(self.use_cutmix, np.maximum(centre - half, 0), 0),
                np.where(self.use_cutmix, np.minimum(centre + half, side), side),
            ]
        top, bottom, left, right = edges
        inside = np.where(self.use_cutmix, 1.0, 1 - self.lam) * self.mixed
        share = inside * (bottom - top) * (right - left) / (height * width)
        return np.stack([inside, *edges, share], axis=1).astype(np.float32)


@dataclass(frozen=True)
class PairMixer:
    """Mixes each pair of neighbours.

    Attributes:
        plan: how a step falls into processes and micro-batches, which are even.
        rank: this process's number.
        num_classes: of the targets.
        mixup, cutmix: the alpha of each; 0: off.
        probability: share of what is mixed at all.
        cutmix_share: share of cutmix when both are on.
        by_step: one draw for all pairs of a step instead of one for each.
    """

    plan: BatchPlan
    rank: int
    num_classes: int
    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    cutmix_share: float = 0.5
    by_step: bool = False

    def __call__(
        self, images: torch.Tensor, labels: torch.Tensor, seed: int, epoch: int, step: int, micro: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix a micro-batch in place; return it with soft targets, which are not smoothed. Waits for nothing.

        Args:
            images: any float type (N, C, H, W), N the plan's micro_batch; changed.
            labels: int64 (N,), or soft targets (N, classes).
            seed, epoch, step, micro: where the batch stands in the run.

        Returns:
            The images, and float32 (N, classes).
        """
        first = (micro * self.plan.world_size + self.rank) * self.plan.micro_batch // 2
        weights = self.draw(seed, epoch, step).weights(*images.shape[-2:])
        weights = weights if self.by_step else weights[first : first + len(images) // 2]
        weights = copy_to_device(torch.from_numpy(weights), images.device)
        inside = _spread(weights, *images.shape[-2:]) if self.cutmix else weights[:, :1, None, None]
        blend_pairs(images, inside.to(images.dtype))
        targets = soften(labels, self.num_classes)
        blend_pairs(targets, weights[:, 5:])
        return images, targets

    def draw(self, seed: int, epoch: int, step: int) -> MixParams:
        """Return what is drawn for all pairs of a step, on any process."""
        generator = np.random.Generator(np.random.PCG64(derive_seed(seed, epoch, step, _STREAM)))
        num = 1 if self.by_step else self.plan.global_batch // 2
        mixed, chosen, row, column = generator.random((4, num))
        by_mixup, by_cutmix = (
            generator.beta(alpha, alpha, num) if alpha else np.ones(num) for alpha in (self.mixup, self.cutmix)
        )
        use_cutmix = chosen < (self.cutmix_share if self.mixup and self.cutmix else float(self.cutmix > 0))
        return MixParams(np.where(use_cutmix, by_cutmix, by_mixup), use_cutmix, mixed < self.probability, row, column)


def no_mix(images: torch.Tensor, labels: torch.Tensor, *position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels as they are."""
    return images, labels


def build_mixer(cfg, plan: BatchPlan, rank: int | None = None) -> Mixer:
    """Return mixer(images, labels, seed, epoch, step, micro) -> (images, targets).

    Without mixup and cutmix it returns what it is given. `rank` is this process's number, None: as the group says.

    Raises:
        ConfigError: a micro-batch is of an odd number of images.
    """
    aug = cfg.AUG
    if not aug.MIXUP and not aug.CUTMIX:
        return no_mix
    check_pairs(cfg, plan)
    return PairMixer(
        plan,
        dist.rank() if rank is None else rank,
        cfg.MODEL.NUM_CLASSES,
        aug.MIXUP,
        aug.CUTMIX,
        aug.MIX_PROB,
        aug.CUTMIX_SHARE,
        by_step=aug.MIX_BY == "step",
    )


def soften(labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return labels (N,), or soft targets (N, classes), as new soft targets: float32 (N, classes)."""
    if labels.ndim == 2:
        return labels.to(torch.float32, copy=True)
    return labels.unsqueeze(1).eq(torch.arange(num_classes, device=labels.device)).float()


def blend_pairs(values: torch.Tensor, weights: torch.Tensor) -> None:
    """Replace each of values[2 i] and values[2 i + 1] by its mean with the other, which has weights[i], in place.

    The weights of 0 and 1 are exact. It takes the memory of half of the values.
    """
    pairs = values.unflatten(0, (-1, 2))
    one, other = pairs[:, 0], pairs[:, 1]
    mixed = torch.lerp(one, other, weights)
    other.lerp_(one, weights)
    one.copy_(mixed)


def _spread(weights: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return the partner's weight at each pixel, (pairs, 1, H, W): 0 outside the box."""
    inside, top, bottom, left, right, _ = weights.view(-1, 6, 1, 1, 1).unbind(1)
    rows = torch.arange(height, device=weights.device).view(-1, 1)
    columns = torch.arange(width, device=weights.device)
    return inside * ((rows >= top) & (rows < bottom)) * ((columns >= left) & (columns < right))
