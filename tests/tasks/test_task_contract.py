"""Tasks of a user: state, gradients in parts, stages, any outputs, and scores for predictions."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.processes import on_processes
from support.runs import GROUP_NORM, assert_close, assert_same_run, newest, records
from torch import nn

from distribuuuu import load_run
from distribuuuu.config import ConfigError
from distribuuuu.config.registry import LOSSES, TASKS
from distribuuuu.distributed import comm
from distribuuuu.engine.task_state import digest
from distribuuuu.tasks.base import Task
from distribuuuu.tasks.classification import Classification
from distribuuuu.tasks.losses import CrossEntropy
from distribuuuu.tasks.metrics import StepOutput
from distribuuuu.trainer import test_model as evaluate_run
from distribuuuu.trainer import train_model


@pytest.fixture
def register(monkeypatch):
    """Return a decorator that registers a task or a loss under its own name for the length of the test."""
    for registry, name in ((TASKS, "distillation"), (LOSSES, "focal")):
        registry.get(name)  # imports the modules of the package, which register their entries once
        monkeypatch.setattr(registry, "_table", dict(registry._table))
    return lambda entry: (LOSSES if issubclass(entry, nn.Module) else TASKS).register(entry)


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
        output.loss = (
            output.loss * (1 + 0.1 * noise) + 0 * self.center.sum() + 0.01 * self.center.abs().sum() * output.loss
        )
        return output

    def state_dict(self):
        own = {"center": self.center, "num_seen": self.num_seen, "generator": self.generator.get_state()}
        return {**super().state_dict(), **own, "of_rank": self.of_rank}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.center, self.num_seen, self.of_rank = state["center"], state["num_seen"], state["of_rank"]
        self.generator.set_state(state["generator"])


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
    assert digest(newest(tmp_path / "out")["task"]) == digest(newest(tmp_path / "whole")["task"])
    assert "is not in the state" not in log_of(tmp_path / "out")


def test_a_state_that_differs_in_names_or_shapes_is_refused(register, small_cfg, monkeypatch):
    register(Centered)
    train_model(small_cfg("TASK.NAME", "Centered"), stop_epoch=1)
    monkeypatch.setattr(Centered, "width", 2)
    with pytest.raises(ConfigError, match=r"state of the task differs: center has shape \(3,\); expected \(2,\); fix:"):
        train_model(small_cfg("TASK.NAME", "Centered"))
    with pytest.raises(ConfigError, match="state of the task differs: center is unknown"):
        train_model(small_cfg())


@pytest.mark.parametrize(
    "entry", ["text", [1], {}, {"shared": 3}, {"shared": {}, "by_rank": 1}, {"shared": {}, "by_rank": ["x"]}]
)
def test_a_damaged_state_is_refused(register, small_cfg, tmp_path, entry):
    register(Centered)
    train_model(small_cfg("TASK.NAME", "Centered"), stop_epoch=1)
    (path,) = (tmp_path / "out" / "checkpoints").iterdir()
    torch.save({**torch.load(path, weights_only=True), "task": entry}, path)
    with pytest.raises(ConfigError, match="the entry task is damaged"):
        train_model(small_cfg("TASK.NAME", "Centered"))


def train_on_two(cfg, stop_epoch=None):
    train_model(cfg, stop_epoch)


def test_entries_that_differ_between_processes_are_saved_for_each(register, small_cfg, tmp_path):
    register(Centered)
    cfg = small_cfg("TASK.NAME", "Centered", "TRAIN.BATCH_SIZE", 6)
    on_processes(2, train_on_two, cfg, 1)
    saved = newest(tmp_path / "out")["task"]
    assert {*saved["by_rank"][0]} == {"of_rank", "center"} and "num_seen" in saved["shared"]
    assert [part["of_rank"].tolist() for part in saved["by_rank"]] == [[4, 4], [5, 5]]
    on_processes(2, train_on_two, cfg, 2)
    assert [part["of_rank"].tolist() for part in newest(tmp_path / "out")["task"]["by_rank"]] == [[8, 8], [9, 9]]
    train_model(small_cfg("TASK.NAME", "Centered", "OPTIM.MAX_EPOCH", 3))
    assert "written by 2 processes; all continue with the state of the first one: " in log_of(tmp_path / "out")


def test_attributes_that_change_and_are_not_saved_are_named(register, small_cfg, tmp_path):
    class Queue:
        def __init__(self):
            self.rows = [0]

    class Forgetful(Centered):
        transient = ("last_loss",)

        def prepare_training(self, *args):
            super().prepare_training(*args)
            self.num_steps_done, self.queue, self.noise, self.constant = 0, Queue(), np.random.default_rng(1), [1]
            self.teacher, self.last_loss = nn.Linear(2, 2), None

        def begin_epoch(self, epoch):
            self.margin = 0.5 * epoch

        def train_step(self, model, batch, key):
            output = super().train_step(model, batch, key)
            self.num_steps_done += 1
            self.queue.rows.append(key.step)
            self.noise.random()
            self.last_loss = output.loss.detach()
            with torch.no_grad():
                self.teacher.bias.add_(1)
            return output

    register(Forgetful)
    train_model(small_cfg("TASK.NAME", "Forgetful", "CHECKPOINT.EVERY_STEPS", 2))
    (warning,) = (line for line in log_of(tmp_path / "out").splitlines() if "is not in the state" in line)
    named = warning.partition("TASK.NAME: ")[2].partition(" changes")[0].split(", ")
    assert sorted(named) == ["noise", "num_steps_done", "queue.rows", "teacher.bias"]


class Sam(Classification):
    """Sharpness-aware minimization (Foret et al., arXiv 2010.01412)."""

    gradient_passes = 2

    def update(self, compute_gradients, apply_gradients):
        compute_gradients()
        weights = [weight for weight in self.state.model.parameters() if weight.grad is not None]
        norm = nn.utils.get_total_norm([weight.grad for weight in weights])
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            torch._foreach_add_(weights, [weight.grad * (0.05 / norm) for weight in weights])
        compute_gradients(in_metrics=False)
        with torch.no_grad():
            torch._foreach_copy_(weights, before)
        apply_gradients()


def sam_by_hand(model: nn.Module, images: torch.Tensor, targets: torch.Tensor, lr: float) -> None:
    """One step as in the authors' rule: w - lr * gradient at w + rho * g / |g|."""
    weights = list(model.parameters())
    grads = torch.autograd.grad(F.cross_entropy(model(images), targets), weights)
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for weight, grad in zip(moved.parameters(), grads, strict=True):
            weight += 0.05 * grad / norm
    grads = torch.autograd.grad(F.cross_entropy(moved(images), targets), list(moved.parameters()))
    with torch.no_grad():
        for weight, grad in zip(weights, grads, strict=True):
            weight -= lr * grad


