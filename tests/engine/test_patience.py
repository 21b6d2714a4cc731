"""TRAIN.PATIENCE: the run ends as finished, at the same epoch when it is resumed and on every process."""

import json
from pathlib import Path

import pytest
from support.runs import newest, train_and_kill
from support.tiers import slow

from distribuuuu import trainer
from distribuuuu.trainer import train_model

PATIENT = ("OPTIM.MAX_EPOCH", 9, "TRAIN.PATIENCE", 2, "CHECKPOINT.EVERY_STEPS", 1, "CHECKPOINT.KEEP_LAST", 99)


VALUES = [50, 60, 60, 70, 70, 10, 99, 99, 99]


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    """Replace the evaluation's top-1 by VALUES after the epochs."""
    evaluate = trainer.evaluate

    def scripted_evaluate(task, *args, **options):
        result, epoch = evaluate(task, *args, **options), trainer_state["run"].state.epoch
        return {**result, "top1": VALUES[epoch]}

    trainer_state, build = {}, trainer.build_run

    def build_run(*args):
        trainer_state["run"] = build(*args)
        return trainer_state["run"]

    monkeypatch.setattr(trainer, "build_run", build_run)
    monkeypatch.setattr(trainer, "evaluate", scripted_evaluate)


def results(out_dir) -> dict:
    return json.loads((Path(out_dir) / "results.json").read_text())


@pytest.mark.parametrize(("words", "epochs"), [
    slow((), 6), (("TRAIN.PATIENCE", 1), 3), slow(("TRAIN.PATIENCE", 3), 9), slow(("TRAIN.PATIENCE", 0), 9),
    slow(("TRAIN.EVAL_PERIOD", 2), 6), slow(("EMA.HALF_LIFE", 40), 6),
])  # fmt: skip
def test_a_run_ends_after_the_epochs_without_a_better_value(small_cfg, words, epochs):
    cfg = small_cfg(*PATIENT, *words)
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


def test_a_value_that_stays_at_zero_is_not_better(small_cfg, monkeypatch):
    monkeypatch.setitem(globals(), "VALUES", [0.0] * 9)
    cfg = small_cfg(*PATIENT)
    train_model(cfg)
    assert results(cfg.OUT_DIR)["training"]["epochs_done"] == 3
