"""Distillation losses compared with their definitions, and errors of the teacher."""

import numpy as np
import pytest
import torch
from support.runs import make_cfg, records
from torch import nn

from distribuuuu.config import ConfigError
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.datasets.dummy import Dummy
from distribuuuu.models import build_model
from distribuuuu.optim.precision import Precision
from distribuuuu.tasks.base import build_task
from distribuuuu.tasks.distillation import Distillation
from distribuuuu.trainer import train_model


def softmax(values: np.ndarray) -> np.ndarray:
    exps = np.exp(values - values.max(axis=1, keepdims=True))
    return exps / exps.sum(axis=1, keepdims=True)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    images, logits = torch.randn(5, 3, 2, 2, generator=draw), torch.randn(5, 4, generator=draw) * 3
    return images, logits, torch.tensor([0, 3, 1, 1, 2])


class Teacher(nn.Module):
    """A model whose logits are the first pixels, and differ in training mode."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = images.flatten(1)[:, :4] * self.weight * 2
        return logits + 100 if self.training else logits


def distillation_from(teacher: nn.Module, kind: str, alpha: float, temperature: float = 1.0) -> Distillation:
    """Return a distillation task with a teacher of four classes."""
    overrides = ("DISTILL.TEACHER", "resnet8", "DISTILL.WEIGHTS", "x", "DISTILL.KIND", kind, "DISTILL.ALPHA", alpha)
    cfg = make_cfg(*overrides, "DISTILL.TEMPERATURE", temperature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distribuuuu.tasks.distillation.build_teacher", lambda cfg, classes: teacher)
        return prepared(cfg, "abcd")


def prepared(cfg, classes) -> Distillation:
    device = torch.device("cpu")
    task = build_task(cfg, tuple(classes), device, Precision())
    task.prepare_training(BatchPlan(4, 1, 1), Dummy(8, 4), num_steps=1)
    return task


def test_the_loss_matches_its_definition():
    for kind, temperature in [("soft", 1.0), ("soft", 4.0), ("hard", 1.0)]:
        images, logits, labels = batch()
        student, teacher = (
            logits.numpy().astype(np.float64),
            Teacher().eval()(images).detach().numpy().astype(np.float64),
        )
        own = -np.log(softmax(student))[np.arange(5), labels].mean()
        p, q = softmax(student / temperature), softmax(teacher / temperature)
        of_teacher = temperature**2 * (q * (np.log(q) - np.log(p))).sum(axis=1).mean()
        if kind == "hard":
            of_teacher = -np.log(softmax(student))[np.arange(5), teacher.argmax(1)].mean()
        loss = distillation_from(Teacher(), kind, 0.3, temperature).compute_loss(images, logits, labels)
        assert loss.item() == pytest.approx(0.7 * own + 0.3 * of_teacher, rel=1e-5)


def test_a_run_distills_the_weights_of_another_run(finished_run, small_cfg, tmp_path):
    teacher = ("DISTILL.TEACHER", "resnet8", "DISTILL.WEIGHTS", finished_run / "best.pth.tar")
    losses = []
    for alpha in (0.0, 0.9):
        out_dir = tmp_path / f"student_{alpha}"
        train_model(small_cfg(*teacher, "DISTILL.ALPHA", alpha, "OUT_DIR", out_dir, "OPTIM.MAX_EPOCH", 2))
        losses.append([entry["loss"] for entry in records(out_dir) if entry["kind"] == "train"])
    plain = [entry["loss"] for entry in records(finished_run) if entry["kind"] == "train"]
    assert losses[0] == plain and losses[1] != plain


def test_errors_of_the_teacher_name_the_options_of_distillation(small_cfg, tmp_path):
    for words, said in [
        (("DISTILL.TEACHER", "resnet88"), r"^DISTILL.TEACHER \(command line\): .*resnet88.*did you mean"),
        (("DISTILL.KWARGS.widht", 8), r"^DISTILL.KWARGS.*: resnet8 has no such parameter; did you mean width"),
        ((), r"^DISTILL.WEIGHTS \(command line\): .*does not fit the model"),
        (("DISTILL.WEIGHTS", "pretrained"), "^DISTILL.WEIGHTS .*resnet8 has no published weights"),
    ]:  # fmt: skip
        torch.save({"w": torch.ones(1)}, tmp_path / "weights.pth")
        with pytest.raises(ConfigError, match=said):
            prepared(small_cfg("DISTILL.TEACHER", "resnet8", "DISTILL.WEIGHTS", tmp_path / "weights.pth", *words), ())


def test_a_teacher_with_other_classes_is_rejected(small_cfg, tmp_path):
    weights = tmp_path / "teacher.pth"
    cfg = small_cfg("DISTILL.TEACHER", "resnet8", "DISTILL.WEIGHTS", weights)
    content = {"state_dict": build_model(cfg).state_dict(), "classes": ["ant", "wasp", "cat"]}
    torch.save(content, weights)
    with pytest.raises(ConfigError, match="^DISTILL.WEIGHTS .*other classes: 'wasp' where the data has 'bee'"):
        prepared(cfg, ("ant", "bee", "cat"))
    prepared(cfg, ("ant", "wasp", "cat"))
    torch.save(content["state_dict"], weights)
    prepared(cfg, ("ant", "bee", "cat"))
