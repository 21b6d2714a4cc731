"""What a step makes small: the loss against the targets, and with a teacher also that against its answers."""

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from distribuuuu.checkpoint.io import CheckpointError, find_class_mismatch, read_checkpoint
from distribuuuu.checkpoint.load import load_state_dict
from distribuuuu.config import ConfigError, Problem
from distribuuuu.distributed import comm as dist
from distribuuuu.models import build_model
from distribuuuu.tasks.losses import Loss, build_loss

# (images (N, 3, H, W), logits (N, classes), targets) to the mean loss ()
Objective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Distillation:
    """A loss shared between the targets and a teacher that sees the same images: an `Objective`.

    soft: `alpha * T^2 * KL(softmax(teacher / T) || softmax(student / T))` (Hinton et al., arXiv 1503.02531);
    hard: `alpha * cross-entropy with the teacher's most likely class` (Touvron et al., arXiv 2012.12877);
    plus `(1 - alpha)` times the loss against the targets.

    Args:
        criterion: the loss against the targets.
        teacher: images to logits, of as many classes; kept in evaluation mode.
        kind: "soft" or "hard".
        alpha: the teacher's share, 0 to 1.
        temperature: T, of the soft kind.
        autocast: the context of the teacher's forward pass.
    """

    def __init__(
        self,
        criterion: Loss,
        teacher: nn.Module,
        kind: str = "soft",
        alpha: float = 0.5,
        temperature: float = 1.0,
        autocast: Callable = contextlib.nullcontext,
    ):
        self.criterion = criterion
        self.teacher = teacher.eval().requires_grad_(False)
        self.kind = kind
        self.alpha = alpha
        self.temperature = temperature
        self._autocast = autocast

    def __call__(self, images: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss ()."""
        with torch.no_grad(), self._autocast():
            answers = Loss.precise(self.teacher(images))
        own = self.criterion(logits, targets)
        return (1 - self.alpha) * own + self.alpha * self.teachers_loss(Loss.precise(logits), answers)

    def teachers_loss(self, logits: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """Return the mean loss () against the teacher's logits (N, classes)."""
        if self.kind == "hard":
            return F.cross_entropy(logits, answers.argmax(dim=1))
        scale = self.temperature
        log_p, log_q = F.log_softmax(logits / scale, dim=1), F.log_softmax(answers / scale, dim=1)
        return scale**2 * F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)


def build_objective(
    cfg, classes: Sequence[str], device: torch.device, autocast: Callable = contextlib.nullcontext
) -> Objective:
    """Return the loss of LOSS.NAME, shared with the teacher of DISTILL.TEACHER if there is one.

    Args:
        cfg: the config.
        classes: the names of the data's classes.
        device: where the loss is computed.
        autocast: the context of the teacher's forward pass.

    Raises:
        ConfigError: the teacher cannot be built, or its weights do not fit or are those of other classes.
    """
    criterion, settings = build_loss(cfg).to(device), cfg.DISTILL
    if not settings.TEACHER:
        return lambda images, logits, targets: criterion(logits, targets)
    teacher = build_teacher(cfg, classes).to(device)
    return Distillation(criterion, teacher, settings.KIND, settings.ALPHA, settings.TEMPERATURE, autocast)


def build_teacher(cfg, classes: Sequence[str]) -> nn.Module:
    """Return the model of DISTILL.TEACHER with its weights; raises and asks as `build_objective`."""
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
