"""The command predict: agreement with the evaluation, equal bytes in any setting, resuming, and errors."""

import csv
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from distribuuuu import load_run
from distribuuuu.commands.main import start_command
from distribuuuu.commands.predict import prediction as command
from distribuuuu.commands.scan import journal
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.loader import BadImageError, build_loader
from distribuuuu.inference.forward_chunks import list_spans
from distribuuuu.inference.image_arguments import list_images
from distribuuuu.launch.detect import Launch
from distribuuuu.tasks.class_metrics import MeanAveragePrecision
from distribuuuu.trainer import evaluate_weights

# Several chunks, of which the last one is smaller.
SMALL_CHUNKS = ("--batch-size", 16)


def run(*words) -> int:
    """Run the command in this process, without loader workers unless they are asked for; return its status."""
    words = [str(word) for word in words]
    return start_command("predict", "distribuuuu predict", words + ([] if "--workers" in words else ["--workers", "0"]))


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_top1_of_the_csv_is_that_of_the_evaluation_to_the_last_image(shapes_run, shapes_folder, tmp_path):
    assert run(shapes_run, shapes_folder / "val", "--out", tmp_path / "out.csv") == 0
    rows = read_csv(tmp_path / "out.csv")
    assert len(rows) == 70 and [row["path"] for row in rows] == sorted(row["path"] for row in rows)
    correct = sum(Path(row["path"]).parent.name == row["label"] for row in rows)
    measured = json.loads((shapes_run / "test_results.json").read_text())["accuracy"]["raw"]
    assert 0 < correct < 70 and 100 * (correct / 70) == pytest.approx(measured["top1"], abs=1e-9)
    ranks = ("", "_2", "_3", "_4", "_5")
    among = sum(Path(row["path"]).parent.name in [row[f"label{rank}"] for rank in ranks] for row in rows)
    assert 100 * (among / 70) == pytest.approx(measured["topk"], abs=1e-9)
    values = [[float(row[f"probability{rank}"]) for rank in ranks] for row in rows]
    assert all(value == sorted(value, reverse=True) and 0 < sum(value) <= 1 for value in values)


@pytest.mark.slow
def test_map_of_the_csv_is_that_of_the_evaluation(labels_run, shapes_folder, tmp_path, capsys):
    assert run(labels_run, shapes_folder / "val", "--out", tmp_path / "out.csv", "--threshold", 0) == 0
    loaded = load_run(labels_run)
    scores, targets = torch.zeros(70, 12, dtype=torch.float64), torch.zeros(70, 12, dtype=torch.uint8)
    for number, row in enumerate(read_csv(tmp_path / "out.csv")):
        own = {Path(row["path"]).parent.name, "ab"[number % 2]}
        for label, probability in zip(row["labels"].split(";"), row["probabilities"].split(";"), strict=True):
            column = loaded.classes.index(label)
            scores[number, column], targets[number, column] = float(probability), label in own
    measured = json.loads((labels_run / "test_results.json").read_text())["accuracy"]["raw"]["map"]
    assert targets.sum() == 140 and MeanAveragePrecision(12).value(scores, targets) == measured
    image = shapes_folder / "val" / "ring" / "0000.jpg"
    assert run(labels_run, image, "--out", tmp_path / "some.csv") == 0
    (some,) = read_csv(tmp_path / "some.csv")
    assert some["path"] == str(image) and all(float(value) > 0.5 for value in some["probabilities"].split(";") if value)
    assert run(labels_run, image, "--topk", 2) == 2 and "--topk: the model" in capsys.readouterr().err


