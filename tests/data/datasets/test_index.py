"""The stored index of each source: when it is used, and what makes it stale."""

import logging
import os
import pickle
import shutil
import time
from pathlib import Path

import pytest
from support.archives import write_tar
from support.images import write_file
from support.processes import on_processes

from distribuuuu.data.datasets import index as index_module
from distribuuuu.data.datasets.archive import Archive, find_archives, open_archives
from distribuuuu.data.datasets.array_file import read_arrays, write_arrays
from distribuuuu.data.datasets.image_list import ImageList
from distribuuuu.data.datasets.index import KIND, VERSION, Index, open_folder

NAMES = ("a/1.jpg", "a/2.jpg", "b/4.jpg", "b/deep/3.jpg")
SOURCES = ("folder", "archive", "list")


def make_old(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        os.utime(path, (time.time() - 100,) * 2, follow_symlinks=False)


def write(root: Path, source: str, names: tuple[str, ...] = NAMES) -> Path:
    """Write images that changed long ago as a source; return its folder."""
    if source == "archive":
        root.mkdir(exist_ok=True)
        write_tar(root / "train.tar", {name: name.encode() for name in names})
    else:
        for name in names:
            write_file(root / "train" / name, name.encode())
    if source == "list":
        (root / "train.csv").write_text("path,label\n" + "".join(f"train/{name},{name[0]}\n" for name in names))
    make_old(root)
    return root


def open_(root: Path, source: str) -> Index:
    """Open the index as a new process does."""
    index_module._opened.clear()
    cache = root.parent / "cache"
    if source == "folder":
        return open_folder(root, "train", cache)
    if source == "archive":
        return open_archives(find_archives("TRAIN", str(root), "train"), cache)
    return ImageList.open_table(root / "train.csv", cache_dir=str(cache))


def files_of(index: Index) -> list[str]:
    images = (Archive if index.is_archive else ImageList)(index)
    return [bytes(images.read(number)).decode() for number in range(len(index))]


@pytest.fixture(params=SOURCES)
def source(request) -> str:
    return request.param


@pytest.fixture
def root(tmp_path, source) -> Path:
    return write(tmp_path / "data", source)


def test_the_second_start_reads_the_file(root, source, caplog):
    caplog.set_level(logging.INFO)
    first, second = open_(root, source), open_(root, source)
    assert first.meta == second.meta and [*files_of(first)] == files_of(second) == [*NAMES]
    assert second.path.parent == root.parent / "cache" / "index"
    assert not any(path.name.startswith(".") for path in root.iterdir())  # nothing is written beside the data
    assert "4 images in " in caplog.text and "scanned in" in caplog.text and ", from " in caplog.text
    assert first.classes == ("a", "b") and first.arrays["label"].tolist() == [0, 0, 1, 1]


CHANGES = {
    "add": ("folder list", lambda root: write_file(root / "train" / "a" / "9.jpg", b"a/9.jpg")),
    "remove": ("folder", lambda root: (root / "train" / "a" / "1.jpg").unlink()),
    "rename": ("folder", lambda root: (root / "train" / "a" / "1.jpg").rename(root / "train" / "a" / "9.jpg")),
    "add deeper": ("folder", lambda root: write_file(root / "train" / "b" / "deep" / "9.jpg")),
    "new class": ("folder", lambda root: write_file(root / "train" / "c" / "9.jpg")),
    "removed class": ("folder", lambda root: shutil.rmtree(root / "train" / "a")),
    "linked folder": ("folder", lambda root: (root / "train" / "a" / "link").symlink_to(root / "train" / "b")),
    "table": ("list", lambda root: (root / "train.csv").write_text("path,label\ntrain/a/1.jpg,x\n")),
    "archive": ("archive", lambda root: write_tar(root / "train.tar", {"a/1.jpg": b"a/1.jpg"})),
    "archive of equal size": (
        "archive", lambda root: write_tar(root / "train.tar", {name.replace("a/", "c/"): b"x" for name in NAMES})),
}  # fmt: skip
CASES = [(source, name) for name, (sources, _) in CHANGES.items() for source in sources.split()]


@pytest.mark.parametrize("source, change", CASES)
def test_any_change_is_noticed(tmp_path, source, change):
    root = write(tmp_path / "data", source)
    before = open_(root, source)
    CHANGES[change][1](root)
    after = open_(root, source)
    assert after.meta["scanned"] != before.meta["scanned"]
    assert (after.meta["digest"] != before.meta["digest"]) or source == "list"


@pytest.mark.parametrize("source", ["folder", "list"])
def test_files_that_are_added_to_a_folder_whose_time_stays_are_noticed(tmp_path, source):
    root = write(tmp_path / "data", source)
    open_(root, source)
    folder = root / "train" / "a"
    before = folder.stat()
    write_file(folder / "9.jpg")
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(open_(root, "folder")) == 5


def test_what_changed_right_before_the_scan_is_scanned_again(root, source, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 10**20)  # the clock of the disk counts
    for path in root.rglob("*"):
        os.utime(path)
    assert open_(root, source).meta["scanned"] != open_(root, source).meta["scanned"]


def test_an_archive_that_changes_during_a_run_is_not_read_on(tmp_path):
    root = write(tmp_path / "data", "archive")
    images = Archive(open_(root, "archive"))
    assert images.read(0) == b"a/1.jpg"
    with open(root / "train.tar", "r+b") as file:  # in place, of equal size
        file.write(b"\0" * 1024)
    with pytest.raises(ValueError, match="train.tar: has changed since the start of the run"):
        images.read(0)
    with pytest.raises(ValueError, match="has changed since the start"):
        pickle.loads(pickle.dumps(images)).read(0)


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "empty": lambda path: path.write_bytes(b""),
    "a link": lambda path: (path.rename(path.with_suffix(".old")), path.symlink_to("/dev/null")),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "of another version": lambda path: write_arrays(path, KIND, VERSION + 1, *read_arrays(path, KIND, VERSION)),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_replaced(root, source, caplog, damage):
    path = open_(root, source).path
    DAMAGES[damage](path)
    caplog.set_level(logging.INFO)
    assert files_of(open_(root, source)) == [*NAMES] and f"{path} is not used: " in caplog.text
    assert not path.is_symlink()


def test_an_index_that_cannot_be_kept_is_no_error(root, source, tmp_path, caplog):
    write_file(tmp_path / "cache")
    index = open_(root, source)
    assert files_of(index) == [*NAMES] and index.path is None and "scanned at every start" in caplog.text
    assert files_of(pickle.loads(pickle.dumps(index))) == [*NAMES]


def open_at_once(root: Path, source: str, record: Path) -> list[str]:
    """Open an index while two other processes do: a scan leaves a line, and ends when all of them look for its file."""
    seal, take_turn = index_module._sealed, index_module.take_turn

    def announce(path):
        record.with_name(f"{os.getpid()}.ready").touch()
        return take_turn(path)

    def seal_slowly(*args):
        with open(record, "a") as file:
            file.write("scan\n")
        while len(list(record.parent.glob("*.ready"))) < 3:
            time.sleep(0.01)
        return seal(*args)

    index_module._sealed, index_module.take_turn = seal_slowly, announce
    return files_of(open_(root, source))


@pytest.mark.parametrize("young", [False, True])
def test_of_several_processes_one_scans(root, source, tmp_path, young):
    if young:
        for path in root.rglob("*"):
            os.utime(path)
    answers = on_processes(3, open_at_once, root, source, tmp_path / "record")
    assert (tmp_path / "record").read_text() == "scan\n"
    assert all(answer == [*NAMES] for answer in answers)
