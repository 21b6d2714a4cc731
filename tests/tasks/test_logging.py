"""Logging from a task: sums as means, numbers and images after an evaluation; and the norms of each layer."""

import json
from pathlib import Path

import pytest
import torch
from support.processes import on_processes
from support.runs import GROUP_NORM, assert_same_run, records, small_options, timeless, train_and_stop
from support.tiers import slow

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.config import load_cfg
from distribuuuu.config.registry import TASKS
from distribuuuu.optim.layer_norms import LayerNorms
from distribuuuu.tasks.classification import Classification
from distribuuuu.trainer import evaluate_weights as evaluate_run
from distribuuuu.trainer import train_model

BATCHES: list[torch.Tensor | None] = []


class Logging(Classification):
    """Logs the confidence of each image, and after an evaluation a random number and the first images."""

    def train_step(self, model, batch, key):
        return self.with_confidence(super().train_step(model, batch, key))

    def eval_step(self, model, batch):
        return self.with_confidence(super().eval_step(model, batch))

    def with_confidence(self, output):
        output.sums |= {"confidence": output.logits.float().softmax(1).amax(1).sum(), "top1": torch.zeros(())}
        return output

    def log_epoch(self, log, model, batch):
        assert not model.training and torch.is_inference_mode_enabled()
        BATCHES.append(batch)
        log.scalars({"fc_norm": model.fc.weight.norm(), "noise": torch.rand(())}, self.state.epoch)
        if batch is not None:
            log.images("first", batch.images.sigmoid(), self.state.epoch)


@pytest.fixture(autouse=True)
def task(monkeypatch):
    """Register the task for the length of a test."""
    TASKS.get("distillation")  # imports the modules of the package, which register their entries once
    monkeypatch.setattr(TASKS, "_table", dict(TASKS._table))
    TASKS.register("logging")(Logging)
    BATCHES.clear()


LOGGING = ("TASK.NAME", "logging")


