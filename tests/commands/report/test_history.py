"""Records made by others: a report leaves out what is damaged and names it; no record raises another error."""

import json
import os
import random
from pathlib import Path

import pytest
from support.hostile import list_changes
from support.predictions import prediction_arrays
from support.runs import ROOT

from distribuuuu.commands.html.history import MAX_TEXT
from distribuuuu.commands.report import run_report
from distribuuuu.commands.report.comparison import compare_runs
from distribuuuu.commands.report.run_report import build_report, read_run
from distribuuuu.records.predictions import write_npz
from distribuuuu.records.results import replace_nonfinite

RESULTS = json.loads(sorted((ROOT / "benchmarks" / "results").rglob("*.json"))[0].read_text())
RECORDS = [
    {"kind": kind, "epoch": epoch, "step": 5, "loss": 1 / epoch, "top1": 50.0, "count": 320, "time": 1.0,
     **({"lr": 0.1, "images_per_s": 100.0, "wait": 0.1} if kind == "train" else {"seconds": 2.0})}
    for epoch in (1, 2) for kind in ("train", "eval")
]  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """Return the folder of a run made by hand; reports of it have no pictures."""
    monkeypatch.setattr(run_report, "make_pictures", lambda *args: ({}, []))
    return make_run(tmp_path / "run", 2)


def make_run(folder: Path, epoch: int | None) -> Path:
    """Write the files of a run; epoch None: its predictions are of a separate evaluation."""
    folder.mkdir()
    arrays = prediction_arrays(12, {"epoch": epoch, "folder": "", "data": "dummy"})
    write_npz(folder / "predictions.npz", {**arrays, "logits": arrays["logits"][::-1]})
    (folder / "results.json").write_text(json.dumps(RESULTS))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return folder


def show(folder: Path) -> tuple[list[str], str]:
    """Return the notes and the page of a report; its JSON must be valid too."""
    run = read_run(str(folder))
    page = build_report(run)
    json.dumps(replace_nonfinite(run.figures), allow_nan=False, default=str)
    assert "\x1b" not in page and "\u202e" not in page
    return run.history.notes, page


def test_numbers_that_cannot_be_drawn_are_gaps(run):
    """A diverged run records a loss that is not a number."""
    keys = ("loss", "lr", "top1", "count", "images_per_s", "wait", "seconds", "time", "eta_s")
    for number in ("NaN", "-Infinity", "1e308", "5e-324", "0", "null"):
        lines = [json.dumps({**record, **dict.fromkeys(keys, "X")}).replace('"X"', number) for record in RECORDS]
        (run / "metrics.jsonl").write_text("\n".join([*lines, *map(json.dumps, RECORDS)]))
        notes, page = show(run)
        assert not notes and "Learning rate" in page and ">nan" not in page and "nan " not in page


@pytest.mark.parametrize(
    "name, kind",
    [("results.json", "pipe"), ("metrics.jsonl", "device"), ("metrics.jsonl", "sparse"), ("config.yaml", "folder")],
)
def test_files_that_are_not_regular_or_too_large_are_named(run, name, kind):
    path = run / name
    path.unlink(missing_ok=True)
    if kind == "sparse":
        path.touch()
        os.truncate(path, MAX_TEXT + 1)
    else:
        {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}[kind](path)
    notes, page = show(run)
    assert name == "config.yaml" or str(path) in notes[0] and notes[0] in page


@pytest.mark.slow
def test_hostile_records_are_left_out_or_drawn_but_never_an_error(run, tmp_path):
    """A change of a value is either read, as that of a free text, or named with its file."""
    chance, other = random.Random(0), make_run(tmp_path / "other", 2)
    assert show(run)[0] == [] and "Learning rate" in show(run)[1]
    num_named = 0
    for results in chance.sample(list(list_changes(RESULTS)), 8):
        (run / "results.json").write_text(json.dumps(results))
        changed = json.dumps(chance.choice(list(list_changes(chance.choice(RECORDS)))))
        line = chance.choice([changed, "[1]", "[" * 10**5, '{"kind": ["train"]}', '{"kind": "train", "epoch": NaN}'])
        (run / "metrics.jsonl").write_text("\n".join([line, *map(json.dumps, RECORDS)]))
        (run / "config.yaml").write_bytes(chance.choice((b"[" * 10**4, b"\xff", b"a: &a [*a]", b"{1: 2, x: {y: []}}")))
        notes, page = show(run)
        assert all(str(run) in note for note in notes) and "Learning rate" in page
        num_named += bool(notes)
        json.dumps(compare_runs(run, other))
    assert num_named > 2
