"""The command report: content of the page, escaping, missing files, errors."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from support.images import draw_folder, write_label_lists
from support.predictions import Page, change_predictions
from support.runs import small_options

from distribuuuu import evaluate
from distribuuuu.commands.html.page import percent, write_page
from distribuuuu.commands.main import start_command
from distribuuuu.commands.report.run_report import read_run
from distribuuuu.config import load_cfg
from distribuuuu.config.errors import counted
from distribuuuu.records.predictions import write_npz
from distribuuuu.trainer import train_model

HOSTILE = "<script>alert(1)</script> & 'so' \"on\""


def test_names_that_are_not_utf8_are_written(tmp_path):
    write_page(tmp_path / "a.html", "\udcff.jpg")
    assert (tmp_path / "a.html").read_bytes() == b"\\udcff.jpg"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    counts = {"ant": 9, HOSTILE.replace("/", "\u2215"): 8, "bee": 7}
    draw_folder(root, "train", counts)
    draw_folder(root, "val", counts)
    return root


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> Path:
    """Return OUT_DIR of a run."""
    out_dir = tmp_path_factory.mktemp("runs") / "a <b>run</b>"
    words = ("MODEL.ARCH", "resnet8", "OPTIM.BASE_LR", 1e-4, "MODEL.LICENSE", "x-license")
    train_model(load_cfg(None, small_options(data, out_dir, *words)))
    return out_dir


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def make(run: Path, capsys, *args: str) -> tuple[int, str]:
    """Return the exit status of the command and what it printed: its output, or its errors."""
    capsys.readouterr()
    status = start_command("report", "distribuuuu report", [str(run), *args])
    captured = capsys.readouterr()
    return status, captured.err if status else captured.out


def test_a_report_is_one_file_that_requests_nothing(finished, tmp_path, capsys):
    out = tmp_path / "page.html"
    status, printed = make(finished, capsys, "--out", str(out))
    assert (status, printed.splitlines()[-1]) == (0, str(out))
    content = read_run(str(finished)).content
    assert f"accuracy: {percent(content.correct.mean(), 2)} (95 % interval" in printed
    assert "baseline, the most frequent class: 37.50" in printed and "k-NN" in printed
    text = out.read_text(encoding="utf-8")
    page, content = Page(text), read_run(str(finished)).content
    for title in ("Summary", "Confusion", "Classes", "Images", "Provenance"):
        assert title in page.texts
    assert percent(content.correct.mean(), 2) in page.texts
    assert page.tags.count("img") == len(re.findall('class="card"', text))
    assert len(text) < 5e6 and "x-license" in page.texts
    assert page.tags.count("script") == 1 and "<b>run" not in text and "<script>alert" not in text
    assert not re.search(r"url\(|@import|https?://", text.replace("http://www.w3.org/2000/svg", ""))
    assert any("default-src 'none'" in (value or "") for _, value in page.attributes)


@pytest.mark.slow
def test_each_evaluated_set_has_predictions_of_its_own_and_a_better_probe_is_named(run, data, tmp_path, capsys):
    content, held_out = read_run(str(run)).content, tmp_path / "held out"
    draw_folder(held_out, "val", dict.fromkeys(content.classes, 2))
    top1 = {"k-NN": 99.5, "linear probe": 0.0}
    probe = {"num_test": len(content), "digest": content.meta["digest"], "top1": top1}
    (run / "probe.json").write_text(json.dumps(probe))
    better = "k-NN on the features of the model is better than the model: 99.50 % against"
    own = f"{counted(len(content), 'image')} of {data}"
    for words in ((), ("--predictions", str(run / "predictions.npz"))):
        _, printed = make(run, capsys, *words)
        page = (run / "report.html").read_text()
        assert better in printed and own in printed and better in page and f"Figures: {own}." in page
        assert "linear probe on the features" not in printed
        evaluate(run, {"TEST.DATASET": held_out})
        evaluate(run, {"TEST.DATASET": held_out})  # the second time it replaces its own
    (other,) = run.glob("predictions_held-out_*.npz")
    _, printed = make(run, capsys)
    page, other_set = (run / "report.html").read_text(), f"{2 * len(content.classes)} images of {held_out}"
    assert other_set in printed and "better" not in printed + page and "FILE): predictions.npz" in printed
    assert f"Figures: {other_set}. Curves: the training, which evaluated {counted(len(content), 'image')} of" in page
    assert other.name in page and json.loads(make(run, capsys, "--format", "json")[1])["probe"] == {}
    evaluate(run)
    assert read_run(str(run)).file.name == "predictions.npz" and len(list(run.glob("predictions*.npz"))) == 2


@pytest.mark.parametrize("epochs, top1, said", [
    (0, 50.0, None), (4, 50.0, "Curves of the fine-tuning: "), ("four", 50.0, "No curves: "), (0, 500.0, "No curves: "),
])  # fmt: skip
def test_a_report_of_finetune_names_its_images_and_its_curves(run, capsys, epochs, top1, said):
    content = {"data": {"name": "pets", "parts": {"train": [0, 1], "val": [2]}}, "choice": {"share": 0.0},
               "test": {"count": 24, "top1": top1}, "training": {"epochs": epochs}}  # fmt: skip
    (run / "finetune.json").write_text(json.dumps(content))
    for name in ("results.json", "metrics.jsonl"):
        (run / name).unlink()
    printed, page = make(run, capsys)[1], (run / "report.html").read_text(encoding="utf-8")
    assert ("24 test images of pets)" in printed) == (said != "No curves: ") == ("on pets; finetune: probe; 24" in page)
    assert said in page if said else "urves" not in page


@pytest.mark.parametrize("recorded, said", [
    ("/no/such/folder", "moved or changed since in /no/such/folder"),
    ("", "the predictions do not record the folder of the images"),
])  # fmt: skip
def test_images_that_are_not_found_are_left_out_with_a_note(run, capsys, recorded, said):
    change_predictions(run, {"folder": recorded})
    assert make(run, capsys)[0] == 0
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "<img" not in text and said in text


@pytest.mark.parametrize("name", ["best.pth.tar", "metrics.jsonl", "results.json", "train.log", "config.yaml"])
def test_a_report_without_one_of_the_other_files(run, capsys, name):
    shutil.rmtree(run / "checkpoints")
    (run / name).write_bytes(b"\xff\x00{")
    assert make(run, capsys)[0] == 0
    text = (run / "report.html").read_text(encoding="utf-8")
    Page(text)
    assert ("No thumbnails" in text) == (name in ("best.pth.tar", "config.yaml"))
    (run / name).unlink()
    assert make(run, capsys)[0] == 0


@pytest.mark.parametrize("out, message", [
    ("/no/such/folder/x.html", "no such folder: /no/such/folder"),
    ("/proc/x.html", "--out: /proc/x.html cannot be written"),
])  # fmt: skip
def test_errors_have_a_message_and_status_2(finished, capsys, out, message):
    status, printed = make(finished, capsys, "--out", out)
    assert status == 2 and message in printed and "Traceback" not in printed


def test_multilabel_runs_have_average_precisions(image_folder, tmp_path, capsys):
    write_label_lists(image_folder, tmp_path)
    options = ("DATA.NAME", "multilabel", "LOSS.NAME", "bce", "OPTIM.MAX_EPOCH", 1)
    train_model(load_cfg(None, small_options(tmp_path, tmp_path / "out", *options)))
    assert make(tmp_path / "out", capsys)[0] == 0
    page = Page((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    assert "average precision" in page.texts and "Confusion" not in page.texts and page.tags.count("img") > 0
    figures = json.loads(make(tmp_path / "out", capsys, "--format", "json")[1])
    last = json.loads((tmp_path / "out" / "results.json").read_text())["accuracy"]["raw"]["last"]
    assert 100 * figures["map"] == pytest.approx(last["map"], abs=1e-4) and figures["images"] == 37
    assert figures["curves"]["eval"][-1]["epoch"] == 1


@pytest.mark.parametrize("kind", ["absolute", "parent", "link", "linked folder", "root", "home"])
def test_images_outside_of_the_recorded_folder_are_not_shown(run, data, tmp_path, capsys, monkeypatch, kind):
    """Predictions made by others name private images of the reader."""
    private, folder = tmp_path / "private", tmp_path / "theirs"
    shutil.copytree(data / "val" / "ant", private)
    name = sorted(private.iterdir())[0].name
    folder.mkdir()
    (folder / "link.jpg").symlink_to(private / name)
    (folder / "linked").symlink_to(private)
    paths = {
        "absolute": str(private / name), "parent": f"../private/{name}", "link": "link.jpg",
        "linked folder": f"linked/{name}", "root": str(private / name).lstrip("/"), "home": f"private/{name}",
    }  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    recorded = {"root": "/", "home": str(tmp_path)}.get(kind, str(folder))
    change_predictions(run, {"folder": recorded}, path=np.array([paths[kind]] * 24))
    assert make(run, capsys)[0] == 0
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "<img" not in text and f"not in {recorded}, the recorded folder" in text
    texts = Page(text).texts
    assert texts[texts.index("pictures from") + 1] == recorded


def test_images_of_a_list_outside_of_its_folder_are_shown(image_folder, tmp_path, capsys):
    """The folder that holds them is recorded, and shown in the provenance; one that is a link is followed."""
    (tmp_path / "lists").mkdir()
    (tmp_path / "linked").symlink_to(image_folder)
    for split in ("train", "val"):
        lines = [f"../linked/{path.relative_to(image_folder)},{path.parent.name}"
                 for path in sorted((image_folder / split).rglob("*.jpg"))]  # fmt: skip
        (tmp_path / "lists" / f"{split}.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    options = ("DATA.NAME", "list", "OPTIM.MAX_EPOCH", 1)
    train_model(load_cfg(None, small_options(tmp_path / "lists", tmp_path / "out", *options)))
    content = read_run(str(tmp_path / "out")).content
    assert content.meta["images"] == str((image_folder / "val").resolve())
    assert make(tmp_path / "out", capsys)[0] == 0
    page = Page((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    assert page.tags.count("img") > 0
    assert page.texts[page.texts.index("pictures from") + 1] == content.meta["images"]


def test_a_mistake_is_shown_with_where_the_model_looked_and_its_nearest_training_images(run, data, capsys, monkeypatch):
    pytest.importorskip("captum")
    make(run, capsys)
    plain, content = (run / "report.html").read_text(encoding="utf-8"), read_run(str(run)).content
    figures = json.loads(make(run, capsys, "--format", "json")[1])
    mistake = figures["mistakes"][0]["image"]
    names = [f"{data}/{name}" for name in (*content.path.tolist(), "train/ant/000.jpg", "train/bee/000.jpg")]
    rows = np.eye(len(names), dtype=np.float32)
    rows[content.path.tolist().index(mistake), -1] = 1  # nearest to the bee
    labels = np.array([Path(name).parent.name for name in names])
    write_npz(run / "features.npz", {"path": np.array(names), "label": labels, "features": rows})
    make(run, capsys)
    page = (run / "report.html").read_text(encoding="utf-8")
    texts = Page(page).texts
    assert "nearest training images: bee, ant" in page and len(page) > len(plain)
    assert texts[texts.index("pictures from") + 1] == str(Path(data).resolve()), "those of the training, too"
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    make(run, capsys)
    assert "fix: pip install &#39;distribuuuu[explain]&#39;" in (run / "report.html").read_text(encoding="utf-8")
    (run / "features.npz").write_bytes(b"PK")
    make(run, capsys)
    assert "features.npz: not a valid features" in (run / "report.html").read_text(encoding="utf-8")
