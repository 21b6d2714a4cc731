"""Tasks of a user: state, gradients in parts, stages, any outputs, and scores for predictions."""

import contextlib
import csv
import dataclasses
import json
import re
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.processes import on_processes
from support.runs import ROOT, assert_same_run, newest, records, train_and_kill
from support.tables import slow
from torch import nn

import distribuuuu
from distribuuuu import load_run
from distribuuuu.checkpoint.manager import hash_tensors
from distribuuuu.commands.main import dispatch
from distribuuuu.config import ConfigError
from distribuuuu.config.registry import DATASETS, LOSSES, TASKS
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.distributed import comm
from distribuuuu.tasks.base import StepKey
from distribuuuu.tasks.classification import Classification
from distribuuuu.trainer import evaluate_weights, train_model


@pytest.fixture
def register(monkeypatch):
    """Return a decorator that registers a task or a loss under its own name for the length of the test."""

    def add(entry):
        registry = LOSSES if issubclass(entry, nn.Module) else TASKS
        monkeypatch.setitem(registry._table, entry.__name__, entry)
        return entry

    return add


def log_of(out_dir: Path) -> str:
    return (out_dir / "train.log").read_text()


class Centered(Classification):
    """Pulls the logits to their running mean, which is state, as the center of DINO is."""

    width = 3

    def prepare_training(self, plan, images, num_steps):
        super().prepare_training(plan, images, num_steps)
        self.center, self.num_seen, self.generator = torch.zeros(self.width), 0, torch.Generator().manual_seed(5)
        self.of_rank = torch.full((2,), float(comm.rank()))

    def train_step(self, model, batch, key):
        output = super().train_step(model, batch, key)
        self.num_seen += len(batch.images)
        self.of_rank += 1
        self.center = 0.9 * self.center + 0.1 * output.logits.float().mean(0)[: self.width]
        noise = torch.rand((), generator=self.generator)
        output.loss = output.loss * (1 + 0.1 * noise + 0.01 * self.center.abs().sum())
        return output

    def state_dict(self):
        own = {"num_seen": self.num_seen, "generator": self.generator.get_state()}
        return {**super().state_dict(), **own}

    def rank_state_dict(self):
        return {"center": self.center, "of_rank": self.of_rank}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.center, self.num_seen, self.of_rank = state["center"], state["num_seen"], state["of_rank"]
        self.generator.set_state(state["generator"])


def test_a_task_or_a_metric_that_no_graph_can_hold_is_refused_with_static_steps(register, small_cfg, tmp_path):
    @register
    class Own(Classification):
        capturable, passes = False, [{}]

        def train_step(self, *arguments):
            Own.steps = vars(self).setdefault("steps", [torch.zeros(())])
            Own.steps[0].add_(1)
            return super().train_step(*arguments)

        def update(self, step):
            for options in Own.passes:
                step.gradients(**options)
            Own.has_gradients = self.state.model.fc.bias.grad is not None
            step.apply()
            self.state.model.fc.bias.data.add_(torch.randn(3))

    own = ("TASK.NAME", "Own", "OPTIM.MAX_EPOCH", 1, "EMA.HALF_LIFE", 30)
    for words, said in ((own, "Own, which does not"), (("TRAIN.METRICS", "[map]"), "the metric map"),
                        (own, "a task that computes gradients several times")):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"MODEL.COMPILE \(command line\): got step with {said}"):
            train_model(small_cfg("MODEL.COMPILE", "step", *words))
        Own.capturable, Own.gradient_passes = True, 2
    Own.gradient_passes = 1
    for Own.passes in ([{"in_metrics": False}], [{}, {}]):
        with pytest.raises(ConfigError, match=r"MODEL.COMPILE .*with a task that calls step.gradients twice or"):
            train_model(small_cfg("MODEL.COMPILE", "step", *own))
    Own.passes = [{}]
    for mode in ("none", "step"):
        train_model(small_cfg(*own, "MODEL.COMPILE", mode, "OUT_DIR", tmp_path / mode))
        assert Own.steps == [4] and Own.has_gradients == (mode == "none"), "in a graph they are computed by `apply`"
    assert_same_run(tmp_path / "none", tmp_path / "step")
    assert len({hash_tensors(newest(tmp_path / mode)["ema_state_dict"]) for mode in ("none", "step")}) == 1
    assert re.search(r"\(waiting for data \d+%, step \d+%\)", log_of(tmp_path / "step"))


def test_the_state_of_a_task_is_restored(register, small_cfg, tmp_path):
    register(Centered)
    words = ("TASK.NAME", "Centered", "CHECKPOINT.EVERY_STEPS", 2, "CHECKPOINT.KEEP_LAST", 20)
    train_model(small_cfg(*words))
    (tmp_path / "out").rename(tmp_path / "whole")
    assert newest(tmp_path / "whole")["task"]["shared"]["num_seen"] == 96
    train_model(small_cfg(*words), stop_epoch=1)
    for path in sorted((tmp_path / "out" / "checkpoints").iterdir())[3:]:
        path.unlink()  # resume in the middle of the first epoch
    train_model(small_cfg(*words))
    assert_same_run(tmp_path / "out", tmp_path / "whole")
    assert len({hash_tensors(newest(tmp_path / name)["task"]) for name in ("out", "whole")}) == 1


