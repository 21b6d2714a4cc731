"""Data made by other programs on other systems: read where there is one meaning, else named with the cause."""

import shutil
from pathlib import Path

import pytest
from PIL import Image
from support.runs import errors_of, make_cfg

from distribuuuu.data.datasets.file_check import find_reduced
from distribuuuu.data.image_file import DEFAULTS
from distribuuuu.data.loader import build_images
from distribuuuu.engine.preflight import find_run_problems, resolve_num_classes
from distribuuuu.inference.image_arguments import list_images

NAMES = ("P0.JPG", "P1.JPG", "sub/P2.JPG")


@pytest.fixture
def root(tmp_path) -> Path:
    for name in NAMES:
        (tmp_path / "d/img" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "d/img" / name, format="JPEG")
    return tmp_path / "d"


def write_table(root: Path, text: str, encoding: str = "utf-8") -> None:
    for split in ("train", "val"):
        (root / f"{split}.csv").write_bytes(text.encode(encoding))


def images_of(root: Path, *words: object):
    name = () if "DATA.NAME" in words else ("DATA.NAME", "list")
    cfg = make_cfg(*name, "TRAIN.DATASET", root, "MODEL.NUM_CLASSES", 0, "TRAIN.BATCH_SIZE", 1, *words)
    assert find_run_problems(cfg, train=True) == []
    return [build_images(resolve_num_classes(cfg), train) for train in (True, False)]


ROWS = "path{0}label\nimg/P0.JPG{0}x\nimg/P1.JPG{0}y\n"
TEXTS = {
    "mark": ROWS.format(",").encode("utf-8-sig"), "UTF-16": ROWS.format(",").encode("utf-16"),
    "big-endian": b"\xfe\xff" + ROWS.format(",").encode("utf-16-be"),
    "empty rows": (ROWS.format(",") + ",\n,\n\n").encode(),
    "empty columns": ROWS.format(",").replace("\n", ",,\n").encode(),
    "empty fields at the end": (ROWS.format(",").replace("P0.JPG,x", "P0.JPG,x,,")).encode(),
    "spaces": ROWS.format(",").replace("path,label", "path, label ").encode(),
    "backslashes": ROWS.format(",").replace("/", "\\").encode(),
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_spreadsheets(root, text):
    for split in ("train", "val"):
        (root / f"{split}.csv").write_bytes(TEXTS[text])
    images, _ = images_of(root)
    assert images.classes == ("x", "y") and [images.label(number) for number in range(len(images))] == [0, 1]


def test_a_text_in_another_encoding_is_named(root, tmp_path):
    write_table(root, "path,label\nimg/P0.JPG,caf\u00e9\n", "cp1252")
    assert "is not a CSV in UTF-8" in errors_of(root, tmp_path, "DATA.NAME", "list")


def test_classes_that_differ_by_case_are_named(root, tmp_path):
    (root / "train.csv").write_text("path,label\nimg/P0.JPG,Cat\n")
    (root / "val.csv").write_text("path,label\nimg/P0.JPG,cat\n")
    message = errors_of(root, tmp_path, "DATA.NAME", "list")
    assert "the training data lacks: cat" in message and "did you mean Cat" in message


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_list_of_paths(root, tmp_path, encoding):
    (tmp_path / "list.txt").write_bytes(f"{root}/img/P0.JPG\r\n\r\n{root}/img/P1.JPG\r\n".encode(encoding))
    assert list_images([str(tmp_path / "list.txt")]) == [f"{root}/img/P0.JPG", f"{root}/img/P1.JPG"]


def test_class_folders_whose_files_have_other_endings(root, tmp_path):
    for split in ("train", "val"):
        for name, ending in (("cartoon", ".gif"), ("portrait", ".jfif"), ("scraped", ""), ("phone", ".heic")):
            (root / split / name).mkdir(parents=True)
            image = root / split / name / f"1{ending}"
            if ending == ".heic":
                image.write_bytes(b"\0\0\0\x18ftypheic")
            else:
                Image.new("RGB", (8, 8)).save(image, format="GIF" if ending == ".gif" else "JPEG")
    message = errors_of(root, tmp_path)
    assert "without an image: phone, scraped; they hold other files" in message
    assert "no ending (1)" in message and "rename" in message and ".heic (1)" in message and "convert" in message
    for split in ("train", "val"):
        shutil.rmtree(root / split / "scraped")
        shutil.rmtree(root / split / "phone")
    assert [len(images) for images in images_of(root, "DATA.NAME", "imagefolder")] == [2, 2]


@pytest.mark.parametrize("mode, color, is_noted", [("RGBA", (0, 0, 0, 9), True), ("RGBA", (0, 0, 0, 255), False)])
def test_images_that_lose_their_transparency_are_noted(tmp_path, mode, color, is_noted):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.new(mode, (8, 8), color).save(tmp_path / split / "a/1.png")
    images, _ = images_of(tmp_path, "DATA.NAME", "imagefolder")
    assert bool(find_reduced(images, DEFAULTS)) == is_noted
    assert not is_noted or "with transparency" in find_reduced(images, DEFAULTS)
