"""The command plan: arithmetic of hours, measurements of a small run, the table, errors."""

import itertools
import json

import pytest
from support.runs import small_options

from distribuuuu.commands.main import dispatch
from distribuuuu.commands.plan import measure_run
from distribuuuu.commands.plan.measure_run import extrapolate, plan_run
from distribuuuu.config import load_cfg
from distribuuuu.data.batch_plan import BatchPlan


def test_first_steps_count_but_not_in_the_rate():
    steady = [10.0 + step for step in range(20)]  # the first step takes ten seconds, the others one
    assert extrapolate(steady, 100) == pytest.approx(109.0)
    # Batches come in groups of four: the workers prepare them at once.
    grouped = list(itertools.accumulate([9.0, 0, 0, 0] + [4.0, 0, 0, 0] * 6))
    assert extrapolate(grouped, 100, group=4) == pytest.approx(9 + 4 * 24)
    assert extrapolate([2.0, 3.0], 2) == 3.0 and extrapolate([2.0, 3.0], 1) == 2.0 and extrapolate([2.0], 3) == 6.0
    assert extrapolate([], 0) == 0.0


def test_hours_are_the_sum_of_their_parts_and_processes_share_the_steps():
    cfg = load_cfg(None, ["OPTIM.MAX_EPOCH", "10"])
    found = {"images": {"train": 1000, "val": 10}, "start_s": 5.0, "epoch_s": 30.0, "evaluation_s": 3.0,
             "checkpoint_s": 0.1, "bottleneck": "x"}  # fmt: skip
    result = plan_run(cfg, BatchPlan(25, 2, 2), found)
    assert result["steps_per_epoch"] == 10 and result["steps"] == 100 and result["images_seen"] == 10_000
    assert result["hours"] * 3600 == pytest.approx(5 + 300 + 30 + 2)
    assert result["bottleneck"] == "x" and result["assumption"].startswith("2 processes, each as fast as")
    slow = plan_run(cfg, BatchPlan(25, 2, 1), {**found, "evaluation_s": 90.0})
    assert slow["bottleneck"].startswith("evaluation, 75%") and slow["assumption"] is None
    assert "EVAL_PERIOD 3" in slow["bottleneck"]
    cfg = load_cfg(None, ["OPTIM.MAX_EPOCH", "10", "TRAIN.EVAL_PERIOD", "3"])
    assert plan_run(cfg, BatchPlan(25, 2, 1), found)["seconds"]["evaluation"] == 4 * 3


@pytest.fixture
def in_this_process(monkeypatch, tmp_path):
    """Measure here, each part for a moment only."""
    monkeypatch.setattr(measure_run, "STEPS_S", 0.1)
    monkeypatch.setattr(measure_run, "EVALUATION_S", 0.1)
    monkeypatch.setattr(measure_run, "in_fresh_process", lambda function, *args: function(str(tmp_path), *args))


def test_a_small_run_is_planned(image_folder, tmp_path, capsys, in_this_process):
    words = ("EMA.HALF_LIFE", 100, "TRAIN.IM_SIZE_START", 8, "TRAIN.IM_SIZE_EPOCHS", "[0, 1]")
    args = small_options(image_folder, tmp_path / "out", *words, "TRAIN.IM_SIZE_MULTIPLE", 8)
    assert dispatch("distribuuuu", ["plan", "--format", "json", "--nproc", "2", *args]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"]["arch"] == "resnet8" and result["model"]["params_m"] > 0.05
    assert result["model"]["gflops"] > 0.001 and result["images"] == {"train": 48, "val": 37}
    assert result["steps_per_epoch"] == 2 and result["batch"]["global_batch"] == 24
    assert result["step_s"] > 0 and result["hours"] > 0
    assert [*result["parts"]] == ["data", "forward", "backward", "optimizer", "other"]
    assert sum(result["parts"].values()) == pytest.approx(1) and min(result["parts"].values()) >= 0
    assert result["memory"]["peak_mib"] > 1
    assert "2 processes" in result["assumption"] and not (tmp_path / "out").exists()


def test_the_table_and_a_run_that_does_not_fit(image_folder, tmp_path, capsys, in_this_process, monkeypatch):
    args = ["plan", *small_options(image_folder, tmp_path / "out")]
    assert dispatch("distribuuuu", args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    names = [line[:14].strip() for line in lines if line[0] != " "]
    assert names[:5] == ["model", "images", "step", "run", "memory"]
    assert names[5:] == ["time per step", "of which", "images/s", "hours", "bottleneck"]
    monkeypatch.setattr(measure_run, "in_fresh_process", lambda *args: "the trial ended with status -9")
    assert dispatch("distribuuuu", args) == 2
    assert "out of memory" in (said := capsys.readouterr().err) and "fix: lower it" in said


def test_errors_are_reported_at_once_with_status_2(image_folder, tmp_path, capsys):
    args = small_options(image_folder, tmp_path / "out", "TRAIN.GLOBAL_BATCH_SIZE", 12)
    for words, *texts in (
        ("TRAIN.DATASET /no/such", "TRAIN.DATASET", "/no/such"),
        ("--gpus 2 --tune", "no such flag: --gpus", "no such flag: --tune"),
        ("--epochs 0", "OPTIM.MAX_EPOCH (command line): got 0; expected 1 or more"),
        ("--nproc 7", "TRAIN.GLOBAL_BATCH_SIZE", "on 7 processes"),
    ):
        assert dispatch("distribuuuu", ["plan", *args, *words.split()]) == 2
        shown = capsys.readouterr().err
        assert all(text in shown for text in texts), shown
