"""Archives: the batches of class folders, what is refused, and the index."""

import errno
import gzip
import os
import shutil
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
from support import runs
from support.archives import add, archive_folder, files_of, write_tar, write_zip

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import DataError
from distribuuuu.data.datasets import archive_members
from distribuuuu.data.datasets.archive import Archive, ArchiveSource, find_archives, open_archives
from distribuuuu.data.datasets.archive_members import read_member
from distribuuuu.data.datasets.imagefolder import ImageFolder
from distribuuuu.data.datasets.index import Index
from distribuuuu.engine.preflight import find_run_problems

JPEG = b"\xff\xd8 not read here"


def open_one(path: Path, **fields) -> Index:
    return open_archives(ArchiveSource((str(path),), **fields), path.parent / "cache")


def names_of(index: Index) -> list[str]:
    return [index.name(number) for number in range(len(index))]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_and_order_are_those_of_folders(tmp_path, format):
    files = ["b/2.jpg", "b/10.jpg", "b/1.JPEG", "b/sub/deep/x.png", "b/sub!/z.bmp", "b/.hidden/seen.jpg", "b c/a.jpg",
             "a/\u00e9t\u00e9.jpg", "a/.hidden.jpg", "a/._1.jpg", "__MACOSX/b/1.jpg", ".git/1.jpg", "a/notes.txt",
             "beside.jpg", "a/Thumbs.db", "b/@eaDir/1.jpg", f"a/{'long' * 13}/{'x' * 90}.jpg"]  # fmt: skip
    for name in files:
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).write_bytes(name.encode())
    index = open_one(write_tar(tmp_path / "train.tar", {f"./{name}": name.encode() for name in files}, format))
    zipped = open_one(write_zip(tmp_path / "train.zip", {name: name.encode() for name in files}))
    folder = ImageFolder(tmp_path, "train")
    expected = [os.path.relpath(folder.describe(i), tmp_path / "train") for i in range(len(folder))]
    assert names_of(index) == names_of(zipped) == expected and index.classes == zipped.classes == folder.classes
    assert index.arrays["label"].tolist() == [folder.label(i) for i in range(len(folder))]
    assert [bytes(read_member(index, i)).decode() for i in range(len(index))] == expected
    assert Archive(index).notes()[0].replace(".tar", "") == folder.notes()[0]
    assert Archive(index).describe(0) == f"train.tar:{expected[0]}"


@pytest.mark.parametrize("label", ["cls", "cls as name", "cls in a folder", "cls of a name with dots"])
def test_shards_have_labels_beside_the_images(tmp_path, label):
    for shard in range(2):
        files = {}
        for sample in range(3):
            start = "x/" if "folder" in label else "dog." if "dots" in label else ""
            key, number = f"{start}{sample}", (sample + shard) % 3
            files[f"{key}.cls"] = b"name %d\n" % number if "as name" in label else b"%d" % number
            files[f"{key}.json"] = b"{}"
            files[f"{key}.jpg"] = b"%d %d" % (shard, sample)
        write_tar(tmp_path / f"train-{shard}.tar", files)
    index = open_archives(find_archives("TRAIN", str(tmp_path), "train-{0..1}.tar"), tmp_path / "cache")
    assert index.classes == (("name 0", "name 1", "name 2") if "as name" in label else ("0", "1", "2"))
    assert index.arrays["label"].tolist() == [0, 1, 2, 1, 2, 0]
    assert [bytes(read_member(index, i)) for i in (0, 5)] == [b"0 0", b"1 2"]


def tar_of(path: Path, *members: tuple, **options) -> Path:
    with tarfile.open(path, "w", **options) as archive:
        for name, data, *rest in members:
            add(archive, name, data, *rest[:1], **(rest[1] if rest[1:] else {}))
    return path


def change(path: Path, edit) -> Path:
    path.write_bytes(edit(path.read_bytes()))
    return path


def test_a_zip_with_the_separators_of_windows(tmp_path):
    plain = write_zip(tmp_path / "a.zip", {"train\\a\\1.jpg": JPEG, "train\\b\\2.jpg": JPEG})
    assert names_of(open_one(plain, folder="train", is_inside=True)) == ["train/a/1.jpg", "train/b/2.jpg"]
    with pytest.raises(ConfigError, match="leads out of the archive"):
        open_one(write_zip(tmp_path / "b.zip", {"..\\a\\1.jpg": JPEG}))


