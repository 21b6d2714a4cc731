"""The command doctor: exit status, text of 80 columns, JSON, and interruption."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from support.images import draw_folder
from support.runs import ROOT

from distribuuuu.commands.doctor.suspicious_labels import rank_suspicious
from distribuuuu.commands.main import start_command


@pytest.fixture
def root(tmp_path) -> Path:
    draw_folder(tmp_path, "train", {"ant": 12, "bee": 14}, (60, 50))
    draw_folder(tmp_path, "val", {"ant": 3, "bee": 4}, (60, 50))
    return tmp_path


def run(capsys, *args) -> tuple[int, str, str]:
    before = signal.getsignal(signal.SIGPIPE)
    status = start_command("doctor", "distribuuuu doctor", [*map(str, args), "--workers", "0"])
    assert signal.getsignal(signal.SIGPIPE) == before, "a connection that a server closes must not end the process"
    return status, *capsys.readouterr()


def test_problems_exit_with_2_and_name_files_and_fix(root, capsys):
    for number in range(9):
        shutil.copy(root / f"train/ant/00{number}.jpg", root / f"val/bee/a_rather_long_name_of_an_image_{number}.jpg")
        (root / f"train/bee/0{number}.jpg").touch()
    os.replace(root / "train/bee/08.jpg", os.fsencode(root / "train/bee") + b"/\xfe.jpg")
    status, text, _ = run(capsys, root)
    assert status == 2 and "3 problems, 0 notes" in text
    assert "= val/bee/a_rather_long_name_of_an_image_0.jpg" in text
    assert text.count("and 4 more") == 3 and text.count("fix: ") == 3
    assert "broken: 9 images empty" in text and "the file is empty" in text
    lines = text.splitlines()[2:]
    assert max(map(len, lines)) <= 80, max(lines, key=len)


def test_json_lists_all_files_and_every_key_is_documented(root, capsys):
    for number in range(9):
        (root / f"train/bee/0{number}.jpg").touch()
    status, text, _ = run(capsys, root, "--format", "json")
    report = json.loads(text)
    assert status == 2 and report["version"] == 2 and len(report["findings"][0]["files"]) == 9
    page = (ROOT / "docs" / "doctor.md").read_text()
    for key in [*report, *report["findings"][0], *report["splits"]["train"]]:
        assert f"`{key}`" in page, f"docs/doctor.md does not describe {key}"


MISTAKES = {
    "": "got no data; expected FOLDER or --cfg FILE", "x --cfg y": "expected one of them", "clothes": "finetune cloth",
    "no_such": f"FOLDER: no such folder: no_such in {os.getcwd()}; it should hold SPLIT/CLASS/IMAGE or CLASS/IMAGE",
    "x --format jsn": "invalid choice", "x --workers -1": "--workers: got -1; expected 0 or more", "EMPTY": "no images",
    "--cfg no.yaml": "no such file", "TRAIN.DATASET /no/such": "TRAIN.DATASET", "EMPTY/train/cat": "has no class",
    "DATA.NAME multilabel TRAIN.DATASET /no/such": "no such folder: /no/such; it should hold train.csv",
}  # fmt: skip


def test_mistakes_are_reported(tmp_path, capsys):
    (tmp_path / "train/cat").mkdir(parents=True)
    for words, message in MISTAKES.items():
        assert start_command("doctor", "distribuuuu doctor", words.replace("EMPTY", str(tmp_path)).split()) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_wrong_labels_are_ranked_by_features(shapes_run, shapes_folder, tmp_path, capsys):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 3
    rows = 4 * torch.eye(3).repeat(1, 3)[labels] + torch.randn(300, 9, generator=generator)
    wrong, given = [7, 50, 121], labels.clone()
    given[wrong] = (labels[wrong] + 1) % 3
    ranked = rank_suspicious(rows, given, 3)
    assert {place for place, *_ in ranked[:3]} == {*wrong} and len(ranked) < 8
    assert [other for place, other, _ in ranked[:3]] == [int(labels[place]) for place, *_ in ranked[:3]]
    for name in ("ring", "star"):
        shutil.copytree(shapes_folder / "train" / name, tmp_path / "data" / "train" / name)
    (tmp_path / "data/train/star/0000.jpg").write_bytes(b"broken")
    _, text, _ = run(capsys, tmp_path / "data", "--model", shapes_run, "--format", "json")
    (finding,) = [one for one in json.loads(text)["findings"] if one["kind"] == "suspicious_label"]
    assert finding["severity"] == "note" and str(tmp_path / "data/train/star/0000.jpg") not in finding["files"]
    assert re.fullmatch(r"label (ring; features: star|star; features: ring) \(\d+%\)",
                        finding["reasons"][finding["files"][0]])  # fmt: skip
