"""Log: lines by time, width of the columns, levels, and the last lines of a run."""

import io
import json
import logging
import re
import shlex
import subprocess
import sys
import types

import pytest
from support.runs import ROOT, small_options

from distribuuuu.checkpoint.weights_files import Best
from distribuuuu.config import load_cfg
from distribuuuu.records import run_log as log
from distribuuuu.records.metric_writers import RecordFile, drop_records_after
from distribuuuu.trainer import train_model

METRICS = {"count": 10, "loss": 1.0, "top1": 50.0, "topk": 90.0}
LABELS = {"top1": "top1", "topk": "top5"}


class Clock:
    """A clock that only the test moves."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(log, "time", types.SimpleNamespace(perf_counter=lambda: self.now, time=lambda: self.now))


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def logged(caplog, monkeypatch):
    """The lines of the package's log."""
    monkeypatch.setattr(log.logger, "propagate", True)
    caplog.set_level(logging.INFO, "distribuuuu")
    return lambda: [record.getMessage() for record in caplog.records]


def open_log(out_dir, num_epochs=2, num_steps=1000, labels=LABELS, images_per_step=10, epoch=0, step=0) -> log.Log:
    sizes = {"num_epochs": num_epochs, "num_steps": num_steps, "images_per_step": images_per_step}
    opened = log.Log(out_dir=out_dir, train_metrics=labels, eval_metrics=labels, **sizes)
    opened.rewind(epoch, step)
    return opened


def test_the_first_step_of_a_start_is_logged_at_once_and_then_one_by_time(tmp_path, clock, logged):
    run_log = open_log(tmp_path, num_steps=100)
    for step in run_log.steps(0, 0):
        clock.now += 60.0 if step == 0 else 4.0
        if step + 1 == 50:
            run_log.add_train_row(0, 50, 0.1, METRICS, 0.0)
        else:
            run_log.show_step(0, step + 1, 0.1)
    rows = [line.split() for line in logged()]
    assert rows[0] == ["epoch", "step", "loss", "top1", "top5", "lr", "img/s", "data", "eta"]
    assert rows[1] == ["1/2", "1/100", "-", "-", "-", "0.1", "0.2", "-", "-"]
    assert rows[2] == ["1/2", "5/100", "-", "-", "-", "0.1", "0.7", "-", "13m00s"], "the first step has no share in it"
    rows = [row for row in rows if row != rows[0]]
    steps = [int(row[1].split("/")[0]) for row in rows]
    assert steps == [1, *range(5, 50, 4), 50, *range(54, 101, 4)]
    assert all(row[2] == "-" for row in rows if row[1] != "50/100")
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [50]


def test_means_that_no_metric_shows_get_columns_once_they_are_known(tmp_path, clock, logged):
    run_log, more = open_log(tmp_path, num_steps=3), {**METRICS, "mask rate": 0.00512}
    for step in run_log.steps(0, 0):
        clock.now += 1.0
        run_log.add_train_row(0, step + 1, 0.1, METRICS if step == 0 else more, 0.0)
    run_log.add_evaluation_rows(0, {"raw": more}, {"raw": Best(50.0, 0)})
    rows = [line.split() for line in logged() if line.startswith(("epoch", "  1/2"))]
    assert [len(row) for row in rows] == [9, 9, 11, 10, 10], rows
    assert rows[2][2:7] == ["loss", "top1", "top5", "mask", "rate"] and rows[3][5] == "0.0051"
    assert "validation, epoch 1: top1 50.00 top5 90.00 mask rate 0.0051 loss 1.0000" in logged()
    assert [record.get("mask rate") for record in map(json.loads, (tmp_path / "metrics.jsonl").open())] == [
        None, 0.00512, 0.00512, 0.00512]  # fmt: skip


