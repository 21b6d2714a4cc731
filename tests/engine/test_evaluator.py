"""Evaluation: views, images that cannot be read, precise batch norm, early stopping, and memory that runs out."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import command_module
from support.failing_models import Idle, hungry
from support.processes import on_processes
from support.runs import FAILING_MODELS, TRAIN_NET, newest, run_tool, small_options, train_and_kill, train_and_read
from support.tables import slow
from torch import nn

from distribuuuu import trainer
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.config.registry import MODELS
from distribuuuu.distributed.process_group import process_group
from distribuuuu.engine.out_of_memory import OutOfMemory, is_out_of_memory
from distribuuuu.engine.precise_bn import compute_precise_statistics
from distribuuuu.launch.detect import detect_launch
from distribuuuu.optim.precision import Precision
from distribuuuu.tasks.base import build_task
from distribuuuu.trainer import evaluate_weights, train_model


def test_the_logits_of_shifted_images_count_half(small_cfg):
    images = torch.arange(2 * 3 * 5 * 6.0).view(2, 3, 5, 6)
    padded = torch.from_numpy(np.pad(images.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), mode="reflect"))
    views = images, padded[..., :5, :6], padded[..., 4:, 4:]
    model = lambda view: view[:, :, 1, 2] ** 2  # noqa: E731
    for flip in (False, True):
        task = build_task(small_cfg("TEST.SHIFT", 2, "TEST.FLIP", flip), [*"abc"], torch.device("cpu"), Precision())
        plain = [(model(view) + model(view.flip(-1))) / 2 if flip else model(view) for view in views]
        expected = plain[0] / 2 + (plain[1] + plain[2]) / 4
        torch.testing.assert_close(task.predict_step(model, images), expected)


@pytest.mark.parametrize("num", [1, slow(2)])
@pytest.mark.parametrize("answer", ["wrong", "left_out"])
def test_a_broken_image_counts_as_wrong_or_is_left_out(finished_run, image_folder, small_cfg, tmp_path, answer, num):
    weights = ("MODEL.WEIGHTS", finished_run / "best.pth.tar", "TEST.METRICS", "[top1, macro_recall, map]")
    evaluate_weights(small_cfg(*weights, "OUT_DIR", tmp_path / "whole"))
    broken = ["ant/000.jpg", "bee/003.jpg"]  # the first one is alone in its batch
    shutil.copytree(image_folder, tmp_path / "data")
    for name in broken:
        (tmp_path / "data" / "val" / name).write_bytes(b"damaged")
    words = ("TEST.DATASET", tmp_path / "data", "TEST.BATCH_SIZE", 1, "DATA.ON_BAD_IMAGE", "skip")
    result = on_processes(num, evaluate_weights, small_cfg(*weights, *words, "TEST.BROKEN", answer))[0]
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


def make_net(**norm) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, **norm), nn.Dropout(0.5), nn.ReLU(), nn.BatchNorm2d(6))


def whole_set() -> torch.Tensor:
    return torch.randn(37, 3, 7, 7, generator=torch.Generator().manual_seed(2)) * 3 + 1


def statistics_of_a_share() -> torch.Tensor:
    net, launch = make_net(), detect_launch()
    with process_group(launch, torch.device("cpu"), 60):
        compute_precise_statistics(net, whole_set()[launch.rank :: launch.world_size].split(5))
    return torch.stack([net[1].running_mean, net[1].running_var])


def test_the_images_of_all_processes_count():
    inputs = make_net()[0](whole_set())
    expected = torch.stack([inputs.mean((0, 2, 3)), inputs.var((0, 2, 3))])
    for share in (*on_processes(1, statistics_of_a_share), *on_processes(3, statistics_of_a_share)):
        torch.testing.assert_close(share, expected, rtol=1e-5, atol=1e-5)


def test_a_layer_that_the_task_keeps_in_evaluation_mode_keeps_its_statistics():
    net = make_net()
    before = net[1].running_mean.clone()
    compute_precise_statistics(net, whole_set().split(5), train_mode=lambda net: net.train() and net[1].eval())
    assert torch.equal(net[1].running_mean, before) and not torch.equal(net[4].running_mean, before)


@pytest.mark.slow
def test_a_run_evaluates_and_saves_precise_statistics(small_cfg, tmp_path):
    words = ("EMA.HALF_LIFE", 50, "OPTIM.MAX_EPOCH", 1, "MODEL.PRECISE_BN")
    moving, precise = (train_and_read(small_cfg(*words, num, "OUT_DIR", tmp_path / str(num))) for num in (0, 48))
    # The weights are the same: training normalizes by the batch.
    assert torch.equal(moving["state_dict"]["fc.weight"], precise["state_dict"]["fc.weight"])
    names = [name for name in precise["state_dict"] if name.endswith("running_var")]
    for key in ("state_dict", "ema_state_dict"):
        assert names and not any(torch.equal(moving[key][name], precise[key][name]) for name in names)


PATIENT = ("OPTIM.MAX_EPOCH", 9, "TRAIN.PATIENCE", 2, "CHECKPOINT.EVERY_STEPS", 1, "CHECKPOINT.KEEP_LAST", 99)
VALUES = [50, 60, 60, 70, 70, 10, 99, 99, 99]


@pytest.fixture
def scripted(monkeypatch):
    """Replace the evaluation's top-1 by VALUES after the epochs."""
    evaluate = trainer.evaluate
    script = lambda task, *args: {**evaluate(task, *args), "top1": VALUES[task.state.epoch]}  # noqa: E731
    monkeypatch.setattr(trainer, "evaluate", script)


