"""The page and the live table of a sweep, from made-up results."""

import io
import logging
import math
import re

import pytest
from support.predictions import Page

from distribuuuu.commands.html.charts import Series, find_log_ticks, line_chart
from distribuuuu.commands.sweep.live_table import LiveTable, format_rows, summarize
from distribuuuu.commands.sweep.page import build_sweep_page
from distribuuuu.commands.sweep.trials import Job, RunState, Sweep, Trial, build_rows

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
    for section in ("Summary", "Options", "Seeds", "Trials", "Failed runs", "Best config: trial 2"):
        assert section in texts
    assert "93.00" in texts and "95 % interval 90.52 to 95.48, 3 seeds" in texts
    assert "14 epochs" in texts and "26% of 54, to train every trial to the end" in texts
    assert "2 trials to epoch 1: 2 epochs (4%)" in texts and "not spent: 40 epochs (74%)" in texts
    assert "trial 2, BASE_LR 0.1, NAME adamw: 93" in texts  # under the pointer
    assert {"0.01", "0.1", "1", "sgd", "adamw"} <= set(re.findall(r'text-anchor="middle">([\w.]+)<', page))
    assert texts.count("rung: epoch 3") == 1 and "trial 4, BASE_LR 0.5, NAME adamw: nan" not in texts
    empty = Page(build_sweep_page(sweep, {key: RunState() for key in _all_runs(sweep)})).texts
    assert any(text.startswith("No trial has a result. 6 trials: 6 waiting") for text in empty)


def _all_runs(sweep):
    return [(trial.number, seed) for trial in sweep.trials for seed in sweep.seeds]


def test_the_objective_may_be_a_loss(sweep):
    sweep = Sweep(sweep.out_dir, sweep.inputs, sweep.trials[:2], (0,), (), "loss", False)
    page = build_sweep_page(sweep, {(0, 0): RunState(9, {9: 0.5}), (1, 0): RunState(9, {9: 0.7})})
    texts = Page(page).texts
    assert "Best config: trial 0" in texts and "Seeds" not in texts
    trials = [Trial(i, {"OPTIM.CLIP_NORM": value}, 1) for i, value in enumerate(("1", "inf"))]
    inputs = {**sweep.inputs, "space": {"OPTIM.CLIP_NORM": "1,inf"}}
    sweep = Sweep(sweep.out_dir, inputs, trials, (0, 1), (), "loss", False)
    states = {(trial, seed): RunState(1, {1: math.inf}) for trial in (0, 1) for seed in (0, 1)}
    assert "Seeds" not in Page(build_sweep_page(sweep, states)).texts  # a mean of infinities has no interval
    states[1, 0] = states[1, 1] = RunState(1, {1: 0.5})
    assert {"Seeds", "inf"} <= set(Page(build_sweep_page(sweep, states)).texts)


def test_charts_have_logarithmic_axes_and_points_without_a_line():
    assert find_log_ticks(-2, 0) == pytest.approx([0.01, 0.1, 1.0])
    assert find_log_ticks(-1, 0) == pytest.approx([0.1, 0.2, 0.5, 1.0])
    chart = line_chart("t", [Series("", [0.01, 0.1, 1], [1, 2, 3], has_dots=True, is_joined=False)], "x", is_log=True)
    x = [float(text) for text in re.findall(r'cx="([\d.]+)"', chart)]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2) and "<path" not in chart


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_whole_numbers_have_whole_ticks():
    charts = [line_chart("Trials", [Series("one", x, [2.0, 3.0])], "trial") for x in ([0, 1], [0, 0.5])]
    assert [">0.2</text>" in chart for chart in charts] == [False, True]
    assert all(f">{tick}</text>" in charts[0] for tick in (0, 1))


def test_the_live_table(sweep, states, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "7")
    running = [Job(1, 0, 1, sweep.folder(1, 0), ())]
    rows = build_rows(sweep, states, running)
    lines = format_rows(sweep, rows, width=80)
    assert lines[0].split() == ["trial", "status", "epochs", "top1", "seeds", "BASE_LR", "NAME"]
    assert lines[1].split() == ["2", "finished", "9/9", "93.00", "3", "0.1", "adamw"] and len(lines) == 7
    assert max(map(len, lines)) == 80 and lines[-1].endswith("…")  # the error of the failed trial
    summary = "best: trial 2; 6 trials: 1 running, 3 paused, 1 finished, 1 failed; 14 of 54 epochs"
    assert summarize(sweep, rows) == summary
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        table = LiveTable(sweep, stream)
        table.show(rows)
        table.show(rows)
        table.emit(logging.makeLogRecord({"msg": "squeue failed", "levelno": logging.WARNING}))
        table.show(build_rows(sweep, states))
    first, warning, second = terminal.getvalue().split("\x1b[5F\x1b[J")  # three rows between heading and summary
    assert first.count("\n") == second.count("\n") == 5 and max(map(len, first.splitlines())) == 59
    assert warning == f"squeue failed\n{first}" and "1 waiting" in second
    assert file.getvalue().count("\n") == 8 + 1 + 3  # then the changed row
    assert file.getvalue().splitlines()[-2].split()[:2] == ["1", "waiting"]