ONE = ("a/1.jpg", JPEG)
TARS = {
    "twice": ([ONE, ("./a/1.jpg", b"other")], r"train.tar:a/1.jpg: has two members of this name"),
    "parent": ([("a/../../1.jpg", JPEG)], r"train.tar:a/../../1.jpg: leads out of the archive"),
    "symbolic link": ([("a/2.jpg", b"", tarfile.SYMTYPE, {"linkname": "/etc/passwd"})], r"a/2.jpg: is a link; fix"),
    "hard link": ([ONE, ("a/2.jpg", b"", tarfile.LNKTYPE, {"linkname": "a/1.jpg"})], r"a/2.jpg: is a link; fix"),
    "sparse": ([("a/2.jpg", b"", tarfile.GNUTYPE_SPARSE)], "a/2.jpg: is no regular file, or a sparse one"),
    "no class": ([("1.jpg", JPEG)], "has no images in class folders; 1 image at the top have no class"),
    "no label": ([("1.jpg", JPEG), ("2.jpg", JPEG), ("2.cls", b"1")], "train.tar:1.jpg: has no label; expected a .cls"),
    "two images": ([("1.jpg", JPEG), ("1.png", JPEG), ("1.cls", b"1")], "train.tar:1.png: is a second image"),
    "control": ([("a/\x1b[2J\u202e.jpg", b"", tarfile.FIFOTYPE)], r"a/\\x1b\[2J\\u202e.jpg: is no regular file"),
}  # fmt: skip


@pytest.mark.parametrize("case", TARS)
def test_members_that_cannot_be_read_are_named(tmp_path, case):
    members, message = TARS[case]
    with pytest.raises(ConfigError, match=message.replace("/../../", r"/\.\./\.\./").replace(".jpg", r"\.jpg")):
        open_one(tar_of(tmp_path / "train.tar", *members))


def with_size(content: bytes, field: bytes) -> bytes:
    """Return a tar whose first member has another size, under the right checksum of its header."""
    content = content[:124] + field + content[136:]
    total = sum(content[:512]) - sum(content[148:156]) + 8 * 32
    return content[:148] + b"%06o\0 " % total + content[156:]


