"""Splits of a folder: shares, groups, duplicates, folds, the command and its errors."""

import csv
import itertools
import os
import random
import shlex
import shutil
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image
from support.archives import files_of
from support.images import draw_folder

from distribuuuu.commands.arguments import parse_args
from distribuuuu.commands.main import start_command
from distribuuuu.commands.scan import splitting as split_module
from distribuuuu.commands.scan.splitting import list_images, plan_split, write_split
from distribuuuu.config import load_cfg
from distribuuuu.data.datasets.image_list import ImageList
from distribuuuu.data.loader import build_images
from distribuuuu.engine.preflight import find_run_problems

COUNTS = {"ant": 31, "bee": 20, "cat": 7, "dog": 2, "one": 1}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Files that differ in content and size, in an order of creation that is not that of their names."""
    paths = [(name, number) for name, count in COUNTS.items() for number in range(count)]
    random.Random(0).shuffle(paths)
    for name, number in paths:
        path = tmp_path / "images" / name / f"p{number // 3}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"{name} {number}".encode() * (1 + number % 3))
    return tmp_path / "images"


def rows_of(path: Path) -> list[tuple[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return [(row["path"], row["label"]) for row in csv.DictReader(file)]


def run(*args) -> int:
    return start_command("split", "distribuuuu split", [str(arg) for arg in args])


def test_the_classes_keep_their_shares(folder, tmp_path):
    images = list_images(folder)
    write_split(images, tmp_path / "out", plan_split(images, val=0.25, test=0.15)[0])
    found = {name: rows_of(tmp_path / "out" / f"{name}.csv") for name in ("train", "val", "test")}
    names = [row for rows in found.values() for row in rows]
    assert len(set(names)) == len(names) == sum(COUNTS.values())
    for name, share in {"train": 0.6, "val": 0.25, "test": 0.15}.items():
        counts = Counter(label for _, label in found[name])
        for label, total in COUNTS.items():
            assert abs(counts[label] - share * total) <= 1, (name, label)
        assert abs(len(found[name]) - share * len(names)) <= 2
    assert {label for _, label in found["train"]} == set(COUNTS)


def test_a_split_depends_on_names_and_seed_alone(folder, tmp_path):
    files = plan_split(list_images(folder), val=0.3, seed=4)
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert plan_split(list_images(tmp_path / "elsewhere"), val=0.3, seed=4) == files
    assert plan_split(list_images(folder), val=0.3, seed=5) != files


def test_a_group_and_equal_files_are_never_divided(folder):
    (folder / "ant" / "copy.jpg").write_bytes((folder / "bee" / "p0" / "001.jpg").read_bytes())
    names, part_of = (images := list_images(folder)).names, {}
    lists, notes = plan_split(images, val=0.3, test=0.2, pattern=r"(p\d+)/")
    for file, indices in lists.items():
        part_of |= {names[index]: file for index in indices}
    parts = {}
    for name, file in part_of.items():
        if "/p" in name:
            parts.setdefault(name.split("/")[1], set()).add(file)
    assert len(parts) == 11 and all(len(files) == 1 for files in parts.values())
    assert part_of["ant/copy.jpg"] == part_of["bee/p0/001.jpg"]
    assert any("equal files in several classes: ant/copy.jpg = bee/p0/001.jpg" in note for note in notes)
    assert all(len(indices) > 0.1 * len(names) for indices in lists.values())


def test_each_image_is_validated_in_one_fold(folder, tmp_path):
    images = list_images(folder)
    write_split(images, tmp_path / "out", plan_split(images, val=0, folds=4, test=0.1)[0])
    test = rows_of(tmp_path / "out" / "test.csv")
    validated = []
    for number in range(1, 5):
        train, val = (rows_of(tmp_path / "out" / f"fold_{number}" / f"{name}.csv") for name in ("train", "val"))
        assert not {*train} & {*val} and not {*train, *val} & {*test}
        assert {label for _, label in train} == set(COUNTS)
        assert len(train) + len(val) + len(test) == sum(COUNTS.values())
        validated += val
    assert len(set(validated)) == len(validated) == sum(COUNTS.values()) - len(test) - 1  # `one` only trains


def test_the_command(folder, tmp_path, capsys):
    assert run(folder, "--val", 0.2, "--out", tmp_path / "out") == 0
    text = capsys.readouterr().out
    assert "61 images of 5 classes" in text and "val.csv" in text and f" finetune {tmp_path / 'out'}\n" in text
    assert f"train --cfg photographs DATA.NAME list TRAIN.DATASET {tmp_path / 'out'} TEST.DATASET" in text
    before = (tmp_path / "out" / "val.csv").read_bytes()
    assert run(folder, "--val", 0.3, "--out", tmp_path / "out") == 2
    assert "train.csv and" not in (error := capsys.readouterr().err) and "exists already" in error
    assert (tmp_path / "out" / "val.csv").read_bytes() == before


@pytest.mark.parametrize("side, sizes", [(28, "128 TEST.IM_SIZE 146"), (200, "160 TEST.IM_SIZE 183"), (300, "")])
def test_the_command_that_is_printed_trains_with_sizes_that_suit_images_and_weights(
    tmp_path, capsys, side, sizes, monkeypatch
):
    for number in range(60):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (side + 9 * number, side), (number, 0, 0)).save(path)
    (tmp_path / "images" / "a" / "broken.png").write_bytes(b"no image")
    opened = []
    room = "distribuuuu.commands.split.split"
    monkeypatch.setattr(f"{room}.open_regular", lambda path: opened.append(path) or open(path, "rb"))
    monkeypatch.setattr(f"{room}.MAX_HEADERS", 10)
    assert run(tmp_path / "images", "--val", 0.3, "--out", tmp_path / "lists") == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert 5 <= len(opened) <= 10 and line.startswith("to train: distribuuuu train --cfg photographs ")
    assert line.endswith(f" TRAIN.IM_SIZE {sizes}") if sizes else "IM_SIZE" not in line
    cfg, _ = parse_args("", shlex.split(line.removeprefix("to train: distribuuuu train ")), train=True)
    assert cfg.OUT_DIR == "exp/lists" and cfg.OPTIM.MAX_EPOCH <= 30 and cfg.MODEL.NUM_CLASSES == 2
    assert build_images(cfg, train=True).classes == ("a", "b")


def test_wrong_flags(folder, tmp_path, capsys):
    for words, message in {
        "--val 1.5": "--val: got 1.5; expected a share above 0 and below 1", "": "--val --folds is required",
        "--val 0.5 --folds 3": "--folds: not allowed with", "--folds 1": "--folds: got 1; expected 2 or more",
        "--val 0.6 --test 0.4": "--val, --test: got 0.6 and 0.4", "--val 0.2 --group-by (": "a regular expression",
        "--val 0.2 --group-by patient": "'patient' matches no name; the first is 'p0/000.jpg'",
    }.items():  # fmt: skip
        assert run(folder, "--out", tmp_path / "out", *words.split()) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_folders_that_cannot_be_split(tmp_path, capsys):
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    (tmp_path / "bytes" / "cat").mkdir(parents=True)
    with open(os.fsencode(tmp_path / "bytes" / "cat") + b"/\xff.jpg", "wb") as file:
        file.write(b"1")
    draw_folder(tmp_path, "few", {"cat": 2, "dog": 2})
    for name, words, message in [
        ("empty", "--val 0.2", "has no images in class folders"),
        ("bytes", "--val 0.2", "names that a CSV in UTF-8 cannot hold: 'cat/\\udcff.jpg'"),
        *(("few", words, "none of 4 images is left for") for words in (
            "--val 0.1", "--folds 5", "--val 0.2 --group-by jpg", "--val 0.5 --test 0.01")),
    ]:  # fmt: skip
        assert run(tmp_path / name, *words.split(), "--out", tmp_path / "out") == 2
        assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


NAMES = ["a\rb.jpg", "a\nb.jpg", "a\r\nb.jpg", " a.jpg", 'a"b.jpg', '"a".jpg', "a,b.jpg", "\ta.jpg", "=cmd().jpg",
         "-1.jpg", "a;b.jpg", "\x1b[2J.jpg", "\u202egpj.jpg", "\x85a.jpg", "a\u2028b.jpg", "\ufeffa.jpg"]  # fmt: skip
LABELS = ("cat", "ca\rt", "ca\nt", '"cat"', "c,t", '" cat', "=1+1")


def test_names_of_any_characters_are_read_back_equal(tmp_path, capsys):
    for number, (label, name) in enumerate(itertools.product(LABELS, NAMES)):
        path = tmp_path / "images" / label / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]))
    assert run(tmp_path / "images", "--val", 0.4, "--out", tmp_path / "out") == 0
    found = []
    for part in ("train", "val"):
        images = ImageList(ImageList.open_table(tmp_path / "out" / f"{part}.csv"))
        names = [os.path.normpath(images.describe(index)) for index in range(len(images))]
        assert all(Path(name).parent.name == images.classes[images.label(at)] for at, name in enumerate(names))
        found += names
    assert sorted(found) == sorted(str(tmp_path / "images" / label / name) for label in LABELS for name in NAMES)
    printed = capsys.readouterr().out
    assert not set(printed) & set("\x1b\r\u202e") and "rows" not in printed


def test_a_split_that_is_killed_is_repeated_and_a_finished_one_stays(folder, tmp_path, monkeypatch):
    words = (folder, "--folds", 3, "--out", tmp_path / "out")
    targets, replacing = itertools.count(), split_module.replacing

    def write(path):
        if next(targets) == 1:
            raise KeyboardInterrupt
        return replacing(path)

    monkeypatch.setattr(split_module, "replacing", write)
    with pytest.raises(KeyboardInterrupt):
        run(*words)
    monkeypatch.undo()
    assert run(*words[:-1], tmp_path / "whole") == run(*words) == 0
    assert (before := files_of(tmp_path / "out")) == files_of(tmp_path / "whole")
    assert run(*words) == 0 and files_of(tmp_path / "out") == before


def write_table(folder: Path, path: Path, prefix: str = "") -> None:
    """Write a table of the images of a folder, `id,breed`, in another order, without the ends of the names."""
    names = sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.jpg"))
    random.Random(1).shuffle(names)
    path.write_text("id,breed\n" + "".join(f"{prefix}{name},{name.partition('/')[0]}\n" for name in names))


COLUMNS = ("DATA.TABLE.path", "id", "DATA.TABLE.label", "breed")


@pytest.mark.parametrize("place", ["beside", "absolute"])
def test_a_table_is_split_like_the_folder_of_its_images(folder, tmp_path, capsys, place):
    table, prefix = tmp_path / "labels.csv", {"beside": "images/", "absolute": f"{folder}/"}[place]
    write_table(folder, table, prefix)
    (folder / "ant" / "copy.jpg").write_bytes((folder / "bee" / "p0" / "000.jpg").read_bytes())
    with table.open("a") as file:
        file.write(f"{prefix}ant/copy,ant\n")
    out, words = tmp_path / "lists", (*COLUMNS, "DATA.TABLE.template", "{}.jpg")
    assert run(table, "--val", 0.25, "--test", 0.15, "--out", out, *words) == 0
    text = capsys.readouterr().out
    assert "62 images of 5 classes" in text and "equal files in several classes" in text
    cfg = load_cfg(None, f"DATA.NAME list TRAIN.DATASET {out} TEST.DATASET {out} MODEL.NUM_CLASSES 5".split())
    assert find_run_problems(cfg, train=True) == []
    parts = {part: ImageList(ImageList.open_table(out / f"{part}.csv")) for part in ("train", "val", "test")}
    found = {part: {os.path.realpath(images.describe(index)) for index in range(len(images))}
             for part, images in parts.items()}  # fmt: skip
    assert set.union(*found.values()) == {os.path.realpath(path) for path in folder.rglob("*.jpg")}
    assert sum(map(len, found.values())) == 62
    equal = {str(folder / "ant" / "copy.jpg"), str(folder / "bee" / "p0" / "000.jpg")}
    assert any(equal <= names for names in found.values())
    for images in parts.values():
        for index in range(len(images)):
            assert f"/images/{images.classes[images.label(index)]}/" in os.path.realpath(images.describe(index))


def test_tables_that_cannot_be_split(folder, tmp_path, capsys):
    write_table(folder, folder / "a.csv")
    for source, words, message in [
        (folder / "a.csv", (), "has no column path and no column label; its columns are id, breed"),
        (folder / "a.csv", COLUMNS, "images that do not exist"),
        (folder / "a.csv", ("DATA.TABEL.path", "id"), "DATA.TABEL.path (command line): no such key"),
        (folder, COLUMNS, "expected KEY VALUE pairs after a table only"),
        (folder / "non.csv", (), "no such folder"),
    ]:
        assert run(source, "--val", 0.2, "--out", tmp_path / "out", *words) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
