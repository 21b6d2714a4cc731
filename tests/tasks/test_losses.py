"""Losses and distillation compared with plain float64 implementations of their formulas."""

import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.images import draw_folder
from support.runs import make_cfg, records, timeless, train_and_stop
from support.tables import pairwise
from torch import nn

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.batch_plan import BatchPlan
from distribuuuu.data.datasets.dummy import Dummy
from distribuuuu.data.loader import build_images
from distribuuuu.models import build_model
from distribuuuu.optim.precision import Precision
from distribuuuu.records.read_results import read_results
from distribuuuu.tasks.base import build_task
from distribuuuu.tasks.class_weights import compute_class_weights
from distribuuuu.tasks.distillation import Distillation
from distribuuuu.tasks.losses import LOSSES, build_loss
from distribuuuu.trainer import evaluate_weights, train_model

NUM, CLASSES = 12, 5
WEIGHTS = (0.5, 2, 1.0, 0.0, 3.0)
OPTIONS = {
    "cross_entropy": [{}],
    "bce": [{"threshold": at} for at in (None, 0.0, 0.2)],
    "focal": [{"gamma": gamma} for gamma in (0.0, 0.5, 2.0)],
}
ROWS = [(name, options) for name, rows in OPTIONS.items() for options in rows]
# Smoothing, weights, soft targets.
COLUMNS = list(itertools.product((0.0, 0.1), ((), WEIGHTS), (False, True)))


