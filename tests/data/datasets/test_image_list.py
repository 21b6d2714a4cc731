"""Lists of images: valid and invalid CSV files, and multi-label runs, evaluated by mean average precision."""

import os
import pickle
from pathlib import Path

import pytest
from support.packs import pack
from support.runs import message_of, newest, records

from distribuuuu.config import ConfigError
from distribuuuu.data.datasets import image_list
from distribuuuu.data.datasets.image_list import ImageList, Multilabel
from distribuuuu.data.datasets.table_file import scan_table
from distribuuuu.data.loader import build_images
from distribuuuu.engine.preflight import find_run_problems, resolve_num_classes
from distribuuuu.records.read_results import read_results
from distribuuuu.trainer import train_model

# By number of an image, in turn; the names are not in the order of the alphabet.
LABELS = ("wet", "red fur;wet", "", "bee;red fur", "bee")


def write_csv(path: Path, lines: list[str], header: str = "image,labels") -> None:
    path.write_text("".join(f"{line}\n" for line in (header, *lines)), encoding="utf-8")


@pytest.fixture(scope="module")
def root(image_folder, tmp_path_factory) -> Path:
    """A CSV of 48 training images and one of 37 evaluation images; one class is on no evaluation image."""
    root = tmp_path_factory.mktemp("multilabel")
    for split in ("train", "val"):
        images = sorted((image_folder / split).rglob("*.jpg"))
        (root / split).symlink_to(image_folder / split)
        labels = LABELS if split == "train" else ("wet", "", "red fur;wet")
        lines = [f"{path.relative_to(image_folder)},{labels[number % len(labels)]}"
                 for number, path in enumerate(images)]  # fmt: skip
        write_csv(root / f"{split}.csv", lines)
    return root


def words_of(root: Path, *words) -> tuple:
    return ("DATA.NAME", "multilabel", "TRAIN.DATASET", root, "TEST.DATASET", root, "LOSS.NAME", "bce", *words)


@pytest.fixture
def cfg_of(small_cfg, root):
    return lambda *words: small_cfg(*words_of(root, *words))


def test_the_labels_become_vectors_in_the_order_of_the_training_names(cfg_of, root):
    cfg = resolve_num_classes(cfg_of("MODEL.NUM_CLASSES", 0))
    assert cfg.MODEL.NUM_CLASSES == 3 and find_run_problems(cfg, train=True) == []
    train, val = (build_images(cfg, train) for train in (True, False))
    assert train.classes == val.classes == ("bee", "red fur", "wet") and (len(train), len(val)) == (48, 37)
    expected = [[0, 0, 1], [0, 1, 1], [0, 0, 0], [1, 1, 0], [1, 0, 0]]
    assert [train.label(index).tolist() for index in range(5)] == expected
    assert [val.label(index).tolist() for index in range(3)] == [[0, 0, 1], [0, 0, 0], [0, 1, 1]]
    assert train.describe(47) == str(root / "train/cat/015.jpg")
    assert train.read(47) == Path(train.describe(47)).read_bytes()
    again = pickle.loads(pickle.dumps(train))
    assert (again.describe(7), again.label(7).tolist()) == (train.describe(7), train.label(7).tolist())


def test_each_table_is_parsed_once_in_a_start(cfg_of, root, monkeypatch):
    scans = []
    monkeypatch.setattr(image_list, "scan_table", lambda path, spec: scans.append(path) or scan_table(path, spec))
    for name in ("train.csv", "val.csv"):
        os.utime(root / name)  # changed so shortly before that a stored index is not trusted
    cfg = resolve_num_classes(cfg_of("MODEL.NUM_CLASSES", 0))
    assert find_run_problems(cfg, train=True) == [] and build_images(cfg, True) and build_images(cfg, False)
    assert sorted(scans) == [str(root / "train.csv"), str(root / "val.csv")]


def test_what_a_csv_may_say(image_folder, tmp_path):
    absolute = image_folder / "train" / "ant" / "000.jpg"
    lines = [f"x, {absolute} ,  b ;;a;b; ", "", 'y,"one, two.jpg",b']
    (tmp_path / "one, two.jpg").touch()
    write_csv(tmp_path / "train.csv", lines, "\ufeffextra, image ,labels")
    images = Multilabel(Multilabel.open_table(tmp_path / "train.csv"))
    assert images.classes == ("a", "b") and images.describe(0) == str(absolute)
    assert images.describe(1) == str(tmp_path / "one, two.jpg")
    assert [images.label(index).tolist() for index in range(2)] == [[1, 1], [0, 1]]