def test_a_state_that_differs_in_names_or_shapes_is_refused(register, small_cfg, monkeypatch):
    register(Centered)
    train_model(small_cfg("TASK.NAME", "Centered"), stop_epoch=1)
    monkeypatch.setattr(Centered, "width", 2)
    with pytest.raises(ConfigError, match=r"state of the task differs: center is .*\(3,\); expected .*\(2,\); fix:"):
        train_model(small_cfg("TASK.NAME", "Centered"))
    with pytest.raises(ConfigError, match="state of the task differs: num_seen is unknown"):
        train_model(small_cfg())


@pytest.mark.slow
def test_entries_that_differ_between_processes_are_saved_for_each(register, small_cfg, tmp_path):
    register(Centered)
    cfg = small_cfg("TASK.NAME", "Centered", "TRAIN.BATCH_SIZE", 6)
    on_processes(2, train_model, cfg, 1)
    saved = newest(tmp_path / "out")["task"]
    assert {*saved["by_rank"][0]} == {"of_rank", "center"} and "num_seen" in saved["shared"]
    assert [part["of_rank"].tolist() for part in saved["by_rank"]] == [[4, 4], [5, 5]]
    on_processes(2, train_model, cfg, 2)
    assert [part["of_rank"].tolist() for part in newest(tmp_path / "out")["task"]["by_rank"]] == [[8, 8], [9, 9]]
    train_model(small_cfg("TASK.NAME", "Centered", "OPTIM.MAX_EPOCH", 3))
    assert "written by 2 processes; all continue with the state of the first one: " in log_of(tmp_path / "out")


@pytest.mark.parametrize("is_equal", [True, slow(False)])
def test_what_update_draws_is_equal_on_all_processes_and_other_replicas_end_the_run(register, small_cfg, is_equal):
    class Noisy(Classification):
        def update(self, step):
            step.gradients()
            for weight in self.state.model.parameters():
                weight.grad.add_(torch.randn_like(weight), alpha=0.1 if is_equal else 0.1 * comm.rank())
            step.apply()

    register(Noisy)
    cfg = small_cfg("TASK.NAME", "Noisy", "TRAIN.BATCH_SIZE", 6, "OPTIM.MAX_EPOCH", 1)
    said = r"trained different models: .* is [\d.]+ on process 0 and [\d.]+ on process 1; fix: make what `Task.update`"
    with contextlib.nullcontext() if is_equal else pytest.raises(AssertionError, match=said):
        on_processes(2, train_model, cfg)


@pytest.mark.slow
def test_statistics_that_a_task_uses_are_restored_on_each_process(register, small_cfg, tmp_path):
    class Consistent(Classification):
        def train_step(self, model, batch, key):
            output, net = super().train_step(model, batch, key), self.state.model
            with torch.no_grad():
                share = net.eval()(batch.images).softmax(1).amax(1).mean()
            net.train()
            return dataclasses.replace(output, loss=output.loss * share)

    register(Consistent)
    words = ("TASK.NAME", "Consistent", "TRAIN.BATCH_SIZE", 6, "CHECKPOINT.EVERY_STEPS", 1, "OPTIM.MAX_EPOCH", 1)
    on_processes(2, train_model, small_cfg(*words, "OUT_DIR", tmp_path / "whole"))
    on_processes(2, train_and_kill, small_cfg(*words), (0, 2))
    on_processes(2, train_model, small_cfg(*words))
    assert_same_run(tmp_path / "out", tmp_path / "whole")