def batch(soft: bool, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits, and labels or, if `soft`, mixtures of two labels."""
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(NUM, CLASSES, generator=generator, dtype=torch.float64)
    labels, others = torch.randint(0, CLASSES, (2, NUM), generator=generator)
    share = torch.rand(NUM, 1, generator=generator, dtype=torch.float64)
    mixed = share * F.one_hot(labels, CLASSES) + (1 - share) * F.one_hot(others, CLASSES)
    return logits.to(dtype), mixed if soft else labels


def naive(name, logits, targets, smoothing, weights, threshold=None, gamma=0.0) -> float:
    """Compute the mean loss image by image and class by class, in float64."""
    total = 0.0
    for row, target in zip(logits.double().numpy(), targets.numpy(), strict=True):
        p = np.exp(row) / np.exp(row).sum()
        for index in range(CLASSES):
            t = float(target == index) if target.ndim == 0 else float(target[index])
            t = t * (1 - smoothing) + smoothing / CLASSES
            factor = weights[index] if weights else 1.0
            if name == "bce":
                t = t if threshold is None else float(t > threshold)
                yes = 1 / (1 + np.exp(-row[index]))
                term = -(t * np.log(yes) + (1 - t) * np.log(1 - yes)) / CLASSES
            else:
                term = -t * (1 - p[index]) ** gamma * np.log(p[index])
            total += factor * term
    return total / len(logits)


@pytest.mark.parametrize("row, column", pairwise(ROWS, COLUMNS))
def test_each_loss_matches_its_formula_and_its_gradients_are_right_in_any_micro_batches(row, column):
    (name, own), (smoothing, weights, soft) = row, column
    options = {"smoothing": smoothing, "weights": weights, **own}
    criterion = LOSSES.get(name)(**options)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        logits, targets = batch(soft, dtype)
        loss = criterion(logits, targets)
        assert (loss.shape, loss.dtype) == ((), torch.promote_types(dtype, torch.float32))
        assert loss.item() == pytest.approx(naive(name, logits, targets, **options), rel=tolerance)
    logits, targets = batch(soft)
    whole, parts = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    criterion(whole, targets).backward()
    for part, target in zip(parts.chunk(4), targets.chunk(4), strict=True):
        (criterion(part, target) / 4).backward()
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=1e-15)
    assert torch.autograd.gradcheck(lambda logits: criterion(logits, targets), whole)


def test_a_run_trains_with_its_loss_and_evaluates_with_cross_entropy(small_cfg, tmp_path):
    cfg = small_cfg("LOSS.NAME", "bce", "LOSS.LABEL_SMOOTHING", 0.1)
    train_model(cfg)
    rows = records(cfg.OUT_DIR)
    trained, evaluated = ([row["loss"] for row in rows if row["kind"] == kind] for kind in ("train", "eval"))
    # At initialization, the mean of three binary cross-entropies is below the cross-entropy of three classes.
    assert trained[0] < 0.8 < evaluated[0] and len(evaluated) == 2
    last = sorted((tmp_path / "out" / "checkpoints").glob("*.pth.tar"))[-1]
    for name in ("cross_entropy", "focal"):
        words = ("MODEL.WEIGHTS", last, "LOSS.NAME", name, "OUT_DIR", tmp_path / name)
        assert evaluate_weights(small_cfg(*words))["loss"] == pytest.approx(evaluated[-1], abs=1e-12)


def test_class_weights_by_the_number_of_images():
    counts = torch.tensor([10, 1000, 0, 1])
    inverse = 1 / torch.tensor([10.0, 1000.0, 1.0])
    expected = inverse / inverse.mean()
    weights = compute_class_weights(counts)
    assert torch.allclose(weights[[0, 1, 3]], expected) and weights[2] == 1
    assert compute_class_weights(torch.zeros(2, dtype=torch.int64)).tolist() == [1.0] * 2


def test_weights_by_name_and_positive_weights(small_cfg, image_folder):
    images = build_images(small_cfg("TRAIN.DATASET", image_folder), train=True)
    names = list(images.classes)
    cfg = small_cfg("LOSS.CLASS_WEIGHTS", f"{{{names[1]}: 3}}")
    assert load_cfg(None, ["LOSS.CLASS_WEIGHTS", cfg.LOSS.CLASS_WEIGHTS]).LOSS.CLASS_WEIGHTS == cfg.LOSS.CLASS_WEIGHTS
    assert build_loss(cfg, images=images).weights.tolist() == [1, 3, 1]
    with pytest.raises(ConfigError, match="LOSS.CLASS_WEIGHTS: names classes that the data lacks: ant1; did you mean"):
        build_loss(small_cfg("LOSS.CLASS_WEIGHTS", "{ant1: 3}"), images=images)
    logits, targets = torch.randn(5, 3), torch.randint(0, 2, (5, 3)).float()
    counts = torch.tensor(np.bincount(images.labels))
    auto = ((len(images) - counts) / counts).tolist()
    rows = ((2, [2.0] * 3), ("[1, 2, 3]", [1.0, 2, 3]), (f"{{{names[0]}: 4}}", [4.0, 1, 1]), ("auto", auto))
    for value, factors in rows:
        loss = build_loss(small_cfg("LOSS.NAME", "bce", "LOSS.POSITIVE_WEIGHT", value), images=images)
        expected = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=torch.tensor(factors))
        assert torch.allclose(loss(logits, targets), expected) and not loss.state_dict()


@pytest.mark.slow
def test_class_weights_from_the_training_labels(small_cfg, tmp_path, monkeypatch):
    for split in ("train", "val"):
        draw_folder(tmp_path / "data", split, {"ant": 16, "bee": 4, "cat": 28})
    words = ("TRAIN.DATASET", tmp_path / "data", "CHECKPOINT.EVERY_STEPS", 1, "LOSS.CLASS_WEIGHTS")
    weights = compute_class_weights(torch.tensor([16, 4, 28])).tolist()
    same, stopped = (small_cfg(*words, number, "OUT_DIR", tmp_path / str(name)) for name, number in
                     (("same", weights), ("stopped", "auto")))  # fmt: skip
    train_model(same)
    train_and_stop(stopped, (1, 2), monkeypatch)
    train_model(stopped)
    assert timeless(stopped.OUT_DIR) == timeless(same.OUT_DIR)
    stored = read_results(tmp_path / "stopped" / "results.json")["training"]["class_weights"]
    assert stored == pytest.approx(weights) and "bee" in (tmp_path / "stopped" / "train.log").read_text()
    assert "class_weights" not in read_results(tmp_path / "same" / "results.json")["training"]


def softmax(values: np.ndarray) -> np.ndarray:
    exps = np.exp(values - values.max(axis=1, keepdims=True))
    return exps / exps.sum(axis=1, keepdims=True)


class Teacher(nn.Module):
    """A model whose logits are the first pixels, and differ in training mode."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = images.flatten(1)[:, :4] * self.weight * 2
        return logits + 100 if self.training else logits


def prepared(cfg, classes) -> Distillation:
    device = torch.device("cpu")
    task = build_task(cfg, tuple(classes), device, Precision())
    task.prepare_training(BatchPlan(4, 1, 1), Dummy(8, 4), num_steps=1)
    return task


def test_the_loss_matches_its_definition(monkeypatch):
    monkeypatch.setattr("distribuuuu.tasks.distillation.build_teacher", lambda cfg, classes: Teacher())
    draw, labels = torch.Generator().manual_seed(0), torch.tensor([0, 3, 1, 1, 2])
    images, logits = torch.randn(5, 3, 2, 2, generator=draw), torch.randn(5, 4, generator=draw) * 3
    student, teacher = (values.detach().double().numpy() for values in (logits, Teacher().eval()(images)))
    options = ("DISTILL.TEACHER", "resnet8", "DISTILL.WEIGHTS", "x", "DISTILL.ALPHA", 0.3)
    for kind, temperature in [("soft", 1.0), ("soft", 4.0), ("hard", 1.0)]:
        own = -np.log(softmax(student))[np.arange(5), labels].mean()
        p, q = softmax(student / temperature), softmax(teacher / temperature)
        of_teacher = temperature**2 * (q * (np.log(q) - np.log(p))).sum(axis=1).mean()
        if kind == "hard":
            of_teacher = -np.log(softmax(student))[np.arange(5), teacher.argmax(1)].mean()
        cfg = make_cfg(*options, "DISTILL.KIND", kind, "DISTILL.TEMPERATURE", temperature)
        loss = prepared(cfg, "abcd").compute_loss(images, logits, labels)
        assert loss.item() == pytest.approx(0.7 * own + 0.3 * of_teacher, rel=1e-5)


def test_a_run_distills_the_weights_of_another_run(finished_run, small_cfg, tmp_path):
    teacher = ("DISTILL.TEACHER", "resnet8", "DISTILL.WEIGHTS", finished_run / "best.pth.tar")
    losses = []
    for alpha in (0.0, 0.9):
        out_dir = tmp_path / f"student_{alpha}"
        train_model(small_cfg(*teacher, "DISTILL.ALPHA", alpha, "OUT_DIR", out_dir, "OPTIM.MAX_EPOCH", 1))
        losses.append([entry["loss"] for entry in records(out_dir) if entry["kind"] == "train"])
    plain = [entry["loss"] for entry in records(finished_run) if entry["kind"] == "train"]
    assert losses[0] == plain[:4] != losses[1]


def test_errors_of_the_teacher_name_the_options_of_distillation(small_cfg, tmp_path):
    for words, said in [
        (("DISTILL.TEACHER", "resnet88"), r"^DISTILL.TEACHER \(command line\): .*resnet88.*did you mean"),
        (("DISTILL.KWARGS.widht", 8), r"^DISTILL.KWARGS.*: resnet8 has no such parameter; did you mean width"),
        ((), r"^DISTILL.WEIGHTS \(command line\): .*does not fit the model"),
        (("DISTILL.WEIGHTS", "pretrained"), "^DISTILL.WEIGHTS .*resnet8 has no published weights"),
        (("DISTILL.WEIGHTS", "pretrained", "DISTILL.TEACHER", "resnet18"), "^DISTILL.WEIGHTS .* has 1,000 classes"),
    ]:  # fmt: skip
        torch.save({"w": torch.ones(1)}, tmp_path / "weights.pth")
        with pytest.raises(ConfigError, match=said):
            prepared(small_cfg("DISTILL.TEACHER", "resnet8", "DISTILL.WEIGHTS", tmp_path / "weights.pth", *words), ())


@pytest.mark.parametrize("name", ["teacher.pth", "pytorch_model.bin"])
def test_a_teacher_with_other_classes_is_rejected(small_cfg, tmp_path, name):
    weights = tmp_path / name
    cfg = small_cfg("DISTILL.TEACHER", "resnet8", "DISTILL.WEIGHTS", weights)
    content = {"state_dict": build_model(cfg).state_dict(), "classes": ["ant", "wasp", "cat"]}
    torch.save(content if name == "teacher.pth" else content["state_dict"], weights)
    card = tmp_path / "config.json"  # of an exported folder
    card.write_text(json.dumps({"distribuuuu": {"classes": content["classes"]}}))
    with pytest.raises(ConfigError, match="^DISTILL.WEIGHTS .*other classes: 'wasp' where the data has 'bee'"):
        prepared(cfg, ("ant", "bee", "cat"))
    prepared(cfg, ("ant", "wasp", "cat"))
    torch.save(content["state_dict"], weights)
    card.write_text("{}")
    prepared(cfg, ("ant", "bee", "cat"))