def test_the_means_and_numbers_of_a_task_appear_everywhere(small_cfg, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    cfg, out = small_cfg(*LOGGING, "EMA.HALF_LIFE", 30, "LOG.TENSORBOARD", True), tmp_path / "out"
    train_model(cfg)
    rows = records(out)
    assert [row["kind"] for row in rows] == [*["train"] * 4, "eval", "eval_ema"] * 2
    assert all(1 / 3 < row["confidence"] < 1 and row["top1"] > 0 for row in rows)
    assert ["fc_norm" in row for row in rows] == [*[False] * 4, True, False] * 2
    last = json.loads((out / "results.json").read_text())["accuracy"]
    assert last["raw"]["last"]["confidence"] == rows[-2]["confidence"] and "confidence" in last["ema"]["best"]
    log = (out / "train.log").read_text()
    assert " confidence " in log and f" confidence {rows[-2]['confidence']:.4f} loss " in log
    evaluate_run(cfg)
    assert json.loads((out / "test_results.json").read_text())["accuracy"]["ema"]["confidence"] == pytest.approx(
        rows[-1]["confidence"])  # fmt: skip
    assert f" confidence {rows[-1]['confidence']:.4f} loss " in (out / "test.log").read_text()
    read = events.EventAccumulator(str(out / "tensorboard"))
    read.Reload()
    assert {"train/confidence", "eval/confidence", "eval/fc_norm"} <= set(read.Tags()["scalars"])
    assert [image.step for image in read.Images("first")] == [4, 8]
    assert [len(batch.images) for batch in BATCHES] == [16, 16]


@pytest.mark.parametrize("place", [slow((0, 2)), (0, 4), slow((1, 2))])
def test_a_resumed_run_logs_the_same(small_cfg, tmp_path, monkeypatch, place):
    words = (*LOGGING, "TRAIN.PRINT_FREQ", 3, "CHECKPOINT.EVERY_STEPS", 1, "LOG.LAYER_NORMS", True)
    train_model(small_cfg(*words, "OUT_DIR", tmp_path / "whole"))
    train_and_stop(small_cfg(*words), place, monkeypatch)
    train_model(small_cfg(*words))
    assert timeless(tmp_path / "out") == timeless(tmp_path / "whole")


# Norms of each layer

NORMS = ("LOG.LAYER_NORMS", True, "OPTIM.MOMENTUM", 0, "OPTIM.NESTEROV", False, "OPTIM.WEIGHT_DECAY", 0,
         "OPTIM.NORM_WEIGHT_DECAY", 0, "OPTIM.MAX_EPOCH", 1, "TRAIN.GLOBAL_BATCH_SIZE", 12)  # fmt: skip
needs_fsdp = pytest.mark.skipif(torch.__version__ < (2, 7), reason="FSDP2 on a CPU needs torch 2.7")


@pytest.fixture(scope="module")
def alone(image_folder, tmp_path_factory) -> Path:
    """OUT_DIR of a run of one process with the norms of each step, and a checkpoint of each."""
    out_dir = tmp_path_factory.mktemp("norms")
    saved = ("CHECKPOINT.EVERY_STEPS", 1, "CHECKPOINT.KEEP_LAST", 9)
    train_model(load_cfg(None, small_options(image_folder, out_dir, *NORMS, *GROUP_NORM, *saved)))
    return out_dir


def norms_of(out_dir: Path) -> list[dict[str, list[float]]]:
    return [row["layer_norms"] for row in records(out_dir) if row["kind"] == "train"]


def test_norms_are_those_of_weights_gradients_and_updates(alone):
    paths = sorted((alone / "checkpoints").glob("*_step_*"))
    states = [read_checkpoint(path)["state_dict"] for path in [*paths, alone / "checkpoints" / "ckpt_ep_001.pth.tar"]]
    rows = [row for row in records(alone) if row["kind"] == "train"]
    assert len(states) == len(rows) == 4
    for row, before, after in zip(rows[1:], states, states[1:], strict=False):
        assert row["layer_norms"].keys() == before.keys()
        for name, (weight, gradient, update) in row["layer_norms"].items():
            change = (after[name] - before[name]).norm().item()
            assert (weight, update) == pytest.approx((before[name].norm().item(), change), rel=1e-3, abs=1e-7)
            assert update == pytest.approx(row["lr"] * gradient, rel=1e-3, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [(), ("DIST.SHARD", "zero1"), pytest.param(("DIST.SHARD", "fsdp"), marks=needs_fsdp)], ids=str
)
def test_norms_do_not_depend_on_the_processes(alone, small_cfg, words):
    cfg = small_cfg(*NORMS, *GROUP_NORM, *words, "TRAIN.BATCH_SIZE", 6)
    on_processes(2, train_model, cfg)
    for one, two in zip(norms_of(alone), norms_of(cfg.OUT_DIR), strict=True):
        assert one.keys() == two.keys()
        for name, norms in one.items():
            assert two[name] == pytest.approx(norms, rel=1e-3, abs=1e-5), name


def test_norms_are_computed_for_rows_alone_after_clipping_and_change_nothing(small_cfg, tmp_path, monkeypatch):
    due, begin = [], LayerNorms._begin
    words = ("TRAIN.PRINT_FREQ", 3, "TRAIN.AMP", "bf16", "OPTIM.CLIP_NORM", 0.01)
    train_model(small_cfg(*words, "OUT_DIR", tmp_path / "plain"))
    monkeypatch.setattr(LayerNorms, "_begin", lambda self, *args: begin(self, *args) or due.append(bool(self._trained)))
    train_model(small_cfg(*words, "LOG.LAYER_NORMS", True))
    assert_same_run(tmp_path / "out", tmp_path / "plain")
    assert due == [False, False, True, True] * 2, "the rows end with the steps 3 and 4 of an epoch"
    totals = [sum(gradient**2 for _, gradient, _ in row.values()) ** 0.5 for row in norms_of(tmp_path / "out")]
    assert totals == pytest.approx([0.01] * 4, rel=1e-3)
    assert "layer_norms" not in str(records(tmp_path / "plain"))