@pytest.mark.parametrize("num, accum, aug", [(1, 1, ()), (1, 3, ()), (2, 1, ()), (1, 1, ("AUG.MIXUP", 0.5))])
def test_two_passes_over_a_batch_give_sharpness_aware_minimization(register, small_cfg, tmp_path, num, accum, aug):
    seen = {}

    class Recorded(Sam):
        def adapt_model(self, model):
            model.register_forward_pre_hook(lambda module, args: (args[0].double(),))
            return model.double()

        def prepare_batch(self, batch, key):
            batch = super().prepare_batch(batch, key)
            seen.setdefault(key.step, []).append((batch.images.clone(), batch.targets.clone()))
            return batch

        def update(self, compute_gradients, apply_gradients):
            seen.setdefault("initial", copy.deepcopy(self.state.model))
            super().update(compute_gradients, apply_gradients)

    register(Recorded)
    words = ("TASK.NAME", "Recorded", *GROUP_NORM, "OPTIM.MOMENTUM", 0, "OPTIM.WEIGHT_DECAY", 0, "OPTIM.MAX_EPOCH", 1,
             "OPTIM.WARMUP_EPOCHS", 0, "OPTIM.NESTEROV", False, "TRAIN.BATCH_SIZE", 12 // num // accum,
             "TRAIN.GLOBAL_BATCH_SIZE", 12, *aug)  # fmt: skip
    cfg = small_cfg(*words)
    if num == 1:
        train_model(cfg)
        reference = seen.pop("initial").train()
        for step in range(4):
            images, targets = (torch.cat(parts) for parts in zip(*seen[step], strict=True))
            sam_by_hand(reference, images.double(), targets, 0.1)
        torch.testing.assert_close(
            newest(tmp_path / "out")["state_dict"], reference.state_dict(), rtol=1e-9, atol=1e-12
        )
        return
    on_processes(num, train_on_two, cfg)
    (tmp_path / "out").rename(tmp_path / "two")
    train_model(small_cfg(*words, "TRAIN.BATCH_SIZE", 12))
    assert_close(newest(tmp_path / "out"), newest(tmp_path / "two"), 1e-9)


