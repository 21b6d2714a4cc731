"""Checks of the data at the start: broken files, ignored files, missing classes."""

import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.images import age, draw_folder, with_png_size
from support.runs import errors_of, small_options

from distribuuuu.config import load_cfg
from distribuuuu.data.datasets import file_check
from distribuuuu.data.datasets import index as index_module
from distribuuuu.data.datasets.imagefolder import ImageFolder
from distribuuuu.data.loader import BadImageError, build_loader
from distribuuuu.engine.preflight import find_run_problems
from distribuuuu.launch.detect import detect_launch

PNG = io.BytesIO()
Image.effect_noise((30, 20), 50).save(PNG, "PNG")
PNG = PNG.getvalue()


@pytest.fixture
def root(tmp_path) -> Path:
    """Three classes of 5 training and 4 evaluation images, in folders that changed long ago."""
    root = tmp_path / "data"
    draw_folder(root, "train", {"ant": 5, "bee": 5, "cat": 5})
    draw_folder(root, "val", {"ant": 4, "bee": 4, "cat": 4})
    age(root)
    return root


def clear(root: Path) -> None:
    """Delete the records of checks, and the indexes."""
    shutil.rmtree(root.parent / "cache", ignore_errors=True)
    index_module._opened.clear()


def load(root: Path, train: bool = False, *words):
    words = ("DATA.CACHE_DIR", root.parent / "cache", *words)
    cfg = load_cfg(None, small_options(root, root.parent / "out", *words))
    return build_loader(cfg, detect_launch(), torch.device("cpu"), train)


def refusal(root: Path, train: bool = False, *words) -> str:
    with pytest.raises(BadImageError) as caught:
        load(root, train, *words)
    return str(caught.value)


@pytest.fixture
def looks(monkeypatch) -> list[str]:
    seen, check_file = [], file_check.check_file
    monkeypatch.setattr(file_check, "check_file", lambda path, *rest: seen.append(path) or check_file(path, *rest))
    return seen


