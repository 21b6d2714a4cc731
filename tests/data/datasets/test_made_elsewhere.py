"""Data made by other programs on other systems: read where there is one meaning, else named with the cause."""

import os
import shutil
import unicodedata
from pathlib import Path, PureWindowsPath

import pytest
from PIL import Image
from support.archives import write_tar
from support.runs import errors_of, make_cfg

from distribuuuu.data.datasets.file_check import find_reduced
from distribuuuu.data.decode import DEFAULTS
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


def write_table(root: Path, text: str) -> None:
    for split in ("train", "val"):
        (root / f"{split}.csv").write_bytes(text.encode())


def images_of(root: Path, *words: object):
    name = () if "DATA.NAME" in words else ("DATA.NAME", "list")
    cfg = make_cfg(*name, "TRAIN.DATASET", root, "MODEL.NUM_CLASSES", 0, "TRAIN.BATCH_SIZE", 1, *words)
    assert find_run_problems(cfg, train=True) == []
    return [build_images(resolve_num_classes(cfg), train) for train in (True, False)]


FORMS = {
    "as it is": lambda name: f"img/{name}",
    "backslashes": lambda name: str(PureWindowsPath("img", name)),
    "other case": lambda name: f"IMG/{name.lower()}",
    "absolute": lambda name: f"/home/someone/project/d/img/{name}",
    "drive": lambda name: f"C:\\data\\d\\img\\{name}".replace("/", "\\"),
}
NOTE = "3 rows with paths of another system or machine, or in another case or Unicode form (NFC, NFD): "


@pytest.mark.parametrize("form", FORMS)
def test_paths_of_another_system(root, form):
    write = FORMS[form]
    write_table(root, "path,label\n" + "".join(f"{write(name)},{number % 2}\n" for number, name in enumerate(NAMES)))
    images, _ = images_of(root)
    assert [images.describe(number) for number in range(3)] == [str(root / "img" / name) for name in NAMES]
    assert (f"{NOTE}{write(NAMES[0])} is read as img/P0.JPG" in " ".join(images.notes())) == (form != "as it is")


def test_paths_with_more_than_one_meaning_are_refused(root, tmp_path):
    shutil.copy(root / "img/P0.JPG", root / "img/p0.jpg")
    write_table(root, "path,label\nimg/P0.jpg,x\n")
    assert "names images that do not exist: line 2, 'img/P0.jpg'" in errors_of(root, tmp_path, "DATA.NAME", "list")
    write_table(root, "path,label\n/a/d/img/P0.JPG,x\n/b/img/P1.JPG,x\n")
    assert "absolute paths of another machine, of several folders" in errors_of(root, tmp_path, "DATA.NAME", "list")


ROWS = "path{0}label\nimg/P0.JPG{0}x\nimg/P1.JPG{0}y\n"
TEXTS = {
    "mark": ROWS.format(",").encode("utf-8-sig"), "UTF-16": ROWS.format(",").encode("utf-16"),
    "big-endian": b"\xfe\xff" + ROWS.format(",").encode("utf-16-be"), "semicolons": ROWS.format(";").encode(),
    "tabs": ROWS.format("\t").encode(), "empty rows": (ROWS.format(",") + ",\n,\n\n").encode(),
    "named separator": b"sep=;\r\n" + ROWS.format(";").replace("\n", "\r\n").encode(),
    "empty columns": ROWS.format(",").replace("\n", ",,\n").encode(),
    "empty fields at the end": (ROWS.format(",").replace("P0.JPG,x", "P0.JPG,x,,")).encode(),
    "names of columns": ROWS.format(",").replace("path,label", "Path, LABEL ").encode(),
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_spreadsheets(root, text):
    for split in ("train", "val"):
        (root / f"{split}.csv").write_bytes(TEXTS[text])
    images, _ = images_of(root)
    assert images.classes == ("x", "y") and [images.label(number) for number in range(len(images))] == [0, 1]


def test_numbers_that_became_floats(root):
    write_table(root, "path,label\nimg/P0.JPG,1.0\nimg/P1.JPG,2.0\n")
    (root / "val.csv").write_text("path,label\nimg/P0.JPG,2\n")
    images, evaluated = images_of(root)
    assert images.classes == ("1", "2") and evaluated.label(0) == 1
    write_table(root, "path,label\nimg/P0.JPG,1.0\nimg/P1.JPG,1.5\n")
    assert images_of(root)[0].classes == ("1.0", "1.5")


NFC, NFD = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD"))


@pytest.mark.parametrize("source", ["folder", "archive", "list"])
def test_classes_in_another_unicode_form_are_equal_with_a_warning(root, source):
    image = (root / "img/P0.JPG").read_bytes()
    for split, name in (("train", NFC), ("val", NFD)):
        if source == "folder":
            for each in (name, "dog"):
                (root / split / each).mkdir(parents=True)
                (root / split / each / "1.jpg").write_bytes(image)
        elif source == "archive":
            write_tar(root / f"{split}.tar", {f"{name}/1.jpg": image, "dog/1.jpg": image})
        else:
            (root / f"{split}.csv").write_text(f"path,label\nimg/P0.JPG,{name}\nimg/P1.JPG,dog\n", encoding="utf-8")
    family = {"folder": "imagefolder"}.get(source, source)
    images, evaluated = images_of(root, "DATA.NAME", family)
    assert evaluated.classes == images.classes == (NFC, "dog")
    assert [evaluated.label(number) for number in range(2)] == [0, 1]
    assert "Unicode form only (NFC, NFD)" in evaluated.notes()[-1] and not images.notes()


def test_files_in_another_unicode_form(root):
    os.rename(root / "img/P0.JPG", root / "img" / f"{NFD}.jpg")
    write_table(root, f"path,label\nimg/{NFC}.jpg,x\n")
    images, _ = images_of(root)
    assert images.describe(0).endswith(NFD + ".jpg") and "1 row with paths of another" in images.notes()[0]


def test_classes_that_differ_by_case_are_named(root, tmp_path):
    (root / "train.csv").write_text("path,label\nimg/P0.JPG,Cat\n")
    (root / "val.csv").write_text("path,label\nimg/P0.JPG,cat\n")
    message = errors_of(root, tmp_path, "DATA.NAME", "list")
    assert "the training data lacks: cat" in message and "they differ by case" in message


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_list_of_paths(root, tmp_path, encoding):
    (tmp_path / "list.txt").write_bytes(f"{root}/img/P0.JPG\r\n\r\n{root}/img/P1.JPG\r\n".encode(encoding))
    assert list_images([str(tmp_path / "list.txt")]) == [f"{root}/img/P0.JPG", f"{root}/img/P1.JPG"]


def test_class_folders_whose_files_have_other_endings(root, tmp_path):
    for split in ("train", "val"):
        for name, ending in (("cartoon", ".gif"), ("portrait", ".jfif"), ("scraped", ""), ("phone", ".jxl")):
            (root / split / name).mkdir(parents=True)
            image = root / split / name / f"1{ending}"
            if ending == ".jxl":
                image.write_bytes(b"\0\0\0\x18JXL ")
            else:
                Image.new("RGB", (8, 8)).save(image, format="GIF" if ending == ".gif" else "JPEG")
    message = errors_of(root, tmp_path)
    assert "without an image: phone, scraped; they hold other files" in message
    assert "no ending (1)" in message and "rename" in message and ".jxl (1)" in message and "convert" in message
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
