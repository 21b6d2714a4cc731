"""The page and the table of a sweep, from made-up results."""

import math

import pytest
from support.predictions import Page

from distribuuuu.commands.sweep.page import build_sweep_page
from distribuuuu.commands.sweep.trials import Job, RunState, Sweep, Trial, build_rows, format_rows, summarize

HOSTILE = "RuntimeError: <script>alert(1)</script>"
SPACE = {"OPTIM.BASE_LR": "log:0.01:1", "OPTIM.NAME": "sgd,adamw"}


@pytest.fixture
def sweep(tmp_path) -> Sweep:
    """A sweep of six trials of nine epochs, with rungs after one and three, and three seeds."""
    values = [(0.01, "sgd"), (0.03, "sgd"), (0.1, "adamw"), (0.3, "sgd"), (0.5, "adamw"), (1.0, "adamw")]
    trials = tuple(Trial(i, {"OPTIM.BASE_LR": str(lr), "OPTIM.NAME": name}, 9) for i, (lr, name) in enumerate(values))
    inputs = {"config": "", "overrides": {}, "space": SPACE, "nproc": 1}
    return Sweep(tmp_path / "lr <b>", inputs, trials, (0, 1, 2), (1, 3), "top1", True)


@pytest.fixture
def states() -> dict:
    """Trial 2 is the best one; 3 was not continued after three epochs, 0 and 4 after one; 5 has failed, 1 waits."""
    curve = {epoch: 80.0 + epoch for epoch in range(1, 10)}
    states = {(2, seed): RunState(9, {**curve, 9: 92.0 + seed}) for seed in range(3)}
    states |= {(3, 0): RunState(3, {1: 80.0, 2: 81.0, 3: 81.5}), (0, 0): RunState(1, {1: 10.0})}
    return states | {(4, 0): RunState(1, {1: math.nan}), (5, 0): RunState(0, {}, HOSTILE)}


def test_the_page_shows_results_options_seeds_failures_and_cost(sweep, states):
    page = build_sweep_page(sweep, {key: states.get(key, RunState()) for key in _all_runs(sweep)})
    texts = Page(page).texts
    assert "Sweep lr <b>" in texts and HOSTILE in texts and "<script>alert" not in page
    for section in ("Summary", "Trials", "Failed runs", "Best config: trial 2"):
        assert section in texts
    assert "93.00" in texts and "14 epochs" in texts
    assert "trial 2, BASE_LR 0.1, NAME adamw: 81" in texts  # under the pointer
    assert texts.count("rung: epoch 3") == 1 and "trial 4, BASE_LR 0.5, NAME adamw: nan" not in texts
    empty = Page(build_sweep_page(sweep, {key: RunState() for key in _all_runs(sweep)})).texts
    assert any(text.startswith("No trial has a result. 6 trials: 6 waiting") for text in empty)


def _all_runs(sweep):
    return [(trial.number, seed) for trial in sweep.trials for seed in sweep.seeds]


def test_the_table(sweep, states):
    rows = build_rows(sweep, states, [Job(1, 0, 1, sweep.folder(1, 0), ())])
    lines = [line.split() for line in format_rows(sweep, rows)]
    assert lines[0] == ["trial", "status", "epochs", "top1", "seeds", "BASE_LR", "NAME"] and len(lines) == 7
    assert lines[1] == ["2", "finished", "9/9", "93", "3", "0.1", "adamw"]
    summary = "best: trial 2; 6 trials: 1 running, 3 paused, 1 finished, 1 failed; 14 of 54 epochs"
    assert summarize(sweep, rows) == summary