def results(out_dir) -> dict:
    return json.loads((Path(out_dir) / "results.json").read_text())


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(("words", "epochs"), [
    slow((), 6), (("TRAIN.PATIENCE", 1), 3), slow(("TRAIN.PATIENCE", 3), 9), slow(("TRAIN.PATIENCE", 0), 9),
    slow(("TRAIN.EVAL_PERIOD", 2), 6), slow(("EMA.HALF_LIFE", 40), 6),
])  # fmt: skip
def test_a_run_ends_after_the_epochs_without_a_better_value(small_cfg, words, epochs):
    cfg = small_cfg(*PATIENT, "TRAIN.BATCH_SIZE", 24, "CHECKPOINT.EVERY_STEPS", 0, *words)
    train_model(cfg)
    found, log = results(cfg.OUT_DIR), (Path(cfg.OUT_DIR) / "train.log").read_text()
    assert found["finished"] and found["training"]["epochs_done"] == epochs
    assert found["training"].get("ended_early", False) == (epochs < 9)
    assert (f"Early stopping at epoch {epochs}/9: top1 has not improved" in log) == (epochs < 9)
    assert (Path(cfg.OUT_DIR) / "predictions.npz").exists() and found["weights_sha256"]
    train_model(cfg)
    log = (Path(cfg.OUT_DIR) / "train.log").read_text()
    assert f"nothing to train: {epochs} epochs finished" in log and results(cfg.OUT_DIR) == found


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("place", [(4, 4), (5, 2), (5, 4)])
def test_a_killed_run_ends_at_the_same_epoch_bitwise(small_cfg, tmp_path, place):
    whole = small_cfg(*PATIENT, "OUT_DIR", tmp_path / "whole")
    train_model(whole)
    cfg = small_cfg(*PATIENT)
    train_and_kill(cfg, place)
    train_model(cfg)
    ours, theirs = newest(cfg.OUT_DIR), newest(whole.OUT_DIR)
    assert ours["epoch"] == theirs["epoch"] == 5 and results(cfg.OUT_DIR)["training"]["ended_early"]
    assert all(ours["state_dict"][name].equal(value) for name, value in theirs["state_dict"].items())


CPU_SAID = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"
TRAINING = r"a smaller TRAIN.BATCH_SIZE .*MODEL.ACT_CHECKPOINT.*TRAIN.AMP.*fsdp"


class HungryInEvaluation(Idle):
    """A net whose evaluation of more than one image fails for want of memory."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) if self.training or len(images) == 1 else torch.empty(2**52)


@pytest.fixture(autouse=True)
def hungry_models(monkeypatch):
    assert "resnet8" in MODELS
    monkeypatch.setitem(MODELS._table, "hungry", hungry)
    monkeypatch.setitem(MODELS._table, "hungry_in_evaluation", HungryInEvaluation)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--nproc", 2, "MODEL.KWARGS.rank", 1)], ids=["alone", "one of two"])
def test_a_step_that_runs_out_of_memory_ends_the_run_with_one_message(image_folder, tmp_path, words):
    hungry = ("MODEL.ARCH", "hungry", "CHECKPOINT.EVERY_STEPS", 2, "TRAIN.GLOBAL_BATCH_SIZE", 12)
    words = [*words, *small_options(image_folder, tmp_path / "out", *hungry)]
    done = run_tool(FAILING_MODELS, TRAIN_NET, *words)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.count("out of memory") == 1
    assert re.search(f"out of memory: hungry, process .*{TRAINING}", done.stderr)
    assert CPU_SAID in done.stderr
    assert (tmp_path / "out" / "train.log").read_text().count("out of memory") == 1
    newest = CheckpointManager(tmp_path / "out").find_latest()
    if words[0] == "--nproc":  # the main process, asked to end, gives its save two seconds
        assert newest.name in ("ckpt_ep_000_step_000001.pth.tar", "ckpt_ep_000_step_000002.pth.tar")
    else:
        assert newest.name == "ckpt_ep_000_step_000002.pth.tar", "a save that was under way is whole"


def test_an_evaluation_says_so_and_the_epoch_is_kept(small_cfg):
    cfg = small_cfg("MODEL.ARCH", "hungry_in_evaluation")
    said = r"memory: \w+, process 0 on .*TEST.BATCH_SIZE"
    with pytest.raises(OutOfMemory, match=said):
        train_model(cfg)
    (saved,) = CheckpointManager(cfg.OUT_DIR).list()
    assert saved.name == "ckpt_ep_000_step_000004.pth.tar"
    with pytest.raises(OutOfMemory, match=said):
        evaluate_weights(small_cfg("MODEL.ARCH", "hungry_in_evaluation", "MODEL.WEIGHTS", saved))


@pytest.mark.parametrize(("error", "is_one"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True), (MemoryError(), True),
    (RuntimeError("CUDA error: out of memory"), True), (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False), (ValueError("out of memory"), False),
])  # fmt: skip
def test_what_counts_as_out_of_memory(error, is_one):
    assert is_out_of_memory(error) is is_one
