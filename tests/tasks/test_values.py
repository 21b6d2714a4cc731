"""A task that does not classify: what it records, predicts and reports, and what cannot be done with it."""

import csv
import json

import numpy as np
import pytest
import torch.nn.functional as F
from PIL import Image
from support.runs import newest, records

import distribuuuu
from distribuuuu.commands.main import dispatch
from distribuuuu.config.registry import DATASETS, TASKS
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.tasks.base import Task
from distribuuuu.tasks.metrics import StepOutput
from distribuuuu.trainer import train_model

AGES = np.linspace(20, 80, 24)


class Faces(ImageDataset):
    num_classes, has_splits, targets, classes = 1, False, "structured", ("age",)

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> ImageDataset:
        return cls()

    def __len__(self) -> int:
        return len(AGES)

    def read(self, index: int) -> np.ndarray:
        return np.full((16, 16, 3), 3 * index, np.uint8)

    def label(self, index: int) -> float:
        return float(AGES[index])


class Age(Task):
    default_metrics = ()

    def train_step(self, model, batch, key) -> StepOutput:
        return self.eval_step(model, batch)

    def eval_step(self, model, batch) -> StepOutput:
        scores = self.predict_step(model, batch.images).float()
        return StepOutput(F.mse_loss(scores[:, 0], batch.targets), scores.detach(), batch.targets)


@pytest.fixture
def run(tmp_path, monkeypatch, small_cfg):
    monkeypatch.setitem(DATASETS._table, "faces", Faces)
    monkeypatch.setitem(TASKS._table, "age", Age)
    cfg = small_cfg("DATA.NAME", "faces", "TASK.NAME", "age", "MODEL.NUM_CLASSES", 1, "OPTIM.BASE_LR", 1e-4)
    train_model(cfg)
    return cfg


def test_scores_and_targets_are_recorded_predicted_and_reported(run, tmp_path, capsys):
    out = tmp_path / "out"
    last = [row for row in records(out) if row["kind"] == "eval"][-1]
    with np.load(out / "predictions.npz") as file:
        scores, targets = file["score"], file["target"]
        assert json.loads(str(file["meta"]))["classifies"] is False and file["classes"].tolist() == ["age"]
    errors = scores[:, 0] - targets
    assert np.allclose(targets, AGES) and (errors**2).mean() == pytest.approx(last["loss"], rel=1e-5)
    images = [Faces().read(index) for index in range(3)]
    found = distribuuuu.load_run(out).predict(images)
    assert [answer.labels for answer in found] == [("age",)] * 3
    assert [answer.probabilities[0] for answer in found] == pytest.approx(scores[:3, 0].tolist(), rel=1e-4)
    files = [str(tmp_path / f"{index}.png") for index in range(2)]
    for file, image in zip(files, images, strict=False):
        Image.fromarray(image).save(file)
    capsys.readouterr()
    assert dispatch("distribuuuu", ["predict", str(out), *files]) == 0
    rows = [[file, f"{answer.probabilities[0]:.12g}"] for file, answer in zip(files, found, strict=False)]
    assert list(csv.reader(capsys.readouterr().out.splitlines())) == [["path", "age"], *rows]
    assert dispatch("distribuuuu", ["report", str(out), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mean absolute error"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    assert report["values"][0]["target"] in AGES and "accuracy" not in report
    assert (
        dispatch("distribuuuu", ["report", str(out)]) == 0
        and "mean absolute error" in (out / "report.html").read_text()
    )
    train_model(run)  # resumes: nothing is left
    assert newest(out)["epoch"] == 1