def test_a_second_pass_needs_its_images(register, small_cfg, monkeypatch):
    register(Sam)
    monkeypatch.setattr(Sam, "gradient_passes", 1)
    with pytest.raises(TypeError, match="Sam: the images of this step are gone; fix: set gradient_passes"):
        train_model(small_cfg("TASK.NAME", "Sam"))


def test_skipped_steps_are_counted_and_keep_their_images(register, small_cfg, tmp_path):
    class Skipping(Classification):
        def update(self, compute_gradients, apply_gradients):
            if self.state.step % 2:
                return
            compute_gradients()
            if self.state.step:
                apply_gradients()

        def train_step(self, model, batch, key):
            seen.append((key.epoch, key.step, batch.targets.tolist()))
            return super().train_step(model, batch, key)

    seen, all_seen = [], []
    register(Skipping)
    train_model(small_cfg("TASK.NAME", "Skipping", "TRAIN.PRINT_FREQ", 2))
    rows = [entry["skipped_steps"] for entry in records(tmp_path / "out") if entry["kind"] == "train"]
    assert rows == [2, 3, 5, 6] and newest(tmp_path / "out")["num_skipped"] == 6
    (tmp_path / "out").rename(tmp_path / "skipping")
    Skipping.update, all_seen = Classification.update, seen.copy()
    seen.clear()
    train_model(small_cfg("TASK.NAME", "Skipping"))
    assert all_seen == [entry for entry in seen if entry[1] % 2 == 0]


def test_stages_of_a_task_and_a_loss_are_recorded_also_after_a_resume(register, small_cfg, tmp_path):
    class Reweighted(CrossEntropy):
        """Cross-entropy with deferred class weights (Cao et al., arXiv 1906.07413)."""

        def prepare(self, class_counts):
            self.counts = class_counts

        def begin_epoch(self, epoch):
            self.weights = 16 / self.counts.float() * 2 if epoch else None
            return "reweighted" if epoch else "plain"

    register(Reweighted)
    words = ("LOSS.NAME", "Reweighted", "CHECKPOINT.EVERY_STEPS", 2, "CHECKPOINT.KEEP_LAST", 20)
    train_model(small_cfg(*words))
    (tmp_path / "out").rename(tmp_path / "whole")
    stages = [(entry["epoch"], entry["stage"]) for entry in records(tmp_path / "whole")]
    assert {*stages} == {(1, "plain"), (2, "reweighted")}
    log = log_of(tmp_path / "whole")
    assert "epoch 1: stage plain" in log and "epoch 2: stage reweighted" in log
    train_model(small_cfg(*words))
    for path in (
        path for path in (tmp_path / "out" / "checkpoints").iterdir() if "ep_001_step_000002" not in path.name
    ):
        path.unlink()
    train_model(small_cfg(*words))
    assert_same_run(tmp_path / "out", tmp_path / "whole")