JPEG_NAME = "val/bee/002.jpg"
BREAK = {
    "empty": (lambda data: b"", "the file is empty"),
    "text": (lambda data: b"<html>404</html>" * 20, "it is an HTML page"),
    "cut in the header": (lambda data: data[:100], "."),
    "cut in the pixels": (lambda data: data[: len(data) // 2], "."),
    "cut png": (lambda data: PNG[: len(PNG) // 2], "."),
    "zeros": (lambda data: bytes(len(data)), "not an image of a known format"),
}


def test_a_broken_evaluation_image_is_reported_before_the_first_epoch(root):
    path = root / JPEG_NAME
    whole = path.read_bytes()
    (root / "val/cat/000.jpg").unlink()
    (root / "val/cat/000.jpg").symlink_to("nowhere.jpg")
    for spoil, said in BREAK.values():
        path.write_bytes(spoil(whole))
        message = refusal(root)
        assert f"TEST.DATASET: 2 of 12 images are broken: {path}: " in message and said in message, message
        assert "cat/000.jpg: the file does not exist" in message
        assert "repair or remove them, or set DATA.ON_BAD_IMAGE skip" in message
        notes = load(root, False, "DATA.ON_BAD_IMAGE", "skip").notes
        assert len(notes) == 1 and "2 of 12 images are broken" in notes[0]
    path.write_bytes(with_png_size(PNG, 1 << 16, 1 << 16))
    for words in ((), ("DATA.ON_BAD_IMAGE", "skip")):
        message = refusal(root, False, *words)
        assert f"cannot read {path}: 4294967296 pixels are more than DATA.MAX_PIXELS" in message
        assert message.endswith("; fix: set DATA.MAX_PIXELS 4294967296 or more, or scale the image down")


def test_sound_files_of_every_format_pass_without_being_decoded(root, monkeypatch):
    with Image.open(root / JPEG_NAME) as image:
        image.load()
    kinds = [(kind, {}) for kind in ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM", "GIF")]
    with monkeypatch.context() as patch:
        patch.setattr(file_check, "decode", None)
        for kind, words in [*kinds, *((kind, {"exif": bytes(30000)}) for kind in ("JPEG", "PNG", "WEBP"))]:
            image.save(root / JPEG_NAME, kind, **words)
            clear(root)
            assert load(root).notes == [], kind
    image.save(root / JPEG_NAME)
    with open(root / JPEG_NAME, "ab") as file:
        file.write(b"\0" * 9)  # bytes after its end: it is decoded
    clear(root)
    assert load(root).notes == []


def test_an_empty_training_image_is_reported_at_the_start_and_few_are_opened(root, looks):
    (root / "train/bee/003.jpg").write_bytes(b"no image")
    assert load(root, True).notes == [] and len(looks) == 8
    clear(root)
    (root / "train/bee/003.jpg").write_bytes(b"")
    message = refusal(root, True)
    assert f"TRAIN.DATASET: 1 of 15 images are broken: {root}/train/bee/003.jpg: the file is empty" in message
    assert "1 of 15 images are broken" in load(root, True, "DATA.ON_BAD_IMAGE", "skip").notes[0]
    Image.fromarray(np.zeros((9, 9), np.float32)).save(root / "train/ant/001.tif")  # intact, but not read
    for path in (root / "train").glob("*/*.jpg"):
        path.unlink()
    clear(root)
    assert "float32 pixels" in (message := refusal(root, True)) and "DATA.PIXELS float32" in message


def test_of_a_large_set_evenly_spaced_files_are_checked(root, looks, monkeypatch):
    monkeypatch.setattr(file_check, "MAX_FILES", 5)
    assert load(root).notes == []
    assert sorted(looks) == sorted(map(str, root.glob("val/*/*.jpg")))[::3]


def test_files_of_other_types_are_counted_and_reported_at_every_start(root):
    for name in ("ant/a.psd", "ant/b.PSD", "bee/deep/c.jxl", "cat/notes", "cat/d.tar.gz", "cat/001.jpg.part"):
        (root / "train" / name).parent.mkdir(exist_ok=True)
        (root / "train" / name).write_bytes(b"x")
    for name in ("ant/Thumbs.db", "ant/desktop.ini", "ant/.DS_Store", "ant/._000.jpg", "labels.csv"):
        (root / "train" / name).write_bytes(b"x")
    age(root)
    said = "6 files left out, whose ending is not that of a known type of images: .psd (2), no ending (1), .gz (1), "
    first, second = load(root, True), load(root, True)
    assert first.notes == second.notes and said in first.notes[0] and len(first.images) == 15
    for path in root.glob("train/*/[!0]*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (root / "train/ant/000.jpg").rename(root / "train/x.jpg")
    assert "1 image outside the class folders left out" in load(root, True).notes[-1]


JUNK = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "lost+found", ".ipynb_checkpoints", "System Volume Information")


def test_what_systems_leave_behind_is_no_class_and_holds_no_images(root):
    data = (root / "train/ant/000.jpg").read_bytes()
    for junk in JUNK:
        for folder in (root / "train" / junk, root / "train/ant" / junk, root / "train" / junk / "ant"):
            folder.mkdir(parents=True)
            (folder / "seen.jpg").write_bytes(data)
    shutil.copytree(root / "train/cat", root / "train/.cat")
    (root / "train/ant/._x.jpg").write_bytes(b"resource fork")
    cfg = load_cfg(None, small_options(root, root.parent / "out"))
    assert find_run_problems(cfg, train=True) == []
    images = load(root, True).images
    assert images.classes == ("ant", "bee", "cat") and len(images) == 15
    (root / "val/ant/@eaDir").mkdir()
    (root / "val/ant/@eaDir/x.jpg").write_bytes(data)
    for path in root.glob("val/ant/*.jpg"):
        path.unlink()
    assert "class folders without an image: ant" in str(find_run_problems(cfg, train=True)[0])


def test_classes_without_evaluation_images_are_reported(root, tmp_path):
    for path in root.glob("val/bee/*"):
        path.unlink()
    (root / "val/bee").rmdir()
    loader = load(root)
    assert loader.notes == ["TEST.DATASET: no image of 1 of 3 classes: bee; they are not evaluated"]
    assert [loader.images.label(index) for index in range(8)] == [0] * 4 + [2] * 4, "labels of the training classes"
    assert find_run_problems(load_cfg(None, small_options(root, tmp_path / "out")), train=True) == []


def test_one_class_alone_is_noted(tmp_path):
    draw_folder(tmp_path, "train", {"ant": 1})
    draw_folder(tmp_path, "val", {"ant": 1})
    notes = load(tmp_path, True, "MODEL.NUM_CLASSES", 1, "TRAIN.BATCH_SIZE", 1).notes
    assert "there is only one class, ant" in notes[0]


@pytest.mark.parametrize("closed", ["train", "train/bee"])
def test_folders_that_cannot_be_listed_are_reported_by_name(root, tmp_path, monkeypatch, closed):
    scandir = os.scandir

    def refuse(path="."):
        if os.fspath(path).rstrip("/") == str(root / closed):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    message = errors_of(root, tmp_path)
    assert "Permission denied" in message and str(root / closed.removesuffix("/bee")) in message
    assert (message.count("bee (cannot be listed: Permission denied)") == 1) == (closed == "train/bee")
    assert len(ImageFolder(root, "train")) == {"train": 0, "train/bee": 10}[closed]
