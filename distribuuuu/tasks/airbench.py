"""Tasks of short trainings: lookahead, and airbench94 (Jordan, arXiv 2404.00498)."""

from dataclasses import dataclass
from typing import Any

import torch

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.derived import total_steps
from distribuuuu.config.registry import TASKS
from distribuuuu.config.settings import setting
from distribuuuu.data.batch import Normalizer, Samples
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.build_transform import build_transform, statistics_of
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import build_decode_options
from distribuuuu.distributed import comm as dist
from distribuuuu.tasks.classification import Classification

# The names of the slow weights in the state of the task begin with this.
_SLOW = "slow."


@TASKS.register("lookahead")
class Lookahead(Classification):
    """Classification with lookahead (Zhang et al., arXiv 1907.08610), whose decay grows during the run.

    Slow weights, which begin as the initial ones, are averaged with the trained ones every few steps, and replace them:
    `slow = decay * slow + (1 - decay) * trained`. After the last step, the slow weights are the result. The statistics
    of batch norm layers are averaged too.
    """

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
