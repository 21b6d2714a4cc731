"""The command compare on runs made by hand: the result, groups of seeds, and runs that cannot be compared."""

import json
import re
from pathlib import Path

import numpy as np
from support.predictions import change_predictions, prediction_arrays

from distribuuuu.commands.main import start_command
from distribuuuu.records.predictions import write_npz

CLASSES = ("cat", "<script>alert(1)</script>", "dog")


def make_run(folder: Path, num_right: int, num_images: int = 300) -> Path:
    folder.mkdir(parents=True)
    label = np.arange(num_images) % 3
    predicted = np.where(np.arange(num_images) < num_right, label, (label + 1) % 3)
    logits = 3 * np.eye(3, dtype=np.float32)[predicted]
    arrays = prediction_arrays(num_images, {"folder": "/gone"}, classes=np.array(CLASSES), logits=logits)
    write_npz(folder / "predictions.npz", arrays)
    return folder


def run(*args) -> int:
    return start_command("compare", "distribuuuu compare", [str(arg) for arg in args])


def test_the_better_run_is_named(tmp_path, capsys):
    assert run(make_run(tmp_path / "a", 200), make_run(tmp_path / "b", 240)) == 0
    assert "b is better than a by 13.33 points of top-1 (95 % interval 9." in capsys.readouterr().out


def test_json_has_every_figure(tmp_path, capsys):
    runs = [make_run(tmp_path / name, num) for name, num in (("a", 200), ("b", 201), ("c", 270))]
    assert run(*runs, "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    figures = [(pair["a"], pair["b"], pair["only_b"], pair["significant"]) for pair in found["pairs"]]
    assert figures == [("a", "b", 1, False), ("a", "c", 70, True), ("b", "c", 69, True)]
    assert found["pairs"][0]["images_only_b"] == ["val/200.jpg"] and found["pairs"][0]["images_only_a"] == []
    assert found["groups"] == [] and len(found["sentences"]) == 3


def test_seeds_of_two_sides(tmp_path, capsys):
    for seed, (low, high) in enumerate([(200, 240), (202, 243), (199, 241), (204, 245)]):
        make_run(tmp_path / "low" / f"seed_{seed}", low)
        make_run(tmp_path / "high" / f"seed_{seed}", high)
    assert run(tmp_path / "low/seed_*", tmp_path / "high/seed_*") == 0
    text = capsys.readouterr().out
    assert re.search(r"high is better than low by 13.67 points .*\(on average, 4 runs and 4 runs, p = 0.029\)", text)
    assert run(tmp_path / "low/seed_[01]", tmp_path / "high/seed_[01]") == 0
    assert "Too few runs to tell" in capsys.readouterr().out


def test_a_run_that_is_named_in_two_ways_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("run_a", "run_b"):
        make_run(Path(name), 200)
    Path("link").symlink_to("run_a")
    for sides in (("run*", "run_b"), ("run_a", "link")):
        assert run(*sides) == 2 and " twice; expected different runs" in capsys.readouterr().err


REFUSED = {
    "were evaluated on other images, 300 and 299": lambda root: make_run(root / "b", 9, 299),
    "no such folder": lambda root: root / "n*",
    "expected two or more": lambda root: f"{root}/a/",
    "no epoch of it has been evaluated yet": lambda root: (root / "empty").mkdir() or root / "empty",
}  # fmt: skip


def test_runs_that_cannot_be_compared(tmp_path, capsys):
    run_a = make_run(tmp_path / "a", 200)
    for message, second in REFUSED.items():
        assert run(run_a, second(tmp_path)) == 2
        assert message in capsys.readouterr().err
    tags, labels = make_run(tmp_path / "tags", 200), np.zeros((300, 3), np.uint8)
    change_predictions(tags, {"multilabel": True}, label=labels)
    assert run(run_a, tags) == 2 and "tags does not predict one class per image" in capsys.readouterr().err
