"""The command compare on runs made by hand: the result, groups of seeds, and runs that cannot be compared."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.predictions import change_predictions, prediction_arrays

from distribuuuu.commands.main import start_command
from distribuuuu.commands.report.comparison import permutation_test
from distribuuuu.config import ConfigError
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
    assert re.search(r"/b is better than .*/a by 13.33 points of top-1 \(p = \de-\d+\)", capsys.readouterr().out)


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
    assert run(runs[1], runs[0]) == 0
    assert re.search(r"No significant difference .*b - .*a = 1.00 points", capsys.readouterr().out)


def test_images_in_another_order_are_matched_by_name(tmp_path, capsys):
    runs = [make_run(tmp_path / name, num) for name, num in (("a", 200), ("b", 240))]
    run(*runs)
    expected = capsys.readouterr().out
    with np.load(runs[1] / "predictions.npz") as file:
        order = np.random.default_rng(1).permutation(300)
        shuffled = {name: file[name][order] for name in ("path", "label", "loss", "logits")}
    change_predictions(runs[1], {}, **shuffled)
    assert run(*runs) == 0 and capsys.readouterr().out == expected


def test_seeds_of_two_sides(tmp_path, capsys):
    for seed, (low, high) in enumerate([(200, 240), (202, 243), (199, 241), (204, 245)]):
        make_run(tmp_path / "low" / f"seed_{seed}", low)
        make_run(tmp_path / "high" / f"seed_{seed}", high)
    assert run(tmp_path / "low/seed_*", tmp_path / "high/seed_*") == 0
    text = capsys.readouterr().out
    assert re.search(
        r"high/seed_\* is better than .*low/seed_\* by 13.67 points .*\(on average, 4 runs and 4 runs, p = 0.029\)",
        text,
    )
    assert run(tmp_path / "low/seed_[01]", tmp_path / "high/seed_[01]") == 0
    assert "Too few runs to tell" in capsys.readouterr().out


def test_a_run_that_is_named_in_two_ways_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("run_a", "run_b"):
        make_run(Path(name), 200)
    Path("link").symlink_to("run_a")
    for sides in (("run*", "run_b"), ("run_a", "link")):
        assert run(*sides) == 2 and " twice; expected different runs" in capsys.readouterr().err


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
    "no such file or folder": lambda root: root / "n*",
    "expected two, or two patterns": lambda root: f"{root}/a/",
    "predictions.npz does not exist; fix: distribuuuu test": lambda root: (root / "e").mkdir() or root / "e",
}  # fmt: skip


def test_runs_that_cannot_be_compared(tmp_path, capsys):
    run_a = make_run(tmp_path / "a", 200)
    for message, second in REFUSED.items():
        assert run(run_a, second(tmp_path)) == 2
        assert message in capsys.readouterr().err
    tags, labels = make_run(tmp_path / "tags", 200), np.zeros((300, 3), np.uint8)
    change_predictions(tags, {"multilabel": True}, label=labels)
    assert run(run_a, tags) == 2 and "tags does not predict one class per image" in capsys.readouterr().err


def test_the_permutation_test_equals_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")

    def distance(x, y, axis):
        return np.abs(x.mean(axis=axis) - y.mean(axis=axis))

    for sizes in [(2, 2), (3, 3), (3, 5), (5, 4)]:
        rng = np.random.default_rng(1)
        a, b = rng.normal(93, 0.2, sizes[0]), rng.normal(93.3, 0.2, sizes[1])
        expected = stats.permutation_test((a, b), distance, alternative="greater", n_resamples=np.inf, vectorized=True)
        assert permutation_test(a, b) == pytest.approx(expected.pvalue)
    assert permutation_test([1, 2, 3], [4, 5, 6]) == pytest.approx(0.1)
    assert permutation_test([1.0, 1.0], [1.0, 1.0]) == 1
    with pytest.raises(ConfigError, match="got 13 and 13 runs; expected at most 12"):
        permutation_test([1.0] * 13, [2.0] * 13)
