"""Base class of tasks, and `build_task`.

A task computes the loss and the metrics of a micro-batch, and may replace the update of a step; the loop in trainer.py
does everything else. A new task is one class, decorated with
`@TASKS.register("name")`, in a file of this package or in a separate script. TASK.NAME selects it.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from distribuuuu.config import ConfigError
from distribuuuu.config.derived import stage_without_augmentation
from distribuuuu.config.registry import dataset_class, task_class, task_name
from distribuuuu.config.settings import build_settings
from distribuuuu.data.batch import Batch
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.optim.precision import Precision
from distribuuuu.tasks.metrics import Metric, StepOutput, build_metrics


class StepKey(NamedTuple):
    """Position of a micro-batch in the run; the random numbers of `prepare_batch` and `train_step` derive from it."""

    seed: int
    epoch: int
    step: int
    micro: int


class Task:
    """Base class of tasks.

    Args:
        classes: names of the classes of the data.
        device: the device of the model and the batches.
        precision: mixed precision of forward passes.

    Attributes:
        settings: TASK.KWARGS: an instance of `Settings`; without that class, a dict.
        train_metrics, eval_metrics: metrics by name; the first evaluation metric selects the best checkpoint.
        state: the `TrainState` of the run, e.g. with `state.ema`; None outside of a training.
    """

    # Names of metrics if TRAIN.METRICS or TEST.METRICS is empty.
    default_metrics: Sequence[str] = ("top1", "topk")
    multilabel = False
    # Whether the scores of an image are those of classes. If not, they are values, e.g. of a regression, and `classes`
    # are their names. A single score with structured targets is always a value.
    classifies = True
    # How often `update` calls `step.gradients`, at most. With more than 1, the images of the step are kept.
    gradient_passes = 1
    # Whether `eval_step` computes gradients, e.g. to adapt the model to the batch.
    eval_gradients = False

    def __init__(self, cfg, classes: Sequence[str], device: torch.device, precision: Precision):
        self.cfg = cfg
        self.classes = classes
        self.classifies = has_classes(cfg, len(classes))
        self.device = device
        self.autocast = precision.autocast
        self.settings = build_settings(cfg, "TASK.KWARGS", type(self))
        self.state: Any = None
        self.train_metrics = self.build_metrics("TRAIN.METRICS", cfg.TRAIN.METRICS)
        self.eval_metrics = self.build_metrics("TEST.METRICS", cfg.TEST.METRICS)

    @classmethod
    def views(cls, cfg, loader: str = "train") -> Sequence[Mapping[str, Any]]:
        """Return for each view of an image the options by which its transform differs from that of the config.

        An image is decoded once for all views. The options are TRAIN.IM_SIZE, those of AUG but for mixup and CutMix,
        and DATA.CROP*, DATA.FLIP, DATA.VFLIP and DATA.INTERPOLATION. With several views, `Batch.images` is a tuple.

        Args:
            loader: "train", or the name of one of `extra_loaders`.
        """
        return [{}] * cfg.DATA.VIEWS

    @classmethod
    def augmentation_stages(cls, cfg) -> Mapping[int, Mapping[str, Any]]:
        """Return by the epoch from which they apply, from 0, the options by which the augmentation then differs.

        They are the options of `views`, but for TRAIN.IM_SIZE. By default, AUG.OFF_EPOCHS ends all augmentation.
        """
        return stage_without_augmentation(cfg)

    @classmethod
    def extra_loaders(cls, cfg) -> Mapping[str, Mapping[str, Any]]:
        """Return by name the options by which further training loaders differ from that of the config.

        Each step gets a batch of each, `Batch.extra`. TRAIN.BATCH_SIZE sets its number of images relative to that of
        the config; the others are TRAIN.DATASET, TRAIN.SPLIT, TRAIN.IM_SIZE, and those of DATA and, but for mixup and
        CutMix, of AUG.
        """
        return {}

    @property
    def num_outputs(self) -> int | None:
        """Columns of the model's output, checked before training; None: any output, e.g. a tuple or a dict."""
        return len(self.classes)

    @property
    def has_scores(self) -> bool:
        """Whether `predict_step` returns a score for each class."""
        return self.num_outputs == len(self.classes) or type(self).predict_step is not Task.predict_step

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

    def deploy_model(self, model: nn.Module) -> nn.Module:
        """Return the form of a trained model that is evaluated, exported and predicted with, e.g. without a projection.

        Args:
            model: a copy of that of `adapt_model`, with its weights; it may be changed.
        """
        return model

    def averages(self, model: nn.Module) -> dict[str, Any]:
        """Return further kinds of weights by name (a-z, 0-9), which are evaluated, saved and reported like the EMA.

        They are objects like `optim.ema.Ema`, e.g. of a subclass with another `finish_step`. A checkpoint holds the
        tensors of their models; what else they need belongs to `state_dict`, or is computed from the position.

        Args:
            model: that of `adapt_model`, before the first step and before a resume.
        """
        return {}

    def unsaved_tensors(self, model: nn.Module) -> Collection[str]:
        """Return the names of tensors that checkpoints leave out, e.g. of a frozen backbone; best weights are whole.

        Each start loads or draws them again as the first one did, with FINETUNE.WEIGHTS and MODEL.PRETRAINED; others
        are an error, and so is a training that changes them.
        """
        return ()

    def prepare_training(self, plan: BatchPlan, images: ImageDataset, num_steps: int) -> None:
        """Build the objects that only training needs, e.g. losses; called on every process before the first step.

        Args:
            plan: the split of a global batch into processes and micro-batches.
            images: the training set.
            num_steps: steps per epoch.

        Raises:
            ConfigError: the task does not support the config.
        """

    def begin_epoch(self, epoch: int) -> str | None:
        """Prepare for the steps of an epoch, from 0, also for those that are left after a resume.

        Returns:
            The name of the stage of the training, which is logged and recorded; None: there are no stages.
        """

    def choose_images(self, epoch: int) -> Sequence[int] | torch.Tensor | None:
        """Return the indices of the training images that an epoch takes, each once and in random order; None: all.

        It is called on every process before the first step of the epoch, and returns the same on all. A checkpoint
        within the epoch holds the choice.
        """

    def order_images(
        self, epoch: int, generator: torch.Generator, plan: BatchPlan
    ) -> Sequence[int] | torch.Tensor | None:
        """Return the indices of the training images of an epoch in order; None: see `choose_images`.

        Step k takes the k-th `plan.global_batch` of them; an image may occur repeatedly. It is called and stored like
        `choose_images`; what is drawn from the generator is the same on all processes.
        """

    def param_groups(self, model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the parameter groups of the optimizer: `groups`, those of the options, or others of these parameters.

        Besides the settings of the optimizer, a group may have `lr_scale`, a factor of the learning rate, and
        `schedule`, a registered name in place of OPTIM.LR_POLICY.
        """
        return groups

    def train_mode(self, model: nn.Module) -> None:
        """Put the model into training mode; a task may keep parts in evaluation mode, e.g. batch norm layers."""
        model.train()

    def prepare_batch(self, batch: Batch, key: StepKey) -> Batch:
        """Return a micro-batch as `train_step` gets it, e.g. mixed; called once, with random numbers from `key` only.

        The images may be changed in place.
        """
        return batch

    def update(self, step: Any) -> None:
        """Update the weights with a global batch; a step that is not applied is counted as skipped.

        Args:
            step: the `trainer.Step`: `step.gradients()` replaces the gradients of the weights by those of the global
                batch, scaled with float16; `step.apply()` unscales and clips them, and takes the optimizer's step;
                `step.record(name=value)` shows what is known only after it in the row of this step.
        """
        step.gradients()
        step.apply()

    def train_step(self, model: nn.Module, batch: Batch, key: StepKey) -> StepOutput:
        """Return the loss of a micro-batch and the inputs of the metrics, without synchronizing with the device.

        The global generators of torch are seeded for this micro-batch before the call.

        Args:
            model: the model in training mode, wrapped for several processes.
            batch: the micro-batch on the device.
            key: its position.
        """
        raise TypeError(f"{type(self).__name__} defines no train_step")

    def eval_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        """Return the loss of a batch and the inputs of the metrics, without gradients unless `eval_gradients`."""
        raise TypeError(f"{type(self).__name__} defines no eval_step")

    def wrong_output(self, batch: Batch, output: StepOutput) -> StepOutput | None:
        """Return an answer that counts as wrong for images that cannot be read; None: they are left out.

        Args:
            batch: the images, which are black, and their targets.
            output: that of other images.
        """
        return None

    def begin_evaluation(self, model: nn.Module) -> nn.Module:
        """Return the model to evaluate, e.g. a copy that `eval_step` may change."""
        return model

    def predict_step(self, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        """Return the scores (N, classes) of images (N, C, H, W), e.g. logits: the largest one is the prediction.

        TEST.FLIP averages those of each image and its mirror image, TEST.SHIFT those of shifted images too.

        Raises:
            ConfigError: the output of the model has another form, and the task does not define this method.
        """

        def score(images: torch.Tensor) -> torch.Tensor:
            scores = model(images)
            if self.cfg.TEST.FLIP:  # a compiled model's second output may overwrite its first
                scores = (scores.clone() + model(images.flip(-1))) / 2
            return scores

        with self.autocast():
            scores = score(images)
            if shift := self.cfg.TEST.SHIFT:
                shifted = (score(view).float() / 4 for view in shift_images(images, shift))
                scores = sum(shifted, scores.float() / 2)
        if not isinstance(scores, torch.Tensor) or scores.shape != (images.shape[0], len(self.classes)):
            raise ConfigError(f"TASK.NAME: got {task_name(self.cfg)}; expected a task with a score for each class;"
                              f" fix: define {type(self).__name__}.predict_step")  # fmt: skip
        return scores

    def log_epoch(self, log: Any, model: nn.Module, batch: Batch | None) -> None:
        """Log images and values after an evaluation, on every process; only the main process writes.

        Args:
            log: the `Log`: `log.scalars({"name": value}, epoch)` and `log.images("name", pixels, epoch)`, with
                `self.state.epoch`.
            model: the model, evaluated, with the raw weights.
            batch: the first evaluation batch of this process; None: it has none.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the model: tensors, numbers, texts; dicts, lists, tuples of them.

        It must be the same on all processes; `rank_state_dict` is for what is not.
        An evaluation or a prediction restores the entries that there are without `prepare_training`.
        """
        return {}

    def rank_state_dict(self) -> dict[str, Any]:
        """Return what differs between the processes, e.g. the images of a queue, under other names than `state_dict`.

        With another number of processes, all continue with that of the first one.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` and `rank_state_dict` returned; the names and the shapes are the same."""
        if state:
            raise TypeError(f"{type(self).__name__} defines no load_state_dict")


def deploy_copy(task: Task, model: nn.Module) -> nn.Module:
    """Return the form of a model to evaluate; the model itself, if its task has no other form."""
    has_form = type(task).deploy_model is not Task.deploy_model
    return task.deploy_model(copy.deepcopy(model)) if has_form else model


def has_classes(cfg, num_classes: int) -> bool:
    """Return `classifies` of the task of a config."""
    return task_class(cfg).classifies and (num_classes > 1 or dataset_class(cfg).targets != "structured")


def shift_images(images: torch.Tensor, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (N, C, H, W) shifted by some pixels to the bottom right and to the top left, reflected."""
    padded, (height, width) = pad(images, [shift] * 4, "reflect"), images.shape[-2:]
    return padded[..., :height, :width], padded[..., 2 * shift :, 2 * shift :]


def build_task(cfg, classes: Sequence[str], device: torch.device, precision: Precision) -> Task:
    """Return the task of TASK.NAME; arguments and errors as in `Task`."""
    return task_class(cfg)(cfg, classes, device, precision)
