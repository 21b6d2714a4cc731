"""The command compare on runs made by hand: the result, and runs that cannot be compared."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
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


def test_two_runs_are_tested_by_their_changed_answers(tmp_path, capsys):
    """P-values are those of scipy's binomial test."""
    stats = pytest.importorskip("scipy.stats")
    runs = [make_run(tmp_path / name, num) for name, num in (("a", 200), ("b", 203), ("c", 270))]
    for other, num, is_significant in ((runs[1], 3, False), (runs[2], 70, True)):
        assert run(runs[0], other, "--format", "json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["p"] == pytest.approx(stats.binomtest(num, num).pvalue, rel=1e-6)
        assert found["significant"] is is_significant and found["difference"] == pytest.approx(num / 3)
        assert found["images_only_b"] == [f"val/{number}.jpg" for number in range(200, 200 + num)]
        assert found["images_only_a"] == []
    assert run(runs[1], runs[0]) == run(*runs[1:]) == 0
    said = r"No significant difference .*b - .*a = 1.00 points.*\n.*/c is better than .*/b by 22.33 points of top-1"
    assert re.search(said, capsys.readouterr().out)


def test_images_in_another_order_are_matched_by_name(tmp_path, capsys):
    runs = [make_run(tmp_path / name, num) for name, num in (("a", 200), ("b", 240))]
    run(*runs)
    expected = capsys.readouterr().out
    with np.load(runs[1] / "predictions.npz") as file:
        order = np.random.default_rng(1).permutation(300)
        shuffled = {name: file[name][order] for name in ("path", "label", "loss", "logits")}
    change_predictions(runs[1], {}, **shuffled)
    assert run(*runs) == 0 and capsys.readouterr().out == expected


def test_a_run_that_is_named_in_two_ways_is_refused(tmp_path, capsys):
    (tmp_path / "link").symlink_to(make_run(tmp_path / "run", 200))
    assert run(tmp_path / "run", tmp_path / "link") == 2
    assert " twice; expected different runs" in capsys.readouterr().err


def with_label(root: Path, **arrays: np.ndarray) -> Path:
    change_predictions(make_run(root / "b", 200), {}, **arrays)
    return root / "b"


REFUSED = {
    "other images, 300 and 299; those of one: val/299.jpg": lambda root: make_run(root / "b", 9, 299),
    "other labels for the same images": lambda root: with_label(root / "l", label=np.ones(300, np.int64)),
    "other classes, 3 and 3; those of one: dog, fox": lambda root: with_label(
        root / "c", classes=np.array([*CLASSES[:2], "fox"])),
    "other classes, 3 and 3; those of one: the same ones in another order": lambda root: with_label(
        root / "o", classes=np.array(CLASSES[::-1])),
    "no such file or folder": lambda root: root / "n",
    "predictions.npz does not exist; fix: distribuuuu test": lambda root: (root / "e").mkdir() or root / "e",
}  # fmt: skip


def test_runs_that_cannot_be_compared(tmp_path, capsys):
    run_a = make_run(tmp_path / "a", 200)
    for message, second in REFUSED.items():
        assert run(run_a, second(tmp_path)) == 2 and message in capsys.readouterr().err
    tags, labels = make_run(tmp_path / "tags", 200), np.zeros((300, 3), np.uint8)
    change_predictions(tags, {"multilabel": True}, label=labels)
    assert run(run_a, tags) == 2 and "tags does not predict one class per image" in capsys.readouterr().err
