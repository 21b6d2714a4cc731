"""Knowledge distillation: the task loss shared with a loss against the outputs of a teacher."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from distribuuuu.checkpoint.io import CheckpointError, find_class_mismatch, read_checkpoint
from distribuuuu.checkpoint.load import load_state_dict
from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.registry import TASKS
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.distributed import comm as dist
from distribuuuu.models import build_model
from distribuuuu.tasks.classification import Classification
from distribuuuu.tasks.losses import Loss


@TASKS.register("distillation")
class Distillation(Classification):
    """Classification with a teacher that sees the same images (DISTILL.*).

    soft: `alpha * T^2 * KL(softmax(teacher / T) || softmax(student / T))` (Hinton et al., arXiv 1503.02531);
    hard: `alpha * cross-entropy with the teacher's most likely class` (Touvron et al., arXiv 2012.12877);
    plus `(1 - alpha)` times the loss against the targets.
    """

    def prepare_training(self, plan: BatchPlan) -> None:
        """Build the mixer, the loss and the teacher, which stays in evaluation mode.

        Raises:
            ConfigError: the teacher cannot be built, or its weights do not fit or are those of other classes.
        """
        super().prepare_training(plan)
        self.teacher = build_teacher(self.cfg, self.classes).to(self.device).eval().requires_grad_(False)

    def compute_loss(self, images: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss ()."""
        with torch.no_grad(), self.autocast():
            teacher_logits = Loss.precise(self.teacher(images))
        settings, own = self.cfg.DISTILL, super().compute_loss(images, logits, targets)
        against = teacher_loss(Loss.precise(logits), teacher_logits, settings.KIND, settings.TEMPERATURE)
        return (1 - settings.ALPHA) * own + settings.ALPHA * against


def teacher_loss(logits: torch.Tensor, teacher_logits: torch.Tensor, kind: str, temperature: float) -> torch.Tensor:
    """Return the mean loss () of logits (N, classes) against those of the teacher; kind is "soft" or "hard"."""
    if kind == "hard":
        return F.cross_entropy(logits, teacher_logits.argmax(dim=1))
    log_p, log_q = F.log_softmax(logits / temperature, dim=1), F.log_softmax(teacher_logits / temperature, dim=1)
    return temperature**2 * F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)


def build_teacher(cfg, classes: Sequence[str]) -> nn.Module:
    """Return the model of DISTILL.TEACHER with its weights; every process must call it.

    Raises:
        ConfigError: it cannot be built, or its weights do not fit or are those of other classes.
    """
    settings = cfg.DISTILL
    own = cfg.clone()
    own.defrost()
    own.MODEL.ARCH, own.MODEL.KWARGS = settings.TEACHER, settings.KWARGS.clone()
    own.freeze()
    pretrained = settings.WEIGHTS == "pretrained"
    try:
        if pretrained:
            return dist.local_main_first(lambda: build_model(own, pretrained=True))
        teacher = build_model(own, pretrained=False)
    except ConfigError as error:
        raise ConfigError(map(_as_teacher_problem, error.problems), cfg.origins) from error
    try:
        content = read_checkpoint(settings.WEIGHTS)
        load_state_dict(teacher, content.get("ema_state_dict") or content["state_dict"], settings.WEIGHTS)
        if other := find_class_mismatch(content, classes):
            remedy = "if they mean the same, give a file with the state dict alone"
            raise CheckpointError(f"{settings.WEIGHTS}: was trained on other classes: {other}; {remedy}")
    except CheckpointError as error:
        raise ConfigError(Problem("DISTILL.WEIGHTS", str(error)), cfg.origins) from error
    return teacher


def _as_teacher_problem(problem: Problem) -> Problem:
    """Return a problem of the model's options as a problem of the teacher's."""
    first = problem.key if isinstance(problem.key, str) else problem.key[0]
    if first == "MODEL.PRETRAINED":
        return Problem("DISTILL.WEIGHTS", problem.message)
    return Problem("DISTILL.KWARGS" if first.startswith("MODEL.KWARGS") else "DISTILL.TEACHER", problem.message)