UNREADABLE = {
    "array": np.zeros(3), "deque": deque([1]), "sparse": torch.eye(3).to_sparse(), "long": [0] * 600_000,
    "pair": StepKey(0, 0, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("num, name", [*((1, name) for name in UNREADABLE if name != "long"), slow(2, "long")])
def test_a_value_that_a_checkpoint_cannot_hold_is_refused_before_the_first_step(register, small_cfg, num, name):
    value = UNREADABLE[name]

    class Holding(Classification):
        def rank_state_dict(self):
            return {"held": {"rows": [value if comm.rank() == num - 1 else 0]}}

    register(Holding)
    cfg, said = small_cfg("TASK.NAME", "Holding", "TRAIN.BATCH_SIZE", 6), "TASK.NAME: Holding.state_dict: a checkpoint"
    with pytest.raises((ConfigError, AssertionError), match=f"{said} cannot hold the state .*; fix: save"):
        train_model(cfg) if num == 1 else on_processes(num, train_model, cfg)
    assert not (Path(cfg.OUT_DIR) / "checkpoints").exists()


def test_skipped_steps_are_counted_and_keep_their_images(register, small_cfg, tmp_path):
    class Skipping(Classification):
        def update(self, step):
            if self.state.step % 2:
                return
            step.gradients()
            if self.state.step:
                step.apply()

        def train_step(self, model, batch, key):
            seen.append((key.epoch, key.step, batch.targets.tolist()))
            return super().train_step(model, batch, key)

    seen, all_seen = [], []
    register(Skipping)
    train_model(small_cfg("TASK.NAME", "Skipping", "TRAIN.PRINT_FREQ", 2))
    first = seen.copy()
    rows = [entry["skipped_steps"] for entry in records(tmp_path / "out") if entry["kind"] == "train"]
    assert rows == [2, 3, 5, 6] and newest(tmp_path / "out")["num_skipped"] == 6
    assert "the task applied no gradients in 6 of 8 steps" in log_of(tmp_path / "out")
    train_model(small_cfg("TASK.NAME", "Skipping", "TRAIN.PRINT_FREQ", 1, "OUT_DIR", str(tmp_path / "each")))
    rows = [(entry["epoch"], entry["step"]) for entry in records(tmp_path / "each") if entry["kind"] == "train"]
    assert rows == [(1, 1), (1, 3), (2, 1), (2, 3)]  # a step without images has no row
    (tmp_path / "out").rename(tmp_path / "skipping")
    Skipping.update, all_seen = Classification.update, first
    seen.clear()
    train_model(small_cfg("TASK.NAME", "Skipping"))
    assert all_seen == [entry for entry in seen if entry[1] % 2 == 0]


class Prototypes(Classification):
    """The nearest class mean. An evaluation needs the means, the number of images is of the training alone."""

    num_columns = 3

    def __init__(self, *args):
        super().__init__(*args)
        self.means = torch.zeros(3, self.num_columns)

    def prepare_training(self, plan, images, num_steps):
        super().prepare_training(plan, images, num_steps)
        self.num_seen = 0

    def train_step(self, model, batch, key):
        output = super().train_step(model, batch, key)
        self.num_seen += len(batch.images)
        for label in batch.targets.unique():
            self.means[label] = 0.9 * self.means[label] + output.logits[batch.targets == label].mean(0)
        return output

    def predict_step(self, model, images):
        return -torch.cdist(super().predict_step(model, images), self.means)

    def state_dict(self):
        return {"means": self.means, **({"num_seen": self.num_seen} if hasattr(self, "num_seen") else {})}

    def load_state_dict(self, state):
        self.means = state["means"]
        if "num_seen" in state:
            self.num_seen = state["num_seen"]


def test_evaluation_and_prediction_use_the_state_of_a_task(register, small_cfg, tmp_path, monkeypatch, capfd, caplog):
    register(Prototypes)
    cfg = small_cfg("TASK.NAME", "Prototypes", "OPTIM.MAX_EPOCH", 1)
    train_model(cfg)
    best, saved = tmp_path / "out" / "best.pth.tar", newest(tmp_path / "out")["task"]["shared"]
    (trained,) = [entry for entry in records(tmp_path / "out") if entry["kind"] == "eval"]
    tested = evaluate_weights(cfg)
    assert {name: tested[name] for name in ("loss", "top1")} == {name: trained[name] for name in ("loss", "top1")}
    run = load_run(tmp_path / "out")
    assert saved["means"].any() and torch.equal(run.task.means, saved["means"])
    assert saved["num_seen"] == 48 and not hasattr(run.task, "num_seen")
    assert "task state" not in capfd.readouterr().err
    torch.save({name: value for name, value in torch.load(best, weights_only=True).items() if name != "task"}, best)
    assert not load_run(tmp_path / "out").task.means.any()
    assert f"{best} has no task state; the task is re-initialized: means" in capfd.readouterr().err + caplog.text
    monkeypatch.setattr(Prototypes, "num_columns", 2)
    torch.save({**torch.load(best, weights_only=True), "task": {"shared": saved}}, best)
    with pytest.raises(ConfigError, match=r"state of the task differs: means is .*\(3, 3\); expected .*\(3, 2\)"):
        evaluate_weights(cfg)


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


@pytest.fixture
def run(tmp_path, monkeypatch, small_cfg):
    monkeypatch.setitem(DATASETS._table, "faces", Faces)
    example = ("PLUGINS", [str(ROOT / "docs" / "examples" / "regression.py")], "TASK.NAME", "regression")
    cfg = small_cfg(*example, "DATA.NAME", "faces", "MODEL.NUM_CLASSES", 1, "OPTIM.BASE_LR", 1e-4)
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
    assert dispatch("distribuuuu", ["report", str(out)]) == 2
    assert "is of a task that does not classify; expected predictions of classes" in capsys.readouterr().err
    train_model(run)  # resumes: nothing is left
    assert newest(out)["epoch"] == 1
