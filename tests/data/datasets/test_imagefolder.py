"""Class folders: what is listed, in which order, and with which labels."""

import contextlib
import os
from pathlib import Path

import pytest
from support.images import age, write_file
from torchvision import datasets as torchvision_datasets

from distribuuuu.config import ConfigError
from distribuuuu.data.datasets.imagefolder import ImageFolder
from distribuuuu.files.image_files import EXTENSIONS, walk_images

FILES = [
    "b/2.jpg", "b/10.jpg", "b/1.JPEG", "b/sub/deep/er/x.png", "b/sub space/y.webp", "b/sub!/z.bmp", "b/sub.jpg/w.tif",
    "b/notes.txt", "b/no_extension", "b/many.dots.jpg", "b c/a.jpg", "b/.hidden folder/seen.jpg", "a/\u00e9t\u00e9.jpg",
    "a/\U0001f600.jpg", "a/\uff21.jpg", "a/ with spaces .jpg", "a/new\nline.jpg", "\u00fcber/1.ppm",
]  # fmt: skip


@pytest.fixture
def root(tmp_path) -> Path:
    """Two classes with four images, one of them deeper, that changed long ago."""
    for name in ("a/1.jpg", "a/2.jpg", "b/deep/3.jpg", "b/4.jpg"):
        write_file(tmp_path / "data" / "train" / name)
    age(tmp_path / "data" / "train")
    return tmp_path / "data"


def samples_of(images: ImageFolder) -> list[tuple[str, int]]:
    return [(images.describe(index), images.label(index)) for index in range(len(images))]


def walked(folder: Path) -> list[tuple[str, int]]:
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return [
        (os.path.join(parent, name), label)
        for label, class_name in enumerate(classes)
        for parent, _, names in sorted(os.walk(folder / class_name, followlinks=True))
        for name in sorted(names)
        if name.lower().endswith(EXTENSIONS) and not name.startswith(".")
    ]


def test_it_lists_what_torchvision_lists(tmp_path):
    folder = tmp_path / "train"
    for name in FILES:
        write_file(folder / name)
    with contextlib.suppress(OSError):  # some systems insist on UTF-8
        for name in (b"b/\xff.jpg", b"b/\xfe\x80/1.jpg", b"\xe9/1.jpg"):
            write_file(folder / os.fsdecode(name))
    write_file(tmp_path / "elsewhere" / "inside" / "1.jpg")
    (folder / "linked class").symlink_to(tmp_path / "elsewhere")
    (folder / "b" / "linked folder").symlink_to(folder / "a")
    (folder / "b" / "linked.jpg").symlink_to(folder / "a" / "gone.jpg")
    images = ImageFolder(tmp_path, "train")
    theirs = torchvision_datasets.ImageFolder(folder)
    assert samples_of(images) == theirs.samples == walked(folder)
    assert list(images.classes) == theirs.classes
    assert samples_of(ImageFolder(tmp_path, "train")) == theirs.samples


def test_a_folder_that_is_not_there_is_empty_and_is_not_made(tmp_path):
    assert len(ImageFolder(tmp_path / "none", "train", cache_dir=str(tmp_path / "none" / "cache"))) == 0
    assert not (tmp_path / "none").exists()


def test_links_in_circles_end(tmp_path):
    folder = tmp_path / "train"
    write_file(folder / "a" / "1.jpg")
    write_file(folder / "b" / "2.jpg")
    for link, target in {"a/self": "a", "a/up": ".", "b/a": "a", "a/b": "b"}.items():
        (folder / link).symlink_to(folder / target)
    (folder / "a" / "circle.jpg").symlink_to("circle.jpg")
    images = ImageFolder(tmp_path, "train")
    assert [os.path.relpath(path, folder) for path, _ in samples_of(images)] == [
        "a/1.jpg", "a/circle.jpg", "a/b/2.jpg", "b/2.jpg", "b/a/1.jpg", "b/a/circle.jpg"]  # fmt: skip
    assert len(list(walk_images(folder / "a"))) == 3
    (tmp_path / "none").mkdir()
    for name in ("one", "two"):
        (tmp_path / "none" / name).symlink_to(tmp_path / "none")
    assert list(walk_images(tmp_path / "none")) == []


def test_classes_can_be_given(root):
    images = ImageFolder(root, "train", ("c", "b", "a"))
    assert [(Path(path).name, label) for path, label in samples_of(images)] == [
        ("4.jpg", 1), ("3.jpg", 1), ("1.jpg", 2), ("2.jpg", 2)]  # fmt: skip
    with pytest.raises(ConfigError, match="has classes that the training data lacks: a"):
        ImageFolder(root, "train", ("c", "b"))
    with pytest.raises(IndexError):
        images.label(4)
    with pytest.raises(IndexError):
        images.describe(-1)


def test_an_image_is_read_as_bytes_and_a_pipe_is_not_waited_for(root):
    write_file(root / "train" / "a" / "1.jpg", b"some bytes")
    os.mkfifo(root / "train" / "a" / "0.jpg")
    images = ImageFolder(root, "train")
    assert images.read(0) == b""
    assert images.read(1) == b"some bytes" and isinstance(images.read(1), bytearray)
    (root / "train" / "a" / "1.jpg").unlink()
    with pytest.raises(FileNotFoundError):
        images.read(1)
