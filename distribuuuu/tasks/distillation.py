"""Knowledge distillation: the task loss plus a loss against the outputs of a teacher."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.config_node import changed
from distribuuuu.config.model_names import PUBLISHED, names_backbone
from distribuuuu.config.registry import TASKS
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.models import build_model
from distribuuuu.models.finetune import load_weights
from distribuuuu.tasks.classification import Classification
from distribuuuu.tasks.losses import Loss


@TASKS.register("distillation")
class Distillation(Classification):
    """Classification with a teacher that gets the same images (DISTILL.*).

    The loss is `(1 - alpha) * (loss against the targets) + alpha * (loss against the teacher)`. The second one is
    soft: `T^2 * KL(softmax(teacher / T) || softmax(student / T))` (Hinton et al., arXiv 1503.02531), or
    hard: the cross-entropy with the class that the teacher predicts (Touvron et al., arXiv 2012.12877).
    """

    def prepare_training(self, plan: BatchPlan, images: ImageDataset, num_steps: int) -> None:
        """Build the mixer, the loss and the teacher, which stays in evaluation mode."""
        super().prepare_training(plan, images, num_steps)
        self.teacher = build_teacher(self.cfg, self.classes).to(self.device).eval().requires_grad_(False)

    def compute_loss(self, images: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean training loss ()."""
        with torch.no_grad(), self.autocast():
            teacher_logits = Loss.upcast(self.teacher(images))
        alpha, kind, temperature = self.cfg.DISTILL.ALPHA, self.cfg.DISTILL.KIND, self.cfg.DISTILL.TEMPERATURE
        task_loss = super().compute_loss(images, logits, targets)
        distill_loss = teacher_loss(Loss.upcast(logits), teacher_logits, kind, temperature)
        return (1 - alpha) * task_loss + alpha * distill_loss


def teacher_loss(logits: torch.Tensor, teacher_logits: torch.Tensor, kind: str, temperature: float) -> torch.Tensor:
    """Return the mean loss () of logits (N, classes) against those of a teacher; `kind` is "soft" or "hard"."""
    if kind == "hard":
        return F.cross_entropy(logits, teacher_logits.argmax(dim=1))
    log_p, log_q = F.log_softmax(logits / temperature, dim=1), F.log_softmax(teacher_logits / temperature, dim=1)
    return temperature**2 * F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)


def build_teacher(cfg, classes: Sequence[str]) -> nn.Module:
    """Return the model of DISTILL.TEACHER with its weights. Every process must call it.

    Raises:
        ConfigError: the teacher cannot be built, or its weights do not match the model or the classes.
    """
    weights = cfg.DISTILL.WEIGHTS or PUBLISHED
    own = {"MODEL.ARCH": cfg.DISTILL.TEACHER, "MODEL.KWARGS": cfg.DISTILL.KWARGS.clone(), "MODEL.WEIGHTS": None}
    try:
        teacher_cfg = changed(cfg, {**own, "FINETUNE.WEIGHTS": "" if weights == PUBLISHED else weights})
        if names_backbone(cfg.DISTILL.TEACHER):
            from distribuuuu.models.pretrained import resolve_arch

            teacher_cfg = resolve_arch(teacher_cfg, "DISTILL.TEACHER")
        teacher = build_model(teacher_cfg)
        weights = teacher_cfg.FINETUNE.WEIGHTS or PUBLISHED
        load_weights(teacher_cfg, teacher, weights, classes, "DISTILL.WEIGHTS", needs_head=True)
    except ConfigError as error:  # or a CheckpointError
        raise ConfigError(map(_as_teacher_problem, error.problems), cfg.origins) from error
    return teacher


def _as_teacher_problem(problem: Problem) -> Problem:
    """Return a problem of MODEL.* under the key of DISTILL.* that sets the same for the teacher."""
    first = problem.key if isinstance(problem.key, str) else problem.key[0]
    if not first.startswith("MODEL."):
        return problem
    return Problem("DISTILL.KWARGS" if first.startswith("MODEL.KWARGS") else "DISTILL.TEACHER", problem.message)