def test_a_task_may_keep_batch_norm_layers_in_evaluation_mode(register, small_cfg, tmp_path):
    class Frozen(Classification):
        def train_mode(self, model):
            super().train_mode(model)
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()

    register(Frozen)
    train_model(small_cfg("TASK.NAME", "Frozen", "OPTIM.MAX_EPOCH", 1))
    weights = newest(tmp_path / "out")["state_dict"]
    means = [value for name, value in weights.items() if name.endswith("running_mean")]
    assert means and not any(mean.any() for mean in means)


class TwoHeads(Task):
    """A task whose model returns a dict: one head for the class, one for its parity."""

    default_metrics = ("top1",)
    num_outputs = None

    def adapt_model(self, model):
        class Heads(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.parity = model, nn.Linear(3, 2)

            def forward(self, images):
                logits = self.body(images)
                return {"class": logits, "parity": (self.parity(logits), None)}

        return Heads()

    def train_step(self, model, batch, key):
        outputs = model(batch.images)
        loss = F.cross_entropy(outputs["class"], batch.targets)
        loss = loss + F.cross_entropy(outputs["parity"][0], batch.targets % 2)
        return StepOutput(loss, outputs["class"].detach(), batch.targets)

    def eval_step(self, model, batch):
        return self.train_step(model, batch, None)


def test_models_may_return_anything(register, small_cfg, tmp_path, image_folder):
    register(TwoHeads)
    cfg = small_cfg("TASK.NAME", "TwoHeads")
    on_processes(2, train_on_two, cfg)
    assert evaluate_run(cfg)["count"] == 37
    photo = next(iter(sorted((Path(image_folder) / "val").rglob("*.*"))))
    with pytest.raises(ConfigError, match="TASK.NAME: got TwoHeads, whose .*; fix: define predict_step in the task"):
        load_run(tmp_path / "out").predict(photo)
    TwoHeads.predict_step = lambda self, model, images: model(images)["class"]
    assert len(load_run(tmp_path / "out").predict(photo)[0].labels) == 3


def test_an_evaluation_may_adapt_a_copy_of_the_model(register, small_cfg, tmp_path):
    class Adapting(Classification):
        eval_gradients = True

        def begin_evaluation(self, model):
            model = copy.deepcopy(model)
            self.sgd = torch.optim.SGD(model.parameters(), 0.1)
            return model

        def eval_step(self, model, batch):
            logits = model(batch.images)
            self.sgd.zero_grad()
            F.softmax(logits, 1).square().sum().neg().backward()
            self.sgd.step()
            return super().eval_step(model, batch)

    train_model(small_cfg())
    (tmp_path / "out").rename(tmp_path / "plain")
    register(Adapting)
    train_model(small_cfg("TASK.NAME", "Adapting"))
    assert_same_run_weights(tmp_path / "out", tmp_path / "plain")
    losses = [
        [entry["loss"] for entry in records(tmp_path / name) if entry["kind"] == "eval"] for name in ("out", "plain")
    ]
    assert losses[0] != losses[1]


def assert_same_run_weights(one: Path, other: Path) -> None:
    weights = newest(one)["state_dict"], newest(other)["state_dict"]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[1])


def test_a_checkpoint_without_a_state_starts_the_task_anew(register, small_cfg, tmp_path):
    train_model(small_cfg(), stop_epoch=1)
    path = next((tmp_path / "out" / "checkpoints").iterdir())
    content = torch.load(path, weights_only=True)
    del content["task"]
    torch.save(content, path)
    register(Centered)
    train_model(small_cfg("TASK.NAME", "Centered"))
    assert "has no state of the task; it starts anew: center, num_seen" in log_of(tmp_path / "out")
