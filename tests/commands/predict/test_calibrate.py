"""Calibration: its threshold keeps the promise, its file is that of the weights, and every command applies it."""

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.predictions import Page
from support.tables import slow

from distribuuuu import load_run
from distribuuuu.commands.export.exporter import export_run
from distribuuuu.commands.main import start_command
from distribuuuu.config import ConfigError
from distribuuuu.inference.calibration import (
    Calibration,
    binomial_tail,
    calibration_error,
    fit_calibration,
    write_calibration,
)


def draw_answers(num: int, generator: torch.Generator, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of five classes, three times too confident, and labels that follow their true probabilities."""
    logits = 5 * torch.randn(num, 5, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return scale * logits, labels


@pytest.mark.slow
def test_the_promise_holds_at_its_rate_over_200_random_splits():
    """The temperature and the threshold are fitted to one part of each split, and judged on many other images."""
    generator, broken, found = torch.Generator().manual_seed(0), 0, 0
    for _ in range(200):
        logits, labels = draw_answers(5400, generator)
        calibration = fit_calibration(logits[:400], labels[:400])
        try:
            threshold = calibration.find_threshold(0.9)
        except ConfigError:
            continue
        confidence, predicted = (logits[400:] / calibration.temperature).softmax(1).max(1)
        answered = confidence > threshold
        found += 1
        broken += predicted[answered].eq(labels[400:][answered]).double().mean() < 0.9
    assert found > 150 and broken <= 200 * 0.05  # of 200, 10 are expected at most


def test_the_temperature_halves_the_calibration_error_of_other_images():
    generator = torch.Generator().manual_seed(0)
    logits, labels = draw_answers(500, generator)
    others, other_labels = draw_answers(2000, generator)
    found = fit_calibration(logits, labels)
    assert found.temperature == pytest.approx(3, rel=0.15)
    before, after = (calibration_error(others / scale, other_labels) for scale in (1, found.temperature))
    assert before > 0.1 and after < before / 2
    assert calibration_error(torch.tensor([[9.0, -9.0]] * 2), torch.tensor([0, 1])) == pytest.approx(0.5)


def test_the_test_of_a_threshold_is_the_exact_binomial_one():
    # The values are those of scipy.stats.binom.cdf.
    for arguments, tail in {(0, 60, 0.05): 0.04606979898695208, (700, 5000, 0.15): 0.024185100592613678}.items():
        assert binomial_tail(*arguments) == pytest.approx(tail, rel=1e-9)
    rows = ((0.9, 100, 0), (0.5, 200, 2), (0.0, 300, 60))
    found = Calibration(1.0, rows, 300)
    assert found.find_threshold(0.95) == 0.5 and found.find_threshold(0.7) == 0.0
    for precision, message in ((0.999, "images justify no threshold"), (1.5, "--precision: got 1.5; expected")):
        with pytest.raises(ConfigError, match=message):
            found.find_threshold(precision)


@pytest.fixture
def calibrated(shapes_run, tmp_path) -> Path:
    """Return a run with a calibration: a temperature of 2, and a threshold that some images exceed."""
    folder = Path(shutil.copytree(shapes_run, tmp_path / "run"))
    tensors = load_run(folder).state_dict
    write_calibration(folder, Calibration(2.0, ((0.14, 500, 0), (0.0, 900, 600)), 900), tensors)
    return folder


def run(name: str, *words) -> int:
    return start_command(name, f"distribuuuu {name}", [str(word) for word in words])


def test_predict_answers_where_it_is_sure(calibrated, shapes_run, shapes_folder, tmp_path, capsys):
    words = (calibrated, shapes_folder / "val", "--workers", 0, "--precision", 0.95)
    assert run("predict", *words, "--out", tmp_path / "out.csv") == 0
    assert "answers have a probability above 0.14" in capsys.readouterr().err
    with open(tmp_path / "out.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    answers = [row["answer"] for row in rows]
    assert answers == [row["label"] if float(row["probability"]) > 0.14 else "" for row in rows]
    assert "" in answers and any(answers)
    loaded, plain = load_run(calibrated), load_run(shapes_run)
    logits = plain.model(plain.transform(rows[0]["path"])[None].to(plain.device))
    expected = (logits / 2).double().softmax(1).max().item()
    assert loaded.predict(rows[0]["path"])[0].probabilities[0] == pytest.approx(expected, rel=1e-5)
    assert run("predict", shapes_run, rows[0]["path"], "--precision", 0.9) == 2
    assert "has no calibration by validation images; fix: distribuuuu calibrate" in capsys.readouterr().err


def test_a_calibration_of_other_weights_is_ignored_and_a_damaged_one_refused(calibrated, caplog, capsys):
    content = json.loads((calibrated / "calibration.json").read_text())
    (calibrated / "calibration.json").write_text(json.dumps({**content, "weights_sha256": "0"}))
    assert load_run(calibrated).calibration is None and "is that of other weights; fix: distribuuuu" in caplog.text
    for damaged in ("[", "{}", json.dumps({**content, "temperature": -1}), json.dumps({**content, "thresholds": 3})):
        (calibrated / "calibration.json").write_text(damaged)
        with pytest.raises(ConfigError, match="not a valid calibration.*; fix: remove it, then [^;]*$"):
            load_run(calibrated)
    (calibrated / "calibration.json").unlink()
    os.mkfifo(calibrated / "calibration.json")  # would be raw confidences in silence
    for name, words in (("predict", [__file__]), ("report", [])):
        assert run(name, calibrated, *words) == 2
        assert "not a regular file" in (said := capsys.readouterr().err) and "fix: remove it, then" in said


def test_calibrate_and_report(shapes_run, tmp_path, capsys):
    folder = shutil.copytree(shapes_run, tmp_path / "run")
    assert run("calibrate", folder, "TEST.SPLIT", "test") == 2
    assert "is not tested by them; fix: TEST.SPLIT val" in capsys.readouterr().err
    assert run("calibrate", folder, "--workers", 0) == 0
    assert "by 70 validation images; calibration error" in capsys.readouterr().out
    found = load_run(folder).calibration
    assert found.images == 70 and found.thresholds[-1][:2] == (0.0, 70)
    with np.load(folder / "predictions.npz") as file:
        logits, labels = torch.from_numpy(file["logits"]), torch.from_numpy(file["label"]).long()
    assert fit_calibration(logits, labels).temperature == pytest.approx(found.temperature, rel=1e-3)
    for precision in (0.95, 0.01):
        assert run("report", folder, "--precision", precision) == 0
        page = Page((folder / "report.html").read_text(encoding="utf-8"))
        assert "Confidence" in page.texts and "after calibration" in page.texts
        assert (f"--precision {precision:g}" in page.texts) == (precision < 0.1)
    capsys.readouterr()
    assert run("report", folder, "--format", "json", "--precision", 0.01) == 0
    figures = json.loads(capsys.readouterr().out)["confidence"]
    risk = float(logits.argmax(1).ne(labels).float().mean())
    assert figures["temperature"] == found.temperature and figures["risk"][-1] == pytest.approx(risk, abs=1e-6)
    content = torch.load(folder / "best.pth.tar")
    content["state_dict"]["fc.bias"][0] = torch.nan
    torch.save(content, folder / "best.pth.tar")
    assert run("calibrate", folder, "--workers", 0) == 2 and "scores that are not finite" in capsys.readouterr().err


@pytest.mark.parametrize("to", [slow("safetensors"), slow("onnx"), slow("timm")])
def test_an_export_has_temperature_and_threshold_and_is_checked_with_both(small_cfg, tmp_path, monkeypatch, to):
    from support.saved_runs import save_run

    folder = save_run(small_cfg("MODEL.ARCH", "resnet18" if to == "timm" else "resnet8"))
    loaded = load_run(folder, device="cpu")
    confidence = sorted(one.probabilities[0] for one in loaded.predict(small_cfg().TEST.DATASET, topk=1))
    middle = float(np.mean(confidence[len(confidence) // 2 :][:2]))
    write_calibration(folder, Calibration(1.0001, ((middle, 500, 0), (0.0, 900, 600)), 900), loaded.state_dict)
    record = export_run(load_run(folder, device="cpu"), to, tmp_path / "exported", precision=0.95)
    card = (tmp_path / "exported" / "README.md").read_text()
    assert record["verified"] and record["threshold"] == middle and record["promised_precision"] == 0.95
    assert f"> {middle} else None" in card and "At least 95 % of its other answers are right" in card
    if to == "safetensors":
        again = load_run(tmp_path / "exported", device="cpu")
        assert again.find_threshold(0.95) == middle and again.temperature == 1.0001
    render = "distribuuuu.commands.export.exporter.render_code"
    from distribuuuu.commands.export.model_card import render_code

    def wrong(*args, **options):
        return render_code(*args, **options).replace(f"> {middle}", f"> {confidence[-1] + 0.01}")

    monkeypatch.setattr(render, wrong)  # a card with another threshold is not verified
    assert not export_run(load_run(folder, device="cpu"), to, tmp_path / "other", precision=0.95)["verified"]