def test_an_image_of_a_list_has_one_label_which_may_contain_a_semicolon(tmp_path):
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).touch()
    for lines, message in [
        (["a.jpg,cat;dog", "b.jpg,"], "train.csv has images without a label: line 3, 'b.jpg'"),
        (["a.jpg,cat", "./a.jpg,dog"], "names an image again: line 3, './a.jpg' as in line 2"),
    ]:
        write_csv(tmp_path / "train.csv", lines, "path,label")
        with pytest.raises(ConfigError, match=message):
            ImageList(ImageList.open_table(tmp_path / "train.csv"))
    write_csv(tmp_path / "train.csv", lines, "image,labels")
    with pytest.raises(ConfigError, match="has no column path and no column label; its columns are image, labels"):
        ImageList(ImageList.open_table(tmp_path / "train.csv"))
    write_csv(tmp_path / "train.csv", ["a.jpg, b;c "], "path,label")
    images = ImageList(ImageList.open_table(tmp_path / "train.csv"))
    assert (images.classes, images.label(0)) == (("b;c",), 0)


WRONG = {
    "has no column labels; its columns are image, label; did you mean label?": "image,label\na.jpg,x\n",
    "has no column image and no column labels; its columns are ": "",
    "has no line but its header": "image,labels\n",
    "has no label on any line": "image,labels\na.jpg,\n",
    'has lines with another number of fields than the header\'s 2 (a comma within a name needs "quotes"): line 2 has 1;'
    " line 3 has 3": "image,labels\na.jpg\nb.jpg,x,y\nb.jpg,x\n",
    **dict.fromkeys(("has lines without an image: line 2", "names images that do not exist: line 3, 'c.jpg'"),
                    "image,labels\n,x\nc.jpg,x\na.jpg,x\n"),
    "names images that do not exist: line 2, '0.jpg'; line 3, '1.jpg'; line 4, '2.jpg'; line 5, '3.jpg'; line 6,"
    " '4.jpg' and 2 more": "image,labels\n" + "".join(f"{number}.jpg,x\n" for number in range(7)),
    "is not a CSV in UTF-8": "image,labels\na.jpg,\udcff\n",
}  # fmt: skip


def test_a_wrong_csv_is_reported_before_the_start(small_cfg, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jpg").touch()
    write_csv(tmp_path / "val.csv", ["a.jpg,x"])
    for message, text in WRONG.items():
        (tmp_path / "train.csv").write_text(text, encoding="utf-8", errors="surrogateescape")
        problems = find_run_problems(small_cfg(*words_of(tmp_path, "MODEL.NUM_CLASSES", 1)), train=True)
        assert any(f": {tmp_path / 'train.csv'} {message}" in str(problem) for problem in problems), problems


def test_a_class_that_the_training_lacks_is_answered_with_a_near_one(tmp_path):
    (tmp_path / "a.jpg").touch()
    write_csv(tmp_path / "val.csv", ["a.jpg,zbra"])
    with pytest.raises(ConfigError, match=r"zbra \(\S+a.jpg\); did you mean zebra"):
        Multilabel(Multilabel.open_table(tmp_path / "val.csv"), ("horse", "zebra"))


def test_a_row_for_each_label_of_an_image(tmp_path):
    (tmp_path / "a.jpg").touch()
    write_csv(tmp_path / "train.csv", ["a.jpg,cat", "./a.jpg,dog", "a.jpg,cat"])
    images = Multilabel(Multilabel.open_table(tmp_path / "train.csv"))
    assert images.classes == ("cat", "dog") and images.label(0).tolist() == [1, 1] and len(images) == 1


def test_several_labels_are_not_packed(root, tmp_path):
    assert "got labels targets; expected one class" in message_of(pack, tmp_path / "pack", *words_of(root))


@pytest.mark.slow
def test_map_is_the_figure_of_merit_wherever_one_is(cfg_of, tmp_path, capsys):
    train_model(cfg_of("AUG.MIXUP", 0.4, "EMA.HALF_LIFE", 24))
    out = tmp_path / "out"
    evaluations = [entry for entry in records(out) if entry["kind"].startswith("eval")]
    assert [entry["count"] for entry in evaluations] == [37] * 4 and not any("top1" in entry for entry in evaluations)
    content, raw = newest(out), [entry["map"] for entry in evaluations if entry["kind"] == "eval"]
    assert content["best_acc1"] == max(raw) == evaluations[-2]["best_map"]
    assert content["classes"] == ["bee", "red fur", "wet"]
    log = (out / "train.log").read_text()
    assert f"map {raw[1]:.2f} loss" in log and "best map so far: " in log and "top1" not in log
    header = next(line for line in log.splitlines() if "img/s" in line)
    assert header.split()[2:] == ["epoch", "step", "loss", "map", "lr", "img/s", "data", "eta"]
    record = read_results(out / "results.json")
    assert record["accuracy"]["raw"]["last"] == {"epoch": 2, "map": raw[1], "loss": evaluations[-2]["loss"]}
    assert record["accuracy"]["raw"]["best"]["map"] == max(raw) and record["evaluation"]["multilabel"] is True
    table = pytest.importorskip("distribuuuu.commands.table.table", reason="needs the command table")
    assert table.table("table", [str(out)]) == 0
    header, _, row = capsys.readouterr().out.splitlines()[:3]
    cells = dict(zip(header.split(" | "), row.split(" | "), strict=True))
    ema = record["accuracy"]["ema"]["last"]["map"]
    assert cells["mAP here"] == f"{ema:.2f} (n = 1, EMA)" and "top-1 here" not in cells
