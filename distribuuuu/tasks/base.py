"""The task contract: what a model learns, from a batch of images to a loss and metrics.

A task computes one micro-batch; the loop in trainer.py does everything else. A new task is one class, decorated with
`@TASKS.register("name")`, in a file of this package or in a script of its own; TASK.NAME selects it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from distribuuuu.config.registry import TASKS, dataset_class
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.optim.precision import Precision
from distribuuuu.tasks.metrics import Metric, StepOutput, build_metrics


class StepKey(NamedTuple):
    """The position of a micro-batch in the run; everything random in a step is derived from it."""

    seed: int
    epoch: int
    step: int
    micro: int


class Task:
    """Base class of tasks. Every process has one.

    Args:
        cfg: the config.
        classes: names of the classes of the data.
        device: the device that computes.
        precision: the context of forward passes.

    Attributes:
        settings: TASK.KWARGS.
        train_metrics, eval_metrics: metrics by name; the first one of the evaluation selects the best checkpoint.
    """

    # Metrics where TRAIN.METRICS or TEST.METRICS is empty.
    default_metrics: Sequence[str] = ("top1", "topk")
    multilabel = False

    def __init__(self, cfg, classes: Sequence[str], device: torch.device, precision: Precision):
        self.cfg = cfg
        self.classes = classes
        self.device = device
        self.autocast = precision.autocast
        self.settings = dict(cfg.TASK.KWARGS)
        self.train_metrics = self.build_metrics("TRAIN.METRICS", cfg.TRAIN.METRICS)
        self.eval_metrics = self.build_metrics("TEST.METRICS", cfg.TEST.METRICS)

    @property
    def num_outputs(self) -> int | None:
        """Columns of the model's output, which are checked before training; None: any number."""
        return len(self.classes)

    def build_metrics(self, key: str, names: Sequence[str]) -> dict[str, Metric]:
        """Return the metrics that an option names, by name; `default_metrics` if it names none.

        Raises:
            ConfigError: a metric is unknown, or not defined for this kind of targets.
        """
        names = names or self.default_metrics
        return build_metrics(key, names, len(self.classes), self.cfg.TRAIN.TOPK, self.multilabel)

    @property
    def selecting_metric(self) -> tuple[str, bool]:
        """The metric that selects the best checkpoint, and whether it is best when greatest: the first, or the loss."""
        for name, metric in self.eval_metrics.items():
            return name, metric.higher_is_better
        return "loss", False

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Return the model to train: the one of MODEL.ARCH as it is, or changed, e.g. with another head."""
        return model

    def prepare_training(self, plan: BatchPlan) -> None:
        """Build what only training needs, e.g. losses; every process calls it before the first step.

        Args:
            plan: how a global batch is split into processes and micro-batches.

        Raises:
            ConfigError: the config does not suit the task.
        """

    def train_step(self, model: nn.Module, images: torch.Tensor, targets: torch.Tensor, key: StepKey) -> StepOutput:
        """Return the loss of a micro-batch and what the metrics need; waits for nothing on the device.

        The generators of torch are seeded for this micro-batch before the call, so random numbers may be drawn freely.

        Args:
            model: the model in training mode, wrapped for several processes.
            images: normalized, (N, 3, H, W), on the device; may be changed in place.
            targets: as the data set has them: int64 (N,), or float32 (N, classes).
            key: the position of the micro-batch.
        """
        raise TypeError(f"{type(self).__name__} defines no train_step")

    def eval_step(self, model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> StepOutput:
        """Return the loss of a batch and what the metrics need, without gradients; arguments as of `train_step`."""
        raise TypeError(f"{type(self).__name__} defines no eval_step")


def task_name(cfg) -> str:
    """Return TASK.NAME; for `auto` what DISTILL.TEACHER and the data set make of it."""
    if cfg.TASK.NAME != "auto":
        return cfg.TASK.NAME
    if cfg.DISTILL.TEACHER:
        return "distillation"
    return "multilabel" if dataset_class(cfg).multilabel else "classification"


def build_task(cfg, classes: Sequence[str], device: torch.device, precision: Precision) -> Task:
    """Return the task of TASK.NAME; arguments and errors as those of `Task`."""
    return TASKS.get(task_name(cfg))(cfg, classes, device, precision)
