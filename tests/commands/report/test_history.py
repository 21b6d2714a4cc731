"""Records made by others: a report leaves out what is damaged and names it; no record raises another error."""

import json
import os
import random
from pathlib import Path

import pytest
from support.hostile import ODD_VALUES, list_changes
from support.predictions import prediction_arrays
from support.tiers import pairwise

from distribuuuu.commands.html.history import MAX_TEXT, parse_figures, read_facts, read_history
from distribuuuu.commands.report import run_report
from distribuuuu.commands.report.compare_page import build_compare_page, compare_runs, list_comparison
from distribuuuu.commands.report.pictures import Pictures
from distribuuuu.commands.report.run_report import build_report, list_report, read_run
from distribuuuu.config.json_file import replace_nonfinite
from distribuuuu.records.predictions import write_npz

ROOT = Path(__file__).parents[3]
RESULTS = json.loads(sorted((ROOT / "benchmarks" / "results").rglob("*.json"))[0].read_text())
RECORDS = [
    {"kind": kind, "epoch": epoch, "step": 5, "loss": 1 / epoch, "top1": 50.0, "count": 320, "time": 1.0,
     **({"lr": 0.1, "images_per_s": 100.0, "wait": 0.1} if kind == "train" else {"seconds": 2.0})}
    for epoch in (1, 2) for kind in ("train", "eval")
]  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """Return the folder of a run made by hand; reports of it have no pictures."""
    monkeypatch.setattr(run_report, "make_pictures", lambda *args: Pictures())
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
    json.dumps(replace_nonfinite(list_report(run)), allow_nan=False, default=str)
    assert "\x1b" not in page and "\u202e" not in page
    return run.history.notes, page


def test_a_whole_run_has_no_notes_and_a_folder_without_records_an_empty_history(run, tmp_path):
    notes, page = show(run)
    assert not notes and RESULTS["hardware"] in page and "Learning rate" in page
    history = read_history(tmp_path)
    assert (history.train, history.evaluations, history.restarts, history.results) == ([], {}, [], {})


@pytest.mark.slow
def test_every_value_of_results_of_another_type(run):
    """A change is either read, as that of a free text, or named with its file."""
    verdicts = {True: 0, False: 0}
    for changed in list_changes(RESULTS):
        (run / "results.json").write_text(json.dumps(changed))
        notes = read_history(run).notes or show(run)[0]
        assert not notes or notes[0].startswith(f"left out: {run / 'results.json'}: ")
        verdicts[bool(notes)] += 1
    assert verdicts[True] > 500 and verdicts[False] > 50, verdicts
    assert str(run / "results.json") in show(run)[1], "the last one, which is left out, is named on the page"


@pytest.mark.slow
def test_every_value_of_the_results_of_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(run_report, "make_pictures", lambda *args: Pictures())
    run = make_run(tmp_path / "run", None)
    tested = {
        key: value for key, value in RESULTS.items() if key not in ("finished", "seed", "training", "peak_memory")
    }
    last = {key: value for key, value in RESULTS["accuracy"]["raw"]["last"].items() if key != "epoch"}
    tested |= {"kind": "evaluation", "weights": "best.pth.tar", "accuracy": {"raw": last}}
    (run / "test_results.json").write_text(json.dumps(tested))
    notes, page = show(run)
    assert not notes and "best.pth.tar" in page
    for changed in list_changes(tested):
        (run / "test_results.json").write_text(json.dumps(changed))
        notes: list[str] = []
        read_facts(run / "test_results.json", "evaluation", notes)
        notes = notes or show(run)[0]
        assert not notes or notes[0].startswith(f"left out: {run / 'test_results.json'}: ")


@pytest.mark.slow
def test_every_value_of_a_record_of_another_type(run):
    for number in (0, 1):
        for changed in list_changes(RECORDS[number]):
            records = [json.dumps(record) for record in (*RECORDS[:number], changed, *RECORDS[number + 1 :])]
            (run / "metrics.jsonl").write_text("\n".join(records))
            notes, _ = show(run)
            lost = sum(parse_figures(line) is None for line in records)
            assert notes == [f"{run / 'metrics.jsonl'}: {lost} line left out: not a valid record"] * lost


def test_a_line_that_is_no_record(run):
    start = b'{"kind": "train", "epoch": '
    for line in (b"[1]", b"1", b"null", b'"x"', b"{", b"\xff\xfe", b"[" * 10**5, b'{"a":' * 10**5,
                 b'{"kind": ["train"]}', b'\xff{"kind": "train"}', start + b"9" * 5000 + b', "step": 1}',
                 start + b'NaN, "step": 1}'):  # fmt: skip
        (run / "metrics.jsonl").write_bytes(line)
        notes, page = show(run)
        assert notes == [f"{run / 'metrics.jsonl'}: 1 line left out: not a valid record"], line
        assert "Learning rate" not in page


def test_numbers_that_cannot_be_drawn_are_gaps(run):
    """A diverged run records a loss that is not a number."""
    keys = ("loss", "lr", "top1", "count", "images_per_s", "wait", "seconds", "time", "eta_s")
    for number in ("NaN", "Infinity", "-Infinity", "1e308", "-1e308", "5e-324", "-1", "0", "null"):
        lines = [json.dumps({**record, **dict.fromkeys(keys, "X")}).replace('"X"', number) for record in RECORDS]
        (run / "metrics.jsonl").write_text("\n".join([*lines, *map(json.dumps, RECORDS)]))
        notes, page = show(run)
        assert not notes and "Learning rate" in page and ">nan" not in page and "nan " not in page


@pytest.mark.parametrize(
    "name, kind",
    pairwise(("results.json", "metrics.jsonl", "config.yaml"), ("pipe", "device", "folder", "sparse")),
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


@pytest.mark.parametrize("place", ['"x"', "[1]", "[1, 2.5]", '{"1": 2}', "[[1], 2]"])
def test_a_record_with_another_position_is_left_out(run, place):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(f'{{"kind": "train", "epoch": 2, "step": 9, "resumed": {place}}}\n')
    history = read_history(run)
    assert history.restarts == [] and "1 line left out" in history.notes[-1]


def test_a_comparison_of_hostile_records(run, tmp_path):
    chance, other = random.Random(0), make_run(tmp_path / "other", 2)
    for _ in range(30):
        keys = ("loss", "lr", "top1", "images_per_s", "wait", "seconds", "count")
        lines = [json.dumps({**record, **{key: chance.choice(ODD_VALUES) for key in keys}}) for record in RECORDS]
        (run / "metrics.jsonl").write_text("\n".join(lines))
        (run / "results.json").write_text(json.dumps(chance.choice(ODD_VALUES)))
        (run / "config.yaml").write_bytes(chance.choice((b"[" * 10**4, b"\xff", b"a: &a [*a]", b"{1: 2, x: {y: []}}")))
        comparison = compare_runs({"a": [run], "b": [other]})
        assert "\u202e" not in build_compare_page(comparison)
        json.dumps(list_comparison(comparison), default=str)