def odd_images(folder: Path) -> Path:
    """Write photographs of unusual modes as the evaluation images of ten classes, one each."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 52, 3), dtype=np.uint8)).resize((90, 70))
    exif, palette = Image.Exif(), image.convert("P")
    exif[0x0112] = 6
    deep = Image.fromarray((np.asarray(image.convert("L")).astype(np.uint16) << 8) + 17)
    for number, (name, photo, options) in enumerate([
        ("cmyk.jpg", image.convert("CMYK"), {}), ("deep.png", deep, {}), ("clear.png", palette, {"transparency": 3}),
        ("gray.jpg", image.convert("L"), {}), ("exif.jpg", image, {"exif": exif}), ("photo.webp", image, {}),
        ("alpha.png", image.convert("RGBA"), {}), ("bits.png", image.convert("1"), {}), ("palette.png", palette, {}),
        ("photo.tiff", image, {"compression": "tiff_lzw"}),
    ]):  # fmt: skip
        (folder / "val" / f"class{number}").mkdir(parents=True)
        photo.save(folder / "val" / f"class{number}" / name, **options)
    return folder


@pytest.mark.parametrize("options", [(), ("DATA.EXIF_ROTATE", "True"), ("TEST.FLIP", "True"), ("TRAIN.AMP", "bf16")],
                         ids=["plain", "exif", "flip", "amp"])  # fmt: skip
def test_unusual_photographs_are_answered_as_in_an_evaluation(shapes_run, tmp_path, options):
    folder = odd_images(tmp_path)
    settings = ("TRAIN.DATASET", str(tmp_path), "TEST.DATASET", str(tmp_path), "TEST.BATCH_SIZE", "64", *options)
    loaded = load_run(shapes_run, overrides=settings)
    (batch,) = build_loader(loaded.cfg, Launch("alone"), torch.device("cpu"), train=False)
    with torch.inference_mode():
        logits = loaded.task.predict_step(loaded.model, batch.images)
    expected = logits.double().softmax(1)
    predictions = loaded.predict(folder / "val", topk=10)
    assert len(predictions) == 10
    for prediction, row in zip(predictions, expected, strict=True):
        assert prediction.probabilities == tuple(row[loaded.classes.index(label)].item() for label in prediction.labels)
    assert torch.equal(torch.stack([loaded.transform(prediction.image) for prediction in predictions]), batch.images)


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_workers(shapes_run, shapes_folder, tmp_path, monkeypatch):
    sizes = set()
    monkeypatch.setattr(command, "list_spans", lambda *sides: sizes.add(sides[1]) or list_spans(*sides))
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    images = (shapes_folder / "val", tmp_path / "broken.jpg", shapes_folder / "train" / "star")
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    assert run(shapes_run, *images, "--out", one, "--batch-size", 11) == 3
    assert run(shapes_run, *images, "--out", two, "--batch-size", 11, "--workers", 2) == 3
    assert one.read_bytes() == two.read_bytes() and len(one.read_text().splitlines()) >= 90 and sizes == {11}
    assert Path(f"{one}.errors.csv").read_bytes() == Path(f"{two}.errors.csv").read_bytes()


def test_images_in_memory_are_predicted_like_files(shapes_run, shapes_folder):
    loaded = load_run(shapes_run)
    path = shapes_folder / "val" / "cross" / "0001.jpg"
    (expected,) = loaded.predict(path, topk=3)
    assert len(expected.labels) == 3 and expected.image == str(path) and expected.error is None
    with Image.open(path) as photo:
        pixels = np.array(photo)
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)
        for image in (photo, pixels, [pixels], pixels[None], tensor, path.read_bytes()):
            (prediction,) = loaded.predict(image, topk=3)
            assert (prediction.labels, prediction.probabilities) == (expected.labels, expected.probabilities)
    assert [one.image for one in loaded.predict([pixels, path])] == ["image 0", str(path)]
    assert len(loaded.predict(pixels)[0].labels) == 5 and len(loaded.predict(pixels, topk=99)[0].labels) == 10
    assert loaded.predict([]) == []


def test_an_image_that_cannot_be_read_is_an_error_or_is_marked(shapes_run, shapes_folder, tmp_path):
    loaded, good = load_run(shapes_run), shapes_folder / "val" / "cross" / "0001.jpg"
    (tmp_path / "bad.jpg").write_bytes(good.read_bytes()[:200])
    with pytest.raises(BadImageError, match="broken image: .*bad.jpg: "):
        loaded.predict([good, tmp_path / "bad.jpg"])
    first, second, third = loaded.predict([good, tmp_path / "bad.jpg", np.zeros((4, 4, 3))], skip_bad=True)
    assert first.labels and not second.labels and second.error
    assert "got float64 pixels; expected uint8" in third.error
    with pytest.raises(ConfigError, match="PATHS: .*no such file"):
        loaded.predict(tmp_path / "none")


def test_folders_patterns_lists_and_files_are_expanded_in_order(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    names = "e[1]/1.jpg a/z.jpg a/b/y.PNG a/b/notes.md a/.hidden/x.jpg a/__MACOSX/x.jpg c[1].jpg d.webp"
    for name in names.split():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("a/b/again").symlink_to(tmp_path / "a")
    Path("list.txt").write_text("d.webp\n\nnone.jpg\n")
    assert list_images(["a"]) == ["a/b/y.PNG", "a/z.jpg"]
    assert list_images(["d.webp", "a", "c[1].jpg"]) == ["d.webp", "a/b/y.PNG", "a/z.jpg", "c[1].jpg"]
    assert list_images(["*.webp", "list.txt", "d.webp"]) == ["d.webp", "d.webp", "none.jpg", "d.webp"]
    assert list_images(["?/b/y.*", "a/b/notes.md"]) == ["a/b/y.PNG", "a/b/notes.md"]
    assert list_images(["e[1]/*.jpg"]) == ["e[1]/1.jpg"], "brackets stand for themselves"
    Path("notes.txt").write_text("taken in May\n")
    assert list_images(["d.webp", "notes.txt"]) == ["d.webp"]
    assert "notes.txt is left out: a text whose lines name no image" in caplog.text
    monkeypatch.setattr(sys, "stdin", io.StringIO("d.webp\nx y.jpg\n"))
    assert list_images(["-"]) == ["d.webp", "x y.jpg"]
    Path("empty").mkdir()
    Path("data.txt").write_bytes(b"\0\1")
    with pytest.raises(ConfigError) as error:
        list_images(["empty", "d.wepb", "no*.jpg", "data.txt", "a"])
    assert [str(problem) for problem in error.value.problems] == [
        "PATHS: empty: holds no image",
        "PATHS: d.wepb: no such file or folder; did you mean d.webp?",
        "PATHS: no*.jpg: holds no image",
        "PATHS: data.txt: is not a text file of paths",
    ]


def test_files_that_are_left_out_are_counted_and_lost_transparency_is_named(shapes_run, tmp_path, capsys):
    for name in ("photos/1.JXL", "photos/b/2.jxl", "photos/3.mov", "photos/.hidden", "only/4.jxl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    Image.new("RGBA", (40, 40), (255, 0, 0, 90)).save(tmp_path / "photos" / "clear.png")
    assert run(shapes_run, tmp_path / "photos") == 0
    said = capsys.readouterr().err
    assert f"{tmp_path}/photos; 3 files left out: .jxl (2), .mov (1)" in said and "clear.png, lose it" in said
    assert run(shapes_run, tmp_path / "only") == 2
    assert "holds no image; 1 file left out: .jxl (1)" in capsys.readouterr().err


def test_scores_that_are_not_finite_are_an_error_and_never_an_answer(shapes_run, shapes_folder, tmp_path, capsys):
    content = torch.load(shapes_run / "best.pth.tar", weights_only=True)
    for tensor in content["state_dict"].values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    torch.save(content, tmp_path / "nan.pth.tar")
    assert run(tmp_path / "nan.pth.tar", shapes_folder / "val" / "star") == 2
    assert "RUN: the model has scores that are not finite; fix: name another checkpoint" in capsys.readouterr().err
    words = ["MODEL.WEIGHTS", str(tmp_path / "nan.pth.tar"), "OUT_DIR", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=r"nan.pth.tar: the model has scores that are not finite \(loss nan\); fix"):
        evaluate_weights(load_cfg(shapes_run / "config.yaml", words))


def test_file_names_of_any_bytes_are_written_as_they_are_and_read_back_equal(shapes_run, shapes_folder, tmp_path):
    names = [b"\xff.jpg", "ü.jpg".encode(), b"a\rb.jpg", b"a\nb.jpg", b" a,b.jpg", b'"a".jpg', b"=cmd().jpg"]
    (tmp_path / "in").mkdir()
    for name in names:
        shutil.copy(shapes_folder / "val" / "star" / "0000.jpg", os.fsencode(tmp_path / "in") + b"/" + name)
    assert run(shapes_run, tmp_path / "in", "--out", tmp_path / "out.csv", "--topk", 1) == 0
    assert b"/in/\xff.jpg," in (tmp_path / "out.csv").read_bytes()
    with open(tmp_path / "out.csv", encoding="utf-8", errors="surrogateescape", newline="") as file:
        found = {os.path.basename(os.fsencode(row["path"])) for row in csv.DictReader(file)}
    assert found == set(names)


def test_broken_images_have_a_status_and_a_file_of_their_own(shapes_run, shapes_folder, tmp_path, capsys):
    good = shapes_folder / "val" / "star"
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "empty.jpg").touch()
    files = (tmp_path / "text.jpg", good, tmp_path / "empty.jpg", tmp_path / "list.txt")
    (tmp_path / "list.txt").write_text(f"{tmp_path / 'gone.jpg'}\n")
    assert run(shapes_run, *files, "--out", tmp_path / "skip.csv", "--skip-bad") == 0
    assert run(shapes_run, *files, "--out", tmp_path / "out.csv") == 3
    assert len(read_csv(tmp_path / "out.csv")) == 7
    broken = {Path(row["path"]).name: row["error"] for row in read_csv(tmp_path / "out.csv.errors.csv")}
    assert list(broken) == ["text.jpg", "empty.jpg", "gone.jpg"]
    assert "not an image" in broken["text.jpg"] and "the file is empty" in broken["empty.jpg"]
    assert "the file does not exist" in broken["gone.jpg"]
    errors = capsys.readouterr().err
    assert f"broken image: {tmp_path / 'text.jpg'}: " in errors and "not read: 3 images" in errors
    assert not (tmp_path / "out.csv.partial").exists()


@pytest.fixture
def unfinished(monkeypatch):
    """Return unfinished(WORD, ...): the partial file of a prediction that was killed before its end."""

    def predict(*words) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(journal.Journal, "finish", lambda *args: None)
            assert run(*words) == 0
        return Path(f"{words[words.index('--out') + 1]}.partial")

    return predict


def test_a_killed_prediction_resumes_with_the_same_bytes(shapes_run, shapes_folder, tmp_path, capsys, unfinished):
    words = (shapes_run, shapes_folder / "val", "--out", tmp_path / "out.csv", *SMALL_CHUNKS)
    assert run(*words[:3], tmp_path / "whole.csv", *SMALL_CHUNKS) == 0
    for num_kept, tail in ((3, b""), (2, b'["cut')):
        partial = unfinished(*words)
        partial.write_bytes(b"".join(partial.read_bytes().splitlines(keepends=True)[:num_kept]) + tail)
        capsys.readouterr()
        assert run(*words) == 0
        assert f"resumed after {16 * (num_kept - 1)} of 70 images" in capsys.readouterr().err
        assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
        (tmp_path / "out.csv").unlink()


def test_partial_files_of_others_are_refused(shapes_run, labels_run, shapes_folder, tmp_path, capsys, unfinished):
    out = tmp_path / "out.csv"
    words = [shapes_run, shapes_folder / "val", "--out", out]
    content = unfinished(*words).read_bytes()
    for other in (
        [*words, "--topk", 2],
        [*words, "--set", "TEST.FLIP", "True"],
        [labels_run, *words[1:]],
        [shapes_run, shapes_folder / "val" / "star", "--out", out],
    ):
        capsys.readouterr()
        assert run(*other) == 2 and "has rows of another model" in capsys.readouterr().err
        assert Path(f"{out}.partial").read_bytes() == content and not out.exists()
    assert run(*words) == 0 and out.exists()


def test_names_reach_a_terminal_as_escape_sequences(shapes_run, shapes_folder, tmp_path, capsysbinary, monkeypatch):
    data = (shapes_folder / "val" / "star" / "0000.jpg").read_bytes()
    (tmp_path / "\x1b[2J\u202egpj.jpg").write_bytes(data)
    (tmp_path / "\x1b[3J.jpg").write_text("broken")
    assert run(shapes_run, tmp_path) == 3
    piped = capsysbinary.readouterr()
    assert b"/\x1b[2J" in piped.out and b"\x1b" not in piped.err.split(b"predict:")[0]
    assert b"broken image: " in piped.err and b"/\\x1b[3J.jpg: " in piped.err
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(shapes_run, tmp_path) == 3
    assert b"/\\x1b[2J\\u202egpj.jpg,circle" in capsysbinary.readouterr().out.replace(b'"', b"")


def test_a_full_disk_keeps_what_is_finished(shapes_run, shapes_folder, tmp_path, capsys, monkeypatch):
    words = (shapes_run, shapes_folder / "val", "--out", tmp_path / "out.csv", *SMALL_CHUNKS)

    def fail(*args, **options):
        raise OSError(28, "No space left on device")

    append = journal.Journal._append
    for num_records, is_kept in ((0, False), (4, True)):
        records = iter([append] * num_records)
        monkeypatch.setattr(journal.Journal, "_append", lambda *args, records=records: next(records, fail)(*args))
        assert run(*words) == 2
        error = capsys.readouterr().err
        assert "out.csv cannot be written: No space left on device; f" in error
        assert ("finished images are kept in" in error) == is_kept
        monkeypatch.undo()
    assert run(*words) == 0 and "resumed after 48 of 70 images" in capsys.readouterr().err
    (tmp_path / "out.csv").unlink()
    monkeypatch.setattr("distribuuuu.commands.scan.journal.replacing", fail)
    assert run(*words) == 2 and sorted(path.name for path in tmp_path.iterdir()) == ["out.csv.partial"]
    monkeypatch.undo()
    assert run(*words) == 0 and sorted(path.name for path in tmp_path.iterdir()) == ["out.csv"]


def test_mistakes_are_reported_with_status_2_and_leave_nothing(shapes_run, shapes_folder, tmp_path, capsys):
    image = shapes_folder / "val" / "star" / "0000.jpg"
    (tmp_path / "list.csv.partial").write_text("mine")
    os.mkfifo(tmp_path / "list.txt")
    (tmp_path / "whole.csv").touch()
    for words, message in (
        ([shapes_run, tmp_path / "no.jpg"], "PATHS: .*no.jpg: no such file"),
        ([shapes_run, tmp_path / "list.txt"], "list.txt: not a regular file"),
        ([shapes_run, image, "--out", tmp_path / "out.txt"], r"--out: got .*out.txt; expected .* .csv"),
        ([shapes_run, image, "--out", tmp_path / "no" / "out.csv"], "--out: no such folder"),
        ([shapes_run, image, "--out", tmp_path / "list.csv"], "list.csv.partial: not a valid partial output"),
        ([shapes_run, image, "--out", tmp_path / "whole.csv"], "whole.csv exists already; fix: remove it"),
        ([shapes_run, image, "--threshold", 0.3], "--threshold: the model"),
    ):
        before = sorted(tmp_path.iterdir())
        assert run(*words) == 2, words
        error = capsys.readouterr().err
        assert re.search(message, error, re.DOTALL) and "Traceback" not in error, error
        assert sorted(tmp_path.iterdir()) == before and (tmp_path / "list.csv.partial").read_text() == "mine"
