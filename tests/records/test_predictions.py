"""predictions.npz: content, and independence of batch sizes and processes."""

import errno
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.commands import command_module
from support.images import write_label_lists
from support.predictions import prediction_arrays
from support.processes import on_processes
from support.tiers import slow

from distribuuuu.data.batch import Batch
from distribuuuu.records import predictions
from distribuuuu.records.predictions import Recorder, write_npz
from distribuuuu.records.read_results import read_results
from distribuuuu.tasks.metrics import StepOutput
from distribuuuu.trainer import evaluate_weights as evaluate_run
from distribuuuu.trainer import train_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def multilabel_options(image_folder, tmp_path_factory):
    """Return the options of a multi-label run of three classes, in which some images have no label."""
    root = write_label_lists(image_folder, tmp_path_factory.mktemp("multilabel"))
    return "TRAIN.DATASET", root, "DATA.NAME", "multilabel", "LOSS.NAME", "bce"


def read(out_dir):
    return command_module("stats.stored_predictions").read_predictions(out_dir / "predictions.npz", "run it")


def test_the_last_evaluation_of_a_run_is_written_image_by_image(finished_run, image_folder):
    content, last = read(finished_run), read_results(finished_run / "results.json")["accuracy"]["raw"]["last"]
    assert content.meta == {"schema": 1, "weights": "raw", "epoch": 2, "folder": str(image_folder), "multilabel": False,
                            "data": "imagefolder"}  # fmt: skip
    files = sorted(str(path.relative_to(image_folder)) for path in (image_folder / "val").rglob("*.jpg"))
    assert content.path.tolist() == files and content.classes == ["ant", "bee", "cat"]
    assert [content.classes[label] for label in content.label] == [name.split("/")[1] for name in files]
    assert 100 * content.correct.mean() == pytest.approx(last["top1"], abs=1e-9)
    assert content.loss.mean() == pytest.approx(last["loss"], rel=1e-6)
    expected = F.cross_entropy(torch.tensor(content.scores), torch.tensor(content.label).long(), reduction="none")
    assert np.allclose(content.loss, expected.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("num", "batch_size", "options"),
    [(1, 1, ()), slow(1, 64, ("DATA.LOADER", "device")), (2, 7, ()), slow(3, 16, ())],
)
def test_the_values_depend_on_neither_batch_size_nor_processes(
    finished_run, small_cfg, tmp_path, num, batch_size, options
):
    weights = ("MODEL.WEIGHTS", finished_run / "best.pth.tar", *options)
    evaluate_run(small_cfg(*weights, "OUT_DIR", tmp_path / "reference"))
    results = on_processes(num, evaluate_run, small_cfg(*weights, "TEST.BATCH_SIZE", batch_size))
    files = [tmp_path / name / "predictions.npz" for name in ("out", "reference")]
    content, other = (read(file.parent) for file in files)
    assert content.path.tolist() == other.path.tolist() and content.label.tolist() == other.label.tolist()
    assert np.allclose(content.scores, other.scores, atol=1e-4) and np.allclose(content.loss, other.loss, atol=1e-4)
    assert content.meta["epoch"] is None
    assert [result["top1"] for result in results] == [pytest.approx(100 * content.correct.mean(), abs=1e-6)] * num


@pytest.mark.parametrize("num", [1, slow(3)])
def test_a_multilabel_run(multilabel_options, small_cfg, tmp_path, num):
    cfg = small_cfg(*multilabel_options, "OPTIM.MAX_EPOCH", 1)
    on_processes(num, train_model, cfg)
    content, last = read(tmp_path / "out"), read_results(tmp_path / "out" / "results.json")["accuracy"]["raw"]["last"]
    assert content.label.shape == content.scores.shape == (37, 3)
    assert content.label.sum(axis=1).tolist()[:4] == [0, 1, 2, 1]
    assert content.loss.mean() == pytest.approx(last["loss"], rel=1e-5)
    assert np.allclose(content.probabilities(), torch.tensor(content.scores).sigmoid(), atol=1e-6)


def fail(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("write_npz", fail, "CANNOT BE WRITTEN"), ("MAX_IMAGES", 36, "is not written for more than 36 images")],
)
def test_a_run_ends_without_predictions(small_cfg, tmp_path, monkeypatch, name, value, message):
    """On a full disk, and with more than a million images."""
    monkeypatch.setattr(predictions, name, value)
    train_model(small_cfg("OPTIM.MAX_EPOCH", 1))
    assert read_results(tmp_path / "out" / "results.json")["finished"]
    assert not (tmp_path / "out" / "predictions.npz").exists()
    assert f"predictions.npz {message}" in (tmp_path / "out" / "train.log").read_text()


def record(logits: torch.Tensor, targets: torch.Tensor, *sizes: int, classes: int = 0) -> dict[str, np.ndarray] | None:
    """Return the arrays of one process, of batches of some sizes, in reverse order."""
    task = SimpleNamespace(classes=range(classes or logits.shape[1]), multilabel=False, classifies=True)
    recorder, index = Recorder(None, task, range(len(logits))), torch.arange(len(logits)).flip(0)
    for part in index.split(sizes or [5, len(logits) - 5]):
        recorder.add(Batch(None, None, part), StepOutput(torch.tensor(0.0), logits[part], targets[part]))
    return recorder.gather(CPU)


def as_file(tmp_path, arrays, num_classes):
    assert arrays.pop("index").tolist() == list(range(len(arrays["loss"])))
    content = prediction_arrays(len(arrays["loss"]), classes=np.array([f"c{n}" for n in range(num_classes)]))
    del content["logits"]
    write_npz(tmp_path / "predictions.npz", {**content, **arrays})
    return read(tmp_path)


def test_large_sets_are_stored_in_half_precision_relative_to_the_largest_logit(tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "MAX_FLOAT32", 100)
    logits, targets = 30 * torch.randn(40, 12) + 9e4, torch.randint(12, (40,))  # beyond the range of float16
    logits[7, 3] = -1e9
    content = as_file(tmp_path, record(logits, targets), 12)
    assert content.scores.dtype == np.float16 and np.isfinite(content.scores).all()
    assert content.predicted.tolist() == logits.argmax(1).tolist()
    assert np.allclose(content.probabilities(), logits.double().softmax(1), atol=1e-3)
    assert np.allclose(content.loss, F.cross_entropy(logits, targets, reduction="none"), rtol=1e-6)


def test_still_larger_sets_keep_the_largest_logits(tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "MAX_FLOAT32", 100)
    monkeypatch.setattr(predictions, "MAX_LOGITS", 100)
    logits, targets = 3 * torch.randn(40, 12), torch.randint(12, (40,))
    content = as_file(tmp_path, record(logits, targets), 12)
    assert content.top_class.shape == content.scores.shape == (40, 10)
    assert content.top_class.tolist() == logits.topk(10).indices.tolist()
    expected = logits.double().softmax(1).topk(10).values
    assert np.allclose(content.probabilities(), expected, atol=1e-3)
    assert np.allclose(content.confidence, expected[:, 0], atol=1e-3)


def test_logits_that_are_not_finite_are_recorded_and_outputs_without_a_column_for_each_class_are_not(tmp_path):
    logits = torch.randn(8, 3)
    logits[2], logits[3, 1] = torch.nan, torch.inf
    content = as_file(tmp_path, record(logits, torch.zeros(8).long()), 3)
    assert np.isnan(content.scores[2]).all() and np.isinf(content.scores[3, 1])
    assert record(torch.zeros(4, 5), torch.zeros(4).long(), 4, classes=3) is None
