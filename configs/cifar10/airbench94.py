"""airbench94 (Jordan, arXiv 2404.00498): the network for CIFAR-10 and its tasks, of which lookahead fits any model.

The network has six 3x3 convolutions behind a whitening layer.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.derived import total_steps
from distribuuuu.config.registry import MODELS, TASKS
from distribuuuu.config.settings import setting
from distribuuuu.data.batch import Normalizer, Samples
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.build_transform import build_transform, statistics_of
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import build_decode_options
from distribuuuu.distributed import comm as dist
from distribuuuu.tasks.classification import Classification

# Images whose patches are held in memory at a time.
_CHUNK = 500
# The names of the slow weights in the state of the task begin with this.
_SLOW = "slow."


def _norm(num_channels: int) -> nn.BatchNorm2d:
    """Return a batch norm without a scale; 60 % of the running statistics are kept in each step."""
    norm = nn.BatchNorm2d(num_channels, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm


def _conv(num_in: int, num_out: int) -> nn.Conv2d:
    """Return a 3x3 convolution whose first `num_in` outputs start as its inputs; the others start at random."""
    conv = nn.Conv2d(num_in, num_out, kernel_size=3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(conv.weight[:num_in])
    return conv


class ConvGroup(nn.Module):
    """Two convolutions, each with a batch norm and a GELU; the first one halves the feature maps."""

    def __init__(self, num_in: int, num_out: int):
        super().__init__()
        self.conv1, self.norm1 = _conv(num_in, num_out), _norm(num_out)
        self.conv2, self.norm2 = _conv(num_out, num_out), _norm(num_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, num_in, H, W) to (N, num_out, H // 2, W // 2)."""
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class Airbench(nn.Module):
    """A 2x2 whitening layer, three groups of convolutions and a linear head on the maxima of the feature maps.

    The filters of the whitening layer are constant, see `initialize_from`; its bias is trained. `width` is the channels
    of the first group, the others have four times as many; `scale` is a factor of the logits.

    Raises:
        ValueError: `width` is below the 24 outputs of the whitening layer.
    """

    def __init__(self, num_classes: int, width: int = 64, scale: float = 1 / 9):
        super().__init__()
        if width < 24:
            raise ValueError(f"got width {width}; expected 24 or more")
        self.whiten = nn.Conv2d(3, 24, kernel_size=2)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]  # it has one
        widths = (24, width, 4 * width, 4 * width)
        self.groups = nn.Sequential(*map(ConvGroup, widths, widths[1:]))
        self.head = nn.Linear(4 * width, num_classes, bias=False)
        self.scale = scale

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, 3, H, W), of 9 pixels or more, to logits (N, num_classes)."""
        features = self.groups(F.gelu(self.whiten(images)))
        return self.head(F.max_pool2d(features, features.shape[-2:]).flatten(1)) * self.scale

    @torch.no_grad()
    def initialize_from(self, images: torch.Tensor) -> None:
        """Set the filters of the whitening layer from normalized images: float32 (N, 3, H, W)."""
        filters = whitening_filters(images, 2)
        self.whiten.weight.copy_(torch.cat([filters, -filters]))


def whitening_filters(images: torch.Tensor, side: int, eps: float = 5e-4) -> torch.Tensor:
    """Map images (N, C, H, W) to filters (C * side * side, C, side, side) that whiten their patches, both float32.

    The outputs are uncorrelated and have a second moment of about 1. The filters are the eigenvectors of the second
    moments of all patches, the largest eigenvalue first, each divided by the square root of its eigenvalue (as in Page,
    How to train your ResNet, myrtle.ai, 2019), to which `eps` is added: directions of less variance are not amplified.
    """
    num_values, num_patches = images.shape[1] * side**2, 0
    moments = torch.zeros(num_values, num_values, dtype=torch.float64)
    for chunk in images.split(_CHUNK):
        patches = F.unfold(chunk, side).transpose(0, 1).flatten(1)
        moments += (patches @ patches.T).double().cpu()
        num_patches += patches.shape[1]
    eigenvalues, eigenvectors = torch.linalg.eigh(moments / num_patches)
    filters = (eigenvectors / (eigenvalues + eps).sqrt()).T.flip(0)
    return filters.float().view(num_values, -1, side, side).to(images.device)


@MODELS.register
def airbench94(num_classes: int = 10, width: int = 64, scale: float = 1 / 9) -> Airbench:
    """Return the network of airbench94, of 1.97 M parameters with 10 classes."""
    return Airbench(num_classes, width, scale)


@TASKS.register("lookahead")
class Lookahead(Classification):
    """Classification with lookahead (Zhang et al., arXiv 1907.08610), whose decay grows during the run.

    Slow weights, which begin as the initial ones, are averaged with the trained ones every few steps, and replace them:
    `slow = decay * slow + (1 - decay) * trained`. After the last step, the slow weights are the result. The statistics
    of batch norm layers are averaged too.
    """

    capturable = True

    @dataclass
    class Settings:
        """Settings of lookahead."""

        steps: int = setting(5, "steps between two averages", least=1)
        decay: float = setting(0.95**5, "decay at the end of the run", least=0, most=1)
        power: float = setting(3.0, "power of the share of the run by which the decay grows", least=0)

    def prepare_training(self, plan: BatchPlan, images: ImageDataset, num_steps: int) -> None:
        """Build the loss, and copy the initial weights."""
        super().prepare_training(plan, images, num_steps)
        if self.cfg.DIST.SHARD == "fsdp":
            message = f"got fsdp; TASK.NAME {self.cfg.TASK.NAME} expects whole weights; fix: set it to none or zero1"
            raise ConfigError(Problem("DIST.SHARD", message), self.cfg.origins)
        self._num_steps, self._total = num_steps, total_steps(self.cfg, num_steps)
        self.slow = {name: value.clone() for name, value in self.trained().items()}

    def trained(self) -> dict[str, torch.Tensor]:
        """Return the trained weights and statistics by name."""
        weights = self.state.model.state_dict()
        return {name: value for name, value in weights.items() if value.is_floating_point()}

    def update(self, step: Any) -> None:
        super().update(step)
        self.finish_step()

    def finish_step(self) -> None:
        num_steps = self.state.epoch * self._num_steps + self.state.step + 1
        if num_steps % self.settings.steps == 0:
            decay = self.settings.decay * (num_steps / self._total) ** self.settings.power
            self.average(1 - decay)
        if num_steps == self._total:
            self.average(0.0)

    @torch.no_grad()
    def average(self, weight: float) -> None:
        """Move the slow weights towards the trained ones by a weight, and replace the trained ones by them."""
        slow, trained = list(self.slow.values()), list(self.trained().values())
        torch._foreach_lerp_(slow, trained, weight)
        torch._foreach_copy_(trained, slow)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {f"{_SLOW}{name}": value for name, value in self.slow.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name, value in self.slow.items():
            value.copy_(state[f"{_SLOW}{name}"])


@TASKS.register("airbench")
class AirbenchTraining(Lookahead):
    """Lookahead for a model whose first layer is initialized from training images, with a bias that is frozen soon."""

    capturable = True

    @dataclass
    class Settings(Lookahead.Settings):
        """Settings of lookahead and of the first layer."""

        images: int = setting(5000, "training images, evenly spaced, that initialize the model", least=1)
        frozen: str = setting("whiten.bias", "the parameter that is frozen")
        frozen_from: int = setting(3, "the epoch, from 0, from which it is frozen", least=0)

    def prepare_training(self, plan: BatchPlan, images: ImageDataset, num_steps: int) -> None:
        """Initialize a new model from training images."""
        cfg, state = self.cfg, self.state
        names = dict(state.model.named_parameters())
        if not hasattr(state.model, "initialize_from") or self.settings.frozen not in names:
            expected = f"expected a model with initialize_from(images) and {self.settings.frozen}; fix: set airbench94"
            raise ConfigError(Problem("MODEL.ARCH", f"got {cfg.MODEL.ARCH}; {expected}"), cfg.origins)
        super().prepare_training(plan, images, num_steps)
        if (state.epoch, state.step) == (0, 0) and not (cfg.MODEL.WEIGHTS or cfg.FINETUNE.WEIGHTS):
            normalized = self.read_images(images)
            for model in state.models.values():
                model.initialize_from(normalized)
            self.slow = {name: value.clone() for name, value in self.trained().items()}

    def read_images(self, images: ImageDataset) -> torch.Tensor:
        """Return evenly spaced images without augmentation, normalized: float32 (N, 3, H, W) on the device."""
        cfg, num = self.cfg, min(self.settings.images, len(images))
        transform, options = build_transform(cfg, images, train=False), build_decode_options(cfg)
        samples = Samples(images, transform, cfg.DATA.DECODER, cfg.DATA.ON_BAD_IMAGE == "skip", options)
        batch, broken = samples.batch([(0, number * len(images) // num) for number in range(num)])
        if batch is None:
            raise broken[-1].error()
        return Normalizer(self.device, *statistics_of(cfg, images), channels_last=False)(batch.first_images)

    @property
    def is_frozen(self) -> bool:
        return self.state.epoch >= self.settings.frozen_from

    def begin_epoch(self, epoch: int) -> str | None:
        if not dist.is_distributed():  # DDP expects the gradients of all parameters that were trainable at the start
            self.state.model.get_parameter(self.settings.frozen).requires_grad_(not self.is_frozen)
        return super().begin_epoch(epoch)

    def update(self, step: Any) -> None:
        step.gradients()
        if self.is_frozen:
            self.state.model.get_parameter(self.settings.frozen).grad = None
        step.apply()
        self.finish_step()