def test_a_metric_that_is_not_a_number_is_a_warning(tmp_path, clock, logged):
    run_log = open_log(tmp_path)
    for value in (50.0, float("nan")):
        run_log.add_evaluation_rows(0, {"raw": METRICS | {"top1": value}}, {"raw": Best(value, 0)})
    assert [line for line in logged() if "not a number" in line] == [
        "validation, epoch 1: top1 is not a number and cannot select the best weights"
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_rows(text: str) -> list[list[str]]:
    """Return the words behind the time of each line that a terminal has kept."""
    lines = re.sub(r"\r *\r?|\x1b\[[AK]", "\n", text).splitlines()
    return [line.split()[1:] for line in lines if re.match(r"\d\d:\d\d:\d\d ", line)]


def test_a_terminal_shows_the_rows_of_the_file_above_the_bar(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "200")  # of the bar
    with log.logging_to(tmp_path, "train.log"), open_log(tmp_path, num_epochs=12, num_steps=4) as run_log:
        for epoch in range(12):
            for step in run_log.steps(epoch, 0):
                clock.now += 1.0
                if step % 2:
                    run_log.add_train_row(epoch, step + 1, 0.1, METRICS, 0.5)
            run_log._bar.refresh()
            run_log.add_evaluation_rows(epoch, {"raw": {**METRICS, "top1": 77.25}}, {"raw": Best(77.25, epoch)})
    rows = shown_rows(terminal.getvalue())
    assert rows == [line.split()[2:] for line in (tmp_path / "train.log").read_text().splitlines()]
    assert rows[0][:4] == ["epoch", "step", "loss", "top1"] and [row[0] for row in rows].count("epoch") == 2
    bars = [part for part in re.split(r"[\r\n]", terminal.getvalue()) if part.startswith("epoch 2/12 |")]
    assert bars[-1].endswith(", run 40s, loss 1.000, top1 50.0, val 77.25]"), bars[-1]


def test_numbers_are_short_and_right():
    for function, texts in (
        (log.format_duration, {0: "0s", 59.6: "1m00s", 204: "3m24s", 3599: "59m59s", 18600: "5h10m", 86399: "23h59m",
                               97200: "1d03h", 8639999: "99d23h", 86400 * 1234: "1234d"}),
        (log.format_lr, {0: "0", 0.1: "0.1", 0.0234: "0.023", 0.00123: "0.0012", 0.000123: "1.2e-4", 1e-6: "1.0e-6"}),
        (log.format_speed, {0.34: "0.3", 9.96: "10", 441.2: "441", 99999.4: "99999", 123456: "123k", 1234567: "1235k",
                            12345678: "12M"}),
        (lambda loss: log.format_decimal(loss, 6), {2.37453: "2.3745", 12.3456: "12.346", 999.9999: "1000.0",
                                                    123456.7: "123457", 1e9: "1e+09"}),
    ):  # fmt: skip
        assert {value: function(value) for value in texts} == texts


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_warnings_and_errors_name_their_level(tmp_path, monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", terminal := stream())
    with log.logging_to(tmp_path, "train.log"):
        for level in (logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger("distribuuuu.some").log(level, "100 %% of %s", "it")
    plain = ["100 % of it", "WARNING: 100 % of it", "ERROR: 100 % of it"]
    assert [line.split(" ", 2)[2] for line in (tmp_path / "train.log").read_text().splitlines()] == plain
    shown = re.sub(r"\r|\x1b\[K", "", terminal.getvalue()).splitlines()
    assert [line.split(" ", 1)[1] for line in shown if line] == plain


@pytest.mark.slow
def test_the_last_lines_name_the_best_weights_and_a_command_that_evaluates_them(image_folder, tmp_path):
    out_dir = tmp_path / "an out"
    args = small_options(image_folder, out_dir, "EMA.HALF_LIFE", 30)
    train_model(load_cfg(None, [*args, "OPTIM.MAX_EPOCH", "1"]))
    assert "Total training time, including restarts" not in (out_dir / "train.log").read_text()
    train_model(load_cfg(None, args))
    lines = [line[15:] for line in (out_dir / "train.log").read_text().splitlines()]
    assert lines[-2].startswith("Total training time, including restarts: ")
    assert re.fullmatch(rf"finished in \d+s; files: {out_dir}", lines[-1])
    results = json.loads((out_dir / "results.json").read_text())["accuracy"]
    for kind, name in (("raw", "best.pth.tar"), ("ema", "best_ema.pth.tar")):
        best, label = results[kind]["best"], "" if kind == "raw" else "ema "
        assert f"best {label}top1: {best['top1']:.2f} (epoch {best['epoch']}); weights: {out_dir / name}" in lines
    commands = [shlex.split(line)[1:4] for line in lines if line.startswith("next: ")][-4:]
    assert commands == [["distribuuuu", name, str(out_dir)] for name in ("test", "report", "predict", "export")]
    command = commands[0]
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and f"validation of 37 images, ema weights: top1 {best['top1']:.3f} " in done.stderr


def test_the_records_after_a_position_are_removed(tmp_path):
    steps = [("train", 1, 2), ("train", 1, 4), ("eval", 1, 4), ("train", 2, 2), ("train", 2, 4)]
    path = tmp_path / "metrics.jsonl"
    file = RecordFile(path)
    for kind, epoch, step in steps:
        file.append({"kind": kind, "epoch": epoch, "step": step})
    drop_records_after(path, 1, 3)
    assert [(one["kind"], one["epoch"], one["step"]) for one in map(json.loads, path.open())] == steps[:4]
    drop_records_after(path, 0, 4)  # the evaluation of the epoch is made again
    assert len(path.read_text().splitlines()) == 2