DAMAGES = {
    "in a member": (lambda c: c[:1800], "train.tar:a/2.jpg: ends at byte 2,[0-9]+ of 1,800: the"),
    "at a header": (lambda c: c[:1024], "train.tar: is truncated after a/1.jpg, at byte 1,024"),
    "flipped": (lambda c: c[:1024] + b"!" + c[1025:], "train.tar: is no tar, or is damaged: .* after a/1.jpg, at"),
    "text": (lambda c: b"x" * 512 + c[512:], "no tar, or is damaged: it has no valid header at its start"),
    "joined": (lambda c: c + c, "train.tar: has data after its end"),
    "huge": (lambda c: with_size(c, b"\x80" + b"\0" * 3 + b"\xff" * 8), "a/1.jpg: ends at byte"),
    "negative": (lambda c: with_size(c, b"\xff" * 12), "a/1.jpg: has an invalid size"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_tar_is_refused(tmp_path, case):
    edit, message = DAMAGES[case]
    path = change(tar_of(tmp_path / "train.tar", ONE, ("a/2.jpg", JPEG * 40)), edit)
    with pytest.raises(ConfigError, match=message):
        open_one(path)


def test_numbers_in_binary_and_long_names_are_read(tmp_path):
    path = tar_of(tmp_path / "train.tar", ONE)
    change(path, lambda content: with_size(content, b"\x80" + bytes(10) + bytes([len(JPEG)])))
    assert bytes(read_member(open_one(path), 0)) == JPEG
    headers = {"path": "b/\u00fc.jpg", "size": str(len(JPEG)), "comment": "x=y\nz"}
    path = tar_of(tmp_path / "pax.tar", ("a/1.jpg", JPEG, tarfile.REGTYPE, {"pax_headers": headers}),
                  format=tarfile.PAX_FORMAT, pax_headers={"comment": "all"})  # fmt: skip
    assert names_of(open_one(path)) == ["b/\u00fc.jpg"] and bytes(read_member(open_one(path), 0)) == JPEG
    sparse = {"pax_headers": {"GNU.sparse.major": "1"}}
    path = tar_of(tmp_path / "sparse.tar", (*ONE, tarfile.REGTYPE, sparse), format=tarfile.PAX_FORMAT)
    with pytest.raises(ConfigError, match="a/1.jpg: is no regular file, or a sparse"):
        open_one(path)
    large = {"pax_headers": {"comment": "x" * 2**21}}
    path = tar_of(tmp_path / "large.tar", (*ONE, tarfile.REGTYPE, large), format=tarfile.PAX_FORMAT)
    with pytest.raises(ConfigError, match="large.tar: .*headers of more than 1,048,576 bytes"):
        open_one(path)


def test_a_compressed_tar_is_refused_with_the_command(image_folder, small_cfg, tmp_path):
    tar = archive_folder(image_folder, tmp_path / "tars", "tar") / "train.tar"
    (tmp_path / "gz").mkdir()
    (tmp_path / "gz" / "train.tar.gz").write_bytes(gzip.compress(tar.read_bytes(), 1))
    cfg = small_cfg("DATA.NAME", "archive", "TRAIN.DATASET", tmp_path / "gz")
    message = "\n".join(map(str, find_run_problems(cfg, train=True)))
    assert "train.tar.gz, an archive of a kind that is not read; fix: unpack it" in message
    shutil.copy(tmp_path / "gz" / "train.tar.gz", tmp_path / "gz" / "train.tar")
    with pytest.raises(ConfigError, match=r"train.tar: is compressed, so no member can be read alone; fix: decompress"):
        open_one(tmp_path / "gz" / "train.tar")


def zip_edit(path: Path, place: int, value: bytes) -> Path:
    start = path.read_bytes().rfind(b"PK\1\2") + place
    return change(path, lambda content: content[:start] + value + content[start + len(value) :])


ZIPS = {
    "encrypted": (8, b"\1", "train.zip:a/1.jpg: is encrypted"), "method": (10, b"\x0e", "is compressed by method 14"),
    "stored size": (24, b"\xff\xff\0\0", "a/1.jpg: is stored with"), "offset": (42, b"\1", "a/1.jpg: has no header at"),
    "large": (20, b"\0\0\0\x50\0\0\0\x50", "a/1.jpg: ends at byte"), "name": (46, b"b", "b/1.jpg: has no header"),
    "link": (38, struct.pack("<L", 0o120777 << 16), "a/1.jpg: is a link"),
    "zip64": (20, b"\xff" * 8, "a/1.jpg: ends at byte"), "signature": (0, b"XX", "is no ZIP, or is"),
}  # fmt: skip


@pytest.mark.parametrize("case", ZIPS)
def test_a_zip_that_cannot_be_read_is_refused(tmp_path, case):
    place, value, message = ZIPS[case]
    with pytest.raises(ConfigError, match=message):
        open_one(zip_edit(write_zip(tmp_path / "train.zip", dict([ONE])), place, value))


def test_a_zip_that_holds_more_than_it_declares_is_not_unpacked(tmp_path):
    path = write_zip(tmp_path / "train.zip", {"a/1.jpg": bytes(10_000_000)}, zipfile.ZIP_DEFLATED)
    index = open_one(zip_edit(path, 24, struct.pack("<L", 1000)))
    with pytest.raises(ValueError, match="the archive declares 1,000 bytes, but holds more"):
        read_member(index, 0)
    with pytest.raises(ConfigError, match="is no ZIP, or is truncated"):
        open_one(change(path, lambda content: content[:-30]))


def errors_of(root: Path, tmp_path: Path, *words: object) -> str:
    return runs.errors_of(root, tmp_path, "DATA.NAME", "archive", *words)


def test_missing_archives_are_reported_before_the_start(image_folder, tmp_path):
    root = archive_folder(image_folder, tmp_path / "data", "tars")
    assert not errors_of(root, tmp_path, "TRAIN.SPLIT", "train-{000..002}.tar", "TEST.SPLIT", "val-{000..002}.tar")
    pattern = f"{root}/train-{{000..002}}.tar"
    assert "TEST.DATASET (command line)" in errors_of(root, tmp_path, "TRAIN.DATASET", pattern, "TEST.DATASET", pattern)
    assert not errors_of(root, tmp_path, "TRAIN.DATASET", pattern, "TEST.DATASET", root)
    for words, message in {
        ("TRAIN.SPLIT", "train-{000..003}.tar"): "no such files: train-003.tar; fix: check the first and the last",
        ("TRAIN.SPLIT", "train-{0..1.tar"): "{0..1.tar; expected the first and the last, e.g. train-{000..009}.tar",
        ("TRAIN.SPLIT", "trian"): "no file trian.tar, trian.zip or trian-*.tar in",
        ("TRAIN.DATASET", tmp_path / "none"): "no such folder",
    }.items():
        assert message in errors_of(root, tmp_path, *words), words
    for number in range(2):
        write_tar(tmp_path / "shards" / f"train-{number}.tar", {})
    said = errors_of(tmp_path / "shards", tmp_path)
    assert "TEST.SPLIT: no file val.tar, val.zip or val-*.tar in" in said
    assert "it has train" in said and "fix" not in said
    one = archive_folder(image_folder, tmp_path / "one", "one zip")
    assert "has no folder trian; it has train, val" in errors_of(one, tmp_path, "TRAIN.SPLIT", "trian")
    above = errors_of(one.parent, tmp_path)
    assert f"it has data.zip; it holds data.zip, an archive; fix: set DATA.NAME archive TRAIN.DATASET {one}" in above
    splits = errors_of(one.parent, tmp_path, "TRAIN.SPLIT", "data", "TEST.SPLIT", "data")
    assert f"has the splits train, val, no classes; fix: set DATASET {one}" in splits
    deep = write_zip(tmp_path / "deep.zip", {f"tiny/{name}": data for name, data in files_of(image_folder).items()})
    assert "has no folder train; it has tiny; fix: set TRAIN.SPLIT tiny/train" in errors_of(deep, tmp_path)
    assert not errors_of(deep, tmp_path, "TRAIN.SPLIT", "tiny/train", "TEST.SPLIT", "tiny/val")
    archive_folder(image_folder, root, "zip")
    assert "has train-000.tar, train.zip for train; fix: set TRAIN.SPLIT to one" in errors_of(root, tmp_path)
    assert not errors_of(root, tmp_path, "TRAIN.SPLIT", "train.zip", "TEST.SPLIT", "val.zip")


def test_more_archives_than_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(archive_members, "_MAX_OPEN", 2)
    for number in range(5):
        write_tar(tmp_path / f"TRAIN-{number}.TAR", {f"a/{number}.jpg": b"%d" % number})
    index = open_archives(find_archives("TRAIN", str(tmp_path), "train"), tmp_path / "cache")
    assert [bytes(read_member(index, number)) for number in (0, 1, 2, 3, 4, 0)] == [b"0", b"1", b"2", b"3", b"4", b"0"]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_member_of_a_zip_whose_checksum_differs_is_broken(tmp_path, method):
    path = write_zip(tmp_path / "train.zip", {"a/1.jpg": JPEG * 50}, method)
    with zipfile.ZipFile(path) as archive:
        crc = archive.infolist()[0].CRC.to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(crc, b"\1\2\3\4"))
    with pytest.raises(ValueError, match="the checksum of this file does not match"):
        read_member(open_one(path), 0)


def test_an_archive_of_samples_is_not_both_training_and_evaluation_data(tmp_path):
    samples = {f"{number}.{end}": JPEG if end == "jpg" else b"%d" % (number % 2)
               for number in range(4) for end in ("jpg", "cls")}  # fmt: skip
    path = write_tar(tmp_path / "all.tar", samples)
    assert "TEST.DATASET" in (said := errors_of(path, tmp_path)) and "with a folder val" in said
    other = write_tar(tmp_path / "other.tar", dict([*samples.items()][:4]))
    assert not errors_of(path, tmp_path, "TEST.DATASET", other, "MODEL.NUM_CLASSES", 2, "TRAIN.BATCH_SIZE", 2)
    both = {f"{'val' if name[0] == '3' else 'train'}/{name}": data for name, data in samples.items()}
    both = write_tar(tmp_path / "both.tar", both)
    assert not errors_of(both, tmp_path, "MODEL.NUM_CLASSES", 2, "TRAIN.BATCH_SIZE", 2)
    parts = [open_one(both, folder=split, is_inside=True) for split in ("train", "val")]
    assert [names_of(index) for index in parts] == [[f"train/{number}.jpg" for number in range(3)], ["val/3.jpg"]]
    assert [index.arrays["label"].tolist() for index in parts] == [[0, 1, 0], [1]]


def test_a_read_that_fails_is_no_damage(tmp_path, monkeypatch):
    index = open_one(write_tar(tmp_path / "train.tar", {"a/1.jpg": JPEG}))
    read_member(index, 0)
    monkeypatch.setattr(os, "pread", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(DataError, match="train.tar: cannot be read: Input/output error"):
        read_member(index, 0)
