"""The index of a folder: what it lists, when its file is used, and what it costs."""

import contextlib
import logging
import os
import pickle
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from support.images import age
from support.processes import on_processes
from torchvision import datasets as torchvision_datasets

from distribuuuu.data.datasets import folder_index
from distribuuuu.data.datasets.array_file import checksum_of, pack_names, packed_name, read_arrays, write_arrays
from distribuuuu.data.datasets.folder_index import FolderIndex, open_index
from distribuuuu.data.datasets.imagefolder import ImageFolder
from distribuuuu.files.image_files import EXTENSIONS, walk_images

FILES = [
    "b/2.jpg", "b/10.jpg", "b/1.JPEG", "b/sub/deep/er/x.png", "b/sub space/y.webp", "b/sub!/z.bmp", "b/sub.jpg/w.tif",
    "b/notes.txt", "b/no_extension", "b/many.dots.jpg", "b c/a.jpg", "b/.hidden folder/seen.jpg", "a/\u00e9t\u00e9.jpg",
    "a/\U0001f600.jpg", "a/\uff21.jpg", "a/ with spaces .jpg", "a/new\nline.jpg", "\u00fcber/1.ppm",
]  # fmt: skip

KIND, VERSION = FolderIndex.kind, FolderIndex.version


def make(path: Path, content: bytes = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture
def root(tmp_path) -> Path:
    """Two classes with four images, one of them deeper, that changed long ago."""
    for name in ("a/1.jpg", "a/2.jpg", "b/deep/3.jpg", "b/4.jpg"):
        make(tmp_path / "data" / "train" / name)
    age(tmp_path / "data" / "train")
    return tmp_path / "data"


def open_(root: Path, split: str = "train") -> FolderIndex:
    return open_index(root, split, root.parent / "cache")


def files_of(index: FolderIndex) -> list[str]:
    return [os.path.relpath(index.path(number), index.folder) for number in range(len(index))]


@pytest.fixture
def scans(monkeypatch) -> list[str]:
    done: list[str] = []
    scan = folder_index.scan_folder
    monkeypatch.setattr(
        folder_index, "scan_folder", lambda folder, *args, **words: done.append(folder) or scan(folder, *args, **words)
    )
    return done


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
        make(folder / name)
    with contextlib.suppress(OSError):  # some systems insist on UTF-8
        for name in (b"b/\xff.jpg", b"b/\xfe\x80/1.jpg", b"\xe9/1.jpg"):
            make(folder / os.fsdecode(name))
    make(tmp_path / "elsewhere" / "inside" / "1.jpg")
    (folder / "linked class").symlink_to(tmp_path / "elsewhere")
    (folder / "b" / "linked folder").symlink_to(folder / "a")
    (folder / "b" / "linked.jpg").symlink_to(folder / "a" / "gone.jpg")
    images = ImageFolder(tmp_path, "train")
    theirs = torchvision_datasets.ImageFolder(folder)
    assert samples_of(images) == theirs.samples == walked(folder)
    assert list(images.classes) == theirs.classes
    assert samples_of(ImageFolder(tmp_path, "train")) == theirs.samples


def test_hidden_things_and_empty_classes(tmp_path):
    for name in ("a/.hidden.jpg", "a/1.jpg", ".class/1.jpg", "beside.jpg", "full/2.jpg"):
        make(tmp_path / "train" / name)
    (tmp_path / "train" / "empty").mkdir()
    images = ImageFolder(tmp_path, "train")
    assert samples_of(images) == walked(tmp_path / "train")
    assert images.classes == ("a", "empty", "full") and [images.label(0), images.label(1)] == [0, 2]
    assert len(ImageFolder(tmp_path / "none", "train", cache_dir=str(tmp_path / "none" / "cache"))) == 0
    assert not (tmp_path / "none").exists()


def test_links_in_circles_end(tmp_path):
    folder = tmp_path / "train"
    make(folder / "a" / "1.jpg")
    make(folder / "b" / "2.jpg")
    for link, target in {"a/self": "a", "a/up": ".", "b/a": "a", "a/b": "b"}.items():
        (folder / link).symlink_to(folder / target)
    (folder / "a" / "circle.jpg").symlink_to("circle.jpg")
    index = open_(tmp_path)
    assert files_of(index) == ["a/1.jpg", "a/circle.jpg", "a/b/2.jpg", "b/2.jpg", "b/a/1.jpg", "b/a/circle.jpg"]
    assert len(list(walk_images(folder / "a"))) == 3
    (tmp_path / "none").mkdir()
    for name in ("one", "two"):
        (tmp_path / "none" / name).symlink_to(tmp_path / "none")
    assert list(walk_images(tmp_path / "none")) == []


def test_classes_can_be_given(root):
    images = ImageFolder(root, "train", ("c", "b", "0"))
    assert [label for _, label in samples_of(images)] == [1, 1] and len(images) == 2
    assert [Path(path).name for path, _ in samples_of(images)] == ["4.jpg", "3.jpg"]
    with pytest.raises(IndexError):
        images.label(2)
    with pytest.raises(IndexError):
        images.describe(-1)


def test_an_image_is_read_as_bytes_and_a_pipe_is_not_waited_for(root):
    make(root / "train" / "a" / "1.jpg", b"some bytes")
    os.mkfifo(root / "train" / "a" / "0.jpg")
    images = ImageFolder(root, "train")
    assert images.read(0) == b""
    assert images.read(1) == b"some bytes" and isinstance(images.read(1), bytearray)
    (root / "train" / "a" / "1.jpg").unlink()
    with pytest.raises(FileNotFoundError):
        images.read(1)


def test_the_second_start_reads_the_file(root, scans, caplog):
    for number in range(200):  # of which the times are compared
        make(root / "train" / f"c{number:03d}" / "1.jpg")
    age(root / "train")
    with caplog.at_level(logging.INFO):
        first, second = open_(root), open_(root)
    assert len(scans) == 1 and files_of(first) == files_of(second)
    assert second.file == root / ".distribuuuu" / "index-train.bin"
    assert "204 images in 204 folders, scanned in" in caplog.text and "204 images in 204 folders, from" in caplog.text
    assert not (root.parent / "cache").exists()
    moved = root.rename(root.with_name("moved"))
    assert open_(moved).path(0) == str(moved / "train" / "a" / "1.jpg") and len(scans) == 1
    make(moved / "train" / "c150" / "2.jpg")
    assert len(open_(moved)) == 205
    assert len(open_(moved, "train/a")) == len(open_(moved, "train/a")) == 0  # kept too
    assert len(scans) == 3


CHANGES = {
    "add": lambda folder: make(folder / "a" / "3.jpg"), "remove": lambda folder: (folder / "a" / "1.jpg").unlink(),
    "rename": lambda folder: (folder / "a" / "1.jpg").rename(folder / "a" / "9.jpg"),
    "add deeper": lambda folder: make(folder / "b" / "deep" / "5.jpg"),
    "new folder": lambda folder: make(folder / "b" / "new" / "5.jpg"),
    "new class": lambda folder: make(folder / "c" / "1.jpg"),
    "removed class": lambda folder: shutil.rmtree(folder / "a"),
    "renamed class": lambda folder: (folder / "a").rename(folder / "z"),
    "link": lambda folder: (folder / "a" / "link").symlink_to(folder / "b"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_change_is_noticed(root, scans, change):
    before = files_of(open_(root))
    change(root / "train")
    assert files_of(open_(root)) != before and len(scans) == 2
    assert samples_of(ImageFolder(root, "train")) == walked(root / "train")


def test_a_linked_folder_that_appears_later_is_noticed(root):
    (root / "train" / "a" / "mounted").symlink_to(root / "elsewhere")
    age(root / "train")
    assert len(open_(root)) == 4
    make(root / "elsewhere" / "1.jpg")
    assert len(open_(root)) == 5


def test_young_folders_are_not_relied_on_by_the_clock_of_the_disk(root, scans, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 10**20)
    os.utime(root / "train" / "b" / "deep")
    open_(root)
    open_(root)
    assert len(scans) == 2
    age(root / "train")
    open_(root)
    open_(root)
    assert len(scans) == 3


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def replace_by_a_later_version(file: Path) -> None:
    write_arrays(file, KIND, VERSION + 1, *read_arrays(file, KIND, VERSION))


def forget_an_extension(file: Path) -> None:
    meta, arrays = read_arrays(file, KIND, VERSION)
    write_arrays(file, KIND, VERSION, {**meta, "extensions": [".jpg"]}, arrays)


DAMAGES = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-3]), "empty": lambda file: file.write_bytes(b""),
    "flipped": flip, "of a later version": replace_by_a_later_version, "of fewer extensions": forget_an_extension,
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_a_file_that_cannot_be_used_is_replaced(root, scans, caplog, how):
    file = open_(root).file
    DAMAGES[how](file)
    with caplog.at_level(logging.INFO):
        index = open_(root)
    assert len(index) == 4 and len(scans) == 2 and f"{file} is not used: " in caplog.text
    is_damaged = how in ("cut", "flipped", "empty")
    assert len([record for record in caplog.records if record.levelno > logging.INFO]) == is_damaged
    open_(root)
    assert len(scans) == 2


def change(file: Path, meta: dict | None = None, **arrays) -> None:
    """Rewrite an index with other values, under its right checksum."""
    known, own = read_arrays(file, KIND, VERSION)
    arrays = {**own, **arrays}
    write_arrays(file, KIND, VERSION, {**known, "crc32": checksum_of(arrays), **(meta or {})}, arrays)


def test_an_index_of_others_with_invalid_values_is_replaced(root, scans, caplog):
    file = open_(root).file
    caplog.set_level(logging.INFO)
    for number, changes in enumerate([
        {"ignored": []}, {"ignored": {".txt": "1"}}, {"num_beside": "x"}, {"num_beside": None}, {"extensions": 3},
        {"folder_class": np.array([-1, 2**31 - 1], np.int32)}, {"folder_class": np.zeros(0, np.int32)},
        {"folder_class": np.array([-1.0, 0.0])}, {"names_offsets": np.array([[0, 4]])}, {"more": np.zeros(3)},
    ]):  # fmt: skip
        arrays = {name: value for name, value in changes.items() if isinstance(value, np.ndarray)}
        change(file, {name: value for name, value in changes.items() if name not in arrays}, **arrays)
        caplog.clear()
        assert files_of(open_(root)) == files_of(open_(root))
        assert len(scans) == number + 2 and f"{file} is not used: " in caplog.text, changes


def renamed(arrays: dict, prefix: str, index: int, name: str) -> dict:
    names = [packed_name(arrays, prefix, number) for number in range(len(arrays[f"{prefix}_offsets"]) - 1)]
    names[index] = name
    return pack_names(prefix, [os.fsencode(name) for name in names])


def test_an_index_of_others_leads_to_no_file_outside_of_the_folder(root, scans, caplog):
    file = open_(root).file
    caplog.set_level(logging.INFO)
    names = ("/etc/passwd", "../secret.jpg", "a/../../b", "..", "a\0b", "/", "a//b")
    # ".." as the name of an image is a folder, which is no image.
    wrong = [(prefix, name) for prefix in ("names", "paths") for name in names if (prefix, name) != ("names", "..")]
    for number, (prefix, name) in enumerate(wrong):
        change(file, **renamed(read_arrays(file, KIND, VERSION)[1], prefix, -1, name))
        caplog.clear()
        index = open_(root)
        assert all(Path(index.path(number)).is_file() for number in range(len(index)))
        assert len(scans) == number + 2 and f"{file} is not used: holds a path" in caplog.text, (prefix, name)


def refuse(monkeypatch, *folders: Path) -> None:
    """Let nothing be written below these folders, as on a disk that is read-only."""

    def write(path, *rest):
        if any(folder in Path(path).parents for folder in folders):
            raise OSError(28, "No space left on device")
        write_arrays(path, *rest)

    monkeypatch.setattr(folder_index, "write_arrays", write)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_root_that_cannot_be_written_to_has_its_index_in_the_cache(root, scans, monkeypatch, is_full):
    if is_full:
        refuse(monkeypatch, root)
    else:
        make(root / ".distribuuuu")  # a file, where the folder should be
    cache = root.parent / "cache"
    first = open_(root)
    assert cache in first.file.parents and files_of(open_(root)) == files_of(first) and len(scans) == 1
    assert first.file.name != open_index(root.parent, "data/train/a", cache, in_root=False).file.name


def test_an_index_that_cannot_be_kept_is_no_error(root, scans, monkeypatch, caplog):
    refuse(monkeypatch, root.parent)
    index = open_(root)
    assert len(index) == 4 and index.file is None and len(scans) == 1
    assert "scanned at every start" in caplog.text and "No space left" in caplog.text
    assert files_of(pickle.loads(pickle.dumps(index))) == files_of(index)


def test_a_split_of_several_folders_has_a_file_of_its_own(root):
    make(root / "train" / "a" / "x" / "1.jpg")
    names = {open_(root, split).file for split in ("train", "train/a", "train_a", ".") if (root / split).is_dir()}
    assert len(names) == 3 and {file.parent for file in names} == {root / ".distribuuuu"}


def open_at_once(root: Path, record: Path) -> list[str]:
    """Open an index while two other processes do: a scan leaves a line, and ends when all of them look for its file.

    One that looks after the scan may find that a folder changed less than two seconds before it, and scans again.
    """
    scan_folder, take_turn = folder_index.scan_folder, folder_index.take_turn

    @contextlib.contextmanager
    def announce(file):
        record.with_name(f"{os.getpid()}.ready").touch()
        with take_turn(file) as now_ns:
            yield now_ns

    def scan_slowly(folder, now_ns, extensions):
        with open(record, "a") as file:
            file.write("scan\n")
        while len(list(record.parent.glob("*.ready"))) < 3:
            time.sleep(0.01)
        return scan_folder(folder, now_ns, extensions)

    folder_index.scan_folder, folder_index.take_turn = scan_slowly, announce
    return files_of(open_(root))


@pytest.mark.parametrize("young", [False, True])
def test_of_several_processes_one_scans(root, tmp_path, young):
    if young:
        os.utime(root / "train" / "a")
    answers = on_processes(3, open_at_once, root, tmp_path / "record")
    assert (tmp_path / "record").read_text() == "scan\n"
    assert all(answer == answers[0] and len(answer) == 4 for answer in answers)


def test_a_disk_without_locks_will_do(root, scans, monkeypatch):
    import fcntl

    def refuse(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert len(open_(root)) == 4 and len(open_(root)) == 4 and len(scans) == 1


def test_a_pickled_index_is_its_file_and_does_not_become_another(root):
    for number in range(2000):
        make(root / "train" / "a" / f"{number}.jpg")
    images = ImageFolder(root, "train")
    pickled = pickle.dumps(images)
    assert len(pickled) < 2000 and samples_of(pickle.loads(pickled)) == samples_of(images)
    index = open_(root)
    pickled = pickle.dumps(index)
    make(root / "train" / "a" / "new.jpg")
    assert len(open_(root)) == len(index) + 1
    with pytest.raises(RuntimeError, match="was replaced"):
        pickle.loads(pickled)
    assert files_of(pickle.loads(pickle.dumps(index))) == files_of(index)


def test_an_image_costs_few_bytes(tmp_path):
    names = [f"n01440764_{number:05d}.JPEG" for number in range(1000)]
    for name in names:
        make(tmp_path / "train" / "n01440764" / name)
    index = open_(tmp_path)
    others = sum(array.nbytes for name, array in index.arrays.items() if name.startswith(("paths", "folder")))
    assert sum(array.nbytes for array in index.arrays.values()) - others == 1000 * (len(names[0]) + 8 + 4) + 8
    assert index.arrays["sample_folder"].dtype == np.int32 and index.arrays["names_offsets"].dtype == np.int64
    assert not any(array.flags.owndata or array.flags.writeable for array in index.arrays.values())
