"""Evaluation: views of shifted images, and images that cannot be read."""

import json
import shutil

import numpy as np
import pytest
import torch
from support.commands import command_module
from support.processes import on_processes
from support.tiers import slow

from distribuuuu.optim.precision import Precision
from distribuuuu.tasks.base import build_task
from distribuuuu.trainer import evaluate_weights as evaluate_run

CPU = torch.device("cpu")


def test_the_logits_of_shifted_images_count_half(small_cfg):
    images = torch.arange(2 * 3 * 5 * 6.0).view(2, 3, 5, 6)
    padded = torch.from_numpy(np.pad(images.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), mode="reflect"))
    views = images, padded[..., :5, :6], padded[..., 4:, 4:]
    model = lambda view: view[:, :, 1, 2] ** 2  # noqa: E731
    for flip in (False, True):
        task = build_task(small_cfg("TEST.SHIFT", 2, "TEST.FLIP", flip), ("a", "b", "c"), CPU, Precision())
        plain = [(model(view) + model(view.flip(-1))) / 2 if flip else model(view) for view in views]
        expected = plain[0] / 2 + (plain[1] + plain[2]) / 4
        torch.testing.assert_close(task.predict_step(model, images), expected)


def write_broken(image_folder, folder, *names: str) -> list[str]:
    """Copy the images to a folder, some of them damaged; return the options that evaluate them."""
    shutil.copytree(image_folder, folder)
    for name in names:
        (folder / "val" / name).write_bytes(b"damaged")
    return ["TEST.DATASET", str(folder), "DATA.ON_BAD_IMAGE", "skip"]


@pytest.mark.parametrize("num", [1, slow(2)])
@pytest.mark.parametrize("answer", ["wrong", "left_out"])
def test_a_broken_image_counts_as_wrong_or_is_left_out(finished_run, image_folder, small_cfg, tmp_path, answer, num):
    weights = ("MODEL.WEIGHTS", finished_run / "best.pth.tar", "TEST.METRICS", "[top1, macro_recall, map]")
    evaluate_run(small_cfg(*weights, "OUT_DIR", tmp_path / "whole"))
    broken = ["ant/000.jpg", "bee/003.jpg"]  # the first one is alone in its batch
    words = write_broken(image_folder, tmp_path / "data", *broken)
    cfg = small_cfg(*weights, *words, "TEST.BROKEN", answer, "TEST.BATCH_SIZE", 1)
    result = on_processes(num, evaluate_run, cfg)[0]
    read = command_module("stats.stored_predictions").read_predictions
    whole, content = (read(tmp_path / name / "predictions.npz", "") for name in ("whole", "out"))
    rows = {path: row for row, path in enumerate(content.path)}
    for row, path in enumerate(whole.path):
        name = path.removeprefix("val/")
        assert (path in rows) == (name not in broken or answer == "wrong")
        if path in rows:
            assert content.label[rows[path]] == whole.label[row]
            assert name in broken or np.allclose(content.scores[rows[path]], whole.scores[row], atol=1e-5)
            assert name not in broken or not content.correct[rows[path]]
    assert result["count"] == len(content) and result["broken"] == 2
    assert result["top1"] == pytest.approx(100 * content.correct.mean())
    stored = json.loads((tmp_path / "out" / "test_results.json").read_text())
    assert stored["accuracy"]["raw"]["broken"] == 2
    assert "2 images of the evaluation cannot be read and" in (tmp_path / "out" / "test.log").read_text()
