"""Base class of tasks, and `build_task`.

A task computes one micro-batch; the loop in trainer.py does everything else. A new task is one class, decorated with
`@TASKS.register("name")`, in a file of this package or in a separate script. TASK.NAME selects it.
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
    """The position of a micro-batch in the run; all random numbers of a step are derived from it."""

    seed: int
    epoch: int
    step: int
    micro: int


class Task:
    """Base class of tasks.

    Args:
        cfg: the config.
        classes: names of the classes of the data.
        device: the device of the model and the batches.
        precision: mixed precision of forward passes.

    Attributes:
        settings: TASK.KWARGS.
        train_metrics, eval_metrics: metrics by name; the first evaluation metric selects the best checkpoint.
    """

    # Names of metrics if TRAIN.METRICS or TEST.METRICS is empty.
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
        """Columns of the model's output, checked before training; None: any number."""
        return len(self.classes)

    def build_metrics(self, key: str, names: Sequence[str]) -> dict[str, Metric]:
        """Return the metrics of an option by name; `default_metrics` if the option is empty.

        Raises:
            ConfigError: a metric is unknown, or not defined for this kind of targets.
        """
        names = names or self.default_metrics
        return build_metrics(key, names, len(self.classes), self.cfg.TRAIN.TOPK, self.multilabel)

    @property
    def primary_metric(self) -> tuple[str, bool]:
        """The metric that selects the best checkpoint ("loss" without metrics), and whether higher is better."""
        for name, metric in self.eval_metrics.items():
            return name, metric.higher_is_better
        return "loss", False

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Return the model to train: that of MODEL.ARCH, unchanged or adapted, e.g. with another head."""
        return model

    def prepare_training(self, plan: BatchPlan) -> None:
        """Build the objects that only training needs, e.g. losses; called on every process before the first step.

        Args:
            plan: the split of a global batch into processes and micro-batches.

        Raises:
            ConfigError: the task does not support the config.
        """

    def train_step(self, model: nn.Module, images: torch.Tensor, targets: torch.Tensor, key: StepKey) -> StepOutput:
        """Return the loss of a micro-batch and the inputs of the metrics, without synchronizing with the device.

        The global generators of torch are seeded for this micro-batch before the call.

        Args:
            model: the model in training mode, wrapped for several processes.
            images: normalized, (N, 3, H, W), on the device; may be changed in place.
            targets: targets of the data set: int64 (N,), or float32 (N, classes).
            key: the position of the micro-batch.
        """
        raise TypeError(f"{type(self).__name__} defines no train_step")

    def eval_step(self, model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> StepOutput:
        """Return the loss of a batch and the inputs of the metrics, without gradients; arguments as in `train_step`."""
        raise TypeError(f"{type(self).__name__} defines no eval_step")


def task_name(cfg) -> str:
    """Return TASK.NAME; `auto` is resolved by DISTILL.TEACHER and by the labels of the data set."""
    if cfg.TASK.NAME != "auto":
        return cfg.TASK.NAME
    if cfg.DISTILL.TEACHER:
        return "distillation"
    return "multilabel" if dataset_class(cfg).multilabel else "classification"


def build_task(cfg, classes: Sequence[str], device: torch.device, precision: Precision) -> Task:
    """Return the task of TASK.NAME; arguments and errors as in `Task`."""
    return TASKS.get(task_name(cfg))(cfg, classes, device, precision)
