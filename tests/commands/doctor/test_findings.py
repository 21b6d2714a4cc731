"""The check of a data set: what is found in made folders, and that odd files do not stop it."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.images import draw_folder
from support.packs import pack

from distribuuuu.commands.doctor.findings import examine, open_cfg, open_folder
from distribuuuu.commands.main import start_command
from distribuuuu.commands.scan.duplicates import find_groups
from distribuuuu.commands.scan.scan import scan_images
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.decode import DEFAULTS, DecodeOptions


def check(root: Path, options: DecodeOptions = DEFAULTS, workers: int = 0) -> dict:
    return report_on(open_folder(root), options, workers)


def report_on(splits, options: DecodeOptions = DEFAULTS, workers: int = 0) -> dict:
    scan = scan_images(splits, options, workers, lambda num: None)
    return examine(scan, find_groups(scan, options), options, {})


def kinds(report: dict) -> dict[str, dict]:
    assert len({finding["kind"] for finding in report["findings"]}) == len(report["findings"])
    return {finding["kind"]: finding for finding in report["findings"]}


def names(finding: dict, root: Path) -> list[str]:
    return [os.path.relpath(file, root) for file in finding["files"]]


@pytest.fixture
def root(tmp_path) -> Path:
    draw_folder(tmp_path, "train", {"ant": 12, "bee": 14}, (60, 50))
    draw_folder(tmp_path, "val", {"ant": 3, "bee": 4}, (60, 50))
    return tmp_path


def test_a_clean_folder_has_no_findings(root):
    report = check(root)
    assert report["status"] == "clean" and report["findings"] == []
    assert report["splits"]["train"] == {"images": 26, "classes": {"ant": 12, "bee": 14}}
    assert report["suggested"]["TRAIN.IM_SIZE"] == 50


def test_damaged_images_are_named_with_the_reason(root):
    whole = (root / "train/ant/000.jpg").read_bytes()
    (root / "train/ant/cut.jpg").write_bytes(whole[:-100])
    Image.open(root / "train/ant/001.jpg").save(root / "train/ant/cut.png")
    (root / "train/ant/cut.png").write_bytes((root / "train/ant/cut.png").read_bytes()[:-100])
    (root / "val/bee/empty.jpg").touch()
    (root / "val/bee/text.jpg").write_text("hello")
    Image.new("RGB", (90, 80)).save(root / "val/ant/big.png")
    found = kinds(check(root, DecodeOptions(max_pixels=4000)))
    expected = ["train/ant/cut.jpg", "train/ant/cut.png", "val/bee/empty.jpg", "val/bee/text.jpg"]
    assert sorted(names(found["broken"], root)) == expected
    assert "DATA.MAX_PIXELS 7200" in found["not_read"]["fix"] and names(found["not_read"], root) == ["val/ant/big.png"]
    assert "the file is empty" in found["broken"]["reasons"][str(root / "val/bee/empty.jpg")]
    assert {finding["severity"] for finding in found.values()} == {"problem"} and len(found) == 2


def test_images_rotated_by_their_exif_data_are_noted(root):
    exif = Image.Exif()
    exif[0x0112] = 6
    noise = np.random.default_rng(0).integers(0, 256, (45, 40, 3), np.uint8)
    Image.fromarray(noise).save(root / "val/bee/rotated.jpg", exif=exif)
    report = check(root)
    assert names(kinds(report)["rotated"], root) == ["val/bee/rotated.jpg"] and report["status"] == "clean"
    assert not kinds(check(root, DecodeOptions(exif_rotate=True)))


def test_copies_are_sorted_by_what_they_mean(root):
    shutil.copy(root / "train/ant/000.jpg", root / "train/ant/copy.jpg")
    Image.open(root / "train/ant/001.jpg").save(root / "val/ant/leak.jpg", quality=60)
    shutil.copy(root / "train/bee/002.jpg", root / "train/ant/contradiction.jpg")
    found = kinds(check(root))
    assert found.keys() == {"leakage", "contradicting_labels", "duplicates"}
    assert [finding["severity"] for finding in found.values()] == ["problem", "problem", "note"]
    (leak,), (contradiction,), (copy,) = (finding["groups"] for finding in found.values())
    assert not leak["identical"] and contradiction["identical"] and copy["identical"]
    assert names(found["leakage"], root) == ["train/ant/001.jpg", "val/ant/leak.jpg"]
    assert [file["classes"] for file in contradiction["files"]] == [["ant"], ["bee"]]
    assert [file["split"] for file in leak["files"]] == ["train", "val"]


def test_files_that_are_left_out_what_images_lose_and_other_class_folders_are_noted(root):
    (root / "train/ant/phone.jxl").touch()
    for path in (root / "train/ant").glob("*.jpg"):
        Image.open(path).convert("RGBA").rotate(10).save(path.with_suffix(".png"))
    draw_folder(root, "train", {"caf\xe9": 2, "empty": 0})
    draw_folder(root, "val", {"cafe\u0301": 2, "BEE": 2})
    found = kinds(check(root))
    for said in ("1 file left out", ".jxl (1)", "images with transparency, e.g. ", "Unicode form"):
        assert said in found["noted"]["message"]
    assert names(found["unknown_class"], root) == ["val/BEE"] and names(found["empty_class"], root) == ["train/empty"]
    assert found["noted"]["severity"] == "note"


def test_odd_files_do_not_stop_the_check(root):
    os.mkfifo(root / "train/ant/pipe.jpg")
    os.symlink(root / "train", root / "train/ant/loop")
    os.symlink("missing", root / "train/ant/dangling.jpg")
    (root / "train/ant/folder.jpg").mkdir()
    (root / "train/ant/.hidden.jpg").write_text("x")
    shutil.copy(root / "train/ant/001.jpg", os.fsencode(root / "train/ant") + b"/\xff.jpg")
    (root / "train/stray.jpg").write_text("x")
    found = kinds(check(root))
    assert names(found["broken"], root) == ["train/ant/dangling.jpg", "train/ant/pipe.jpg"]
    assert "outside the class folders" in found["noted"]["message"]
    assert os.fsencode(found["duplicates"]["files"][1]).endswith(b"\xff.jpg")


def test_a_folder_of_classes_is_one_split_and_a_class_may_be_called_test(root, tmp_path):
    report = check(root / "train")
    assert list(report["splits"]) == ["all"] and report["images"] == 26
    draw_folder(tmp_path / "x", "", {"test": 3, "bee": 3})
    assert list(open_folder(tmp_path / "x")["all"].classes) == ["bee", "test"]
    draw_folder(tmp_path / "x", "Train", {"bee": 3})
    assert list(open_folder(tmp_path / "x")) == ["Train", "test"]


def test_lists_with_one_label(root):
    (root / "train.csv").write_text("path,label\ntrain/ant/000.jpg,x\ntrain/ant/001.jpg,y\n")
    (root / "val.csv").write_text("path,label\ntrain/ant/000.jpg,y\nno.jpg,z\n")
    (root / "no.jpg").touch()
    cfg = load_cfg(None, ["DATA.NAME", "list", "TRAIN.DATASET", str(root)])
    found = kinds(report := report_on(open_cfg(cfg)))
    assert found.keys() == {"broken", "unknown_class", "leakage", "contradicting_labels"}
    assert report["splits"]["val"]["classes"] == {"y": 1, "z": 1} and names(found["broken"], root) == ["no.jpg"]
    (root / "val.csv").write_text("path,label\nval,x\n")
    with pytest.raises(ConfigError, match="val: cannot be read"):  # which is no damage
        report_on(open_cfg(cfg))


def test_packed_data(root):
    shutil.copy(root / "train/ant/003.jpg", root / "val/ant/x.jpg")
    pack(root / "packed", "TRAIN.DATASET", root, split="both")
    cfg = load_cfg(None, ["DATA.NAME", "packed", "TRAIN.DATASET", str(root / "packed"), "MODEL.NUM_CLASSES", "2"])
    (leak,) = kinds(report_on(open_cfg(cfg)))["leakage"]["groups"]
    assert ["003.jpg" in leak["files"][0]["file"], "x.jpg" in leak["files"][1]["file"]] == [True, True]


def test_the_sets_of_a_config(root):
    words = ["TRAIN.DATASET", str(root), "MODEL.NUM_CLASSES", "2"]
    assert report_on(open_cfg(load_cfg(None, words)))["splits"]["val"]["images"] == 7
    assert list(open_cfg(load_cfg(None, [*words, "TEST.SPLIT", "train"]))) == ["train"]
    with pytest.raises(ConfigError, match=r"TEST\.SPLIT.*no folder 'vall'"):
        open_cfg(load_cfg(None, [*words, "TEST.SPLIT", "vall"]))
    assert list(open_cfg(load_cfg(None, ["DATA.NAME", "dummy", "MODEL.NUM_CLASSES", "3"]))) == ["train", "test"]


def test_a_folder_with_one_class_is_a_problem(root, tmp_path):
    draw_folder(tmp_path / "one", "ant", {"": 12})
    finding = kinds(check(tmp_path / "one"))["one_class"]
    assert finding["severity"] == "problem" and finding["message"] == "all: the only class is 'ant'"
    (tmp_path / "parent").mkdir()
    for split in ("train", "val"):
        shutil.move(root / split, tmp_path / "parent" / "my_images" / split)
    found = kinds(check(tmp_path / "parent"))
    assert found["one_class"]["fix"] == f"use {tmp_path}/parent/my_images in place of {tmp_path}/parent"


def test_a_folder_without_evaluation_images_names_the_command_that_splits_it(root):
    shutil.rmtree(root / "val")
    found = kinds(check(root))
    assert found.keys() == {"one_split"}
    assert found["one_split"]["fix"] == f"distribuuuu split {root / 'train'} --val 0.2 --out train_lists"
    assert kinds(check(root / "train"))["one_split"]["message"] == "no images to evaluate: all is the only split"


def test_a_class_may_be_called_train(tmp_path, capsys):
    draw_folder(tmp_path, "vehicles", {"bus": 12, "car": 12, "train": 12})
    assert check(tmp_path / "vehicles")["splits"]["all"]["classes"] == {"bus": 12, "car": 12, "train": 12}
    words = [str(tmp_path / "vehicles"), "--val", "0.25", "--out", str(tmp_path / "lists")]
    assert start_command("split", "split", words) == 0 and "36 images of 3 classes" in capsys.readouterr().out
