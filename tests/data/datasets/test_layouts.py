"""Files and folders that are not laid out as a data set: each is named, with a command or an option that helps."""

import shlex
from pathlib import Path

from support.commands import run_command
from support.images import draw_folder
from support.runs import errors_of

from distribuuuu.hints.sources import find_inner_root, missing_split

FILES = {
    "images.ZIP": "is an archive; fix: set DATA.NAME archive TRAIN.DATASET {path}, which reads its folders",
    "train-01.tar": "is an archive; fix: set DATA.NAME archive TRAIN.DATASET {parent}",
    "my images.tgz": "is an archive of a kind that is not read; fix: unpack it",
    "a.7z": "is an archive of a kind that is not read; fix: unpack it, e.g. by tar -xf or 7-Zip",
    "ILSVRC2012_img_train.tar": "is an archive; fix: set DATA.NAME imagenet TRAIN.DATASET {parent}",
    "images.parquet": "is a table; fix: set DATA.NAME parquet TRAIN.DATASET",
    "train.csv": "is a table; fix: set DATA.NAME list TRAIN.DATASET", "a.xlsx": "is a table; fix: save it as CSV",
    "best.pth.tar": "is a checkpoint, not data", "a.npz": "is a file; expected a folder; fix: see docs/data.md",
}  # fmt: skip


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    for name, message in FILES.items():
        (path := tmp_path / name).touch()
        message = message.format(path=path, parent=tmp_path)
        for dataset in ("imagefolder", "packed", "list"):
            found = errors_of(path, tmp_path, "DATA.NAME", dataset)
            assert f"TRAIN.DATASET (command line): {path} {message}" in found and "no such folder" not in found


def test_an_archive_in_the_folder_is_named(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "images.zip").touch()
    hint = f"it holds images.zip, an archive; fix: set DATA.NAME archive TRAIN.DATASET {tmp_path}/data/images.zip"
    assert hint in errors_of(tmp_path / "data", tmp_path)
    out = "--val", 0.2, "--out", tmp_path / "lists"
    for words in (("split", tmp_path / "data", *out), ("doctor", tmp_path / "data")):
        assert run_command(*words) == 2 and hint in capsys.readouterr().err


def test_a_missing_split_names_the_command_that_makes_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw_folder(tmp_path / "my images", "train", {"ant": 5, "bee": 5})
    message = errors_of(Path("my images"), tmp_path)
    assert "TRAIN.SPLIT" not in message and "TEST.SPLIT: no folder 'val' in my images; it has train; fix: " in message
    command = shlex.split(message.rpartition("fix: ")[2])
    assert command[:2] == ["distribuuuu", "split"] and run_command("split", *command[2:]) == 0
    options = capsys.readouterr().out.rpartition("train --cfg photographs ")[2].split()
    assert not errors_of(tmp_path, tmp_path, *options, "TRAIN.BATCH_SIZE", 2, "MODEL.NUM_CLASSES", 0)


def test_a_table_beside_a_flat_folder_is_named(tmp_path):
    draw_folder(tmp_path / "data", "train", {"": 2})
    (tmp_path / "data" / "train.csv").write_text("id,label\n1,ant\n")
    one = f"it holds train.csv, a table; fix: set DATA.NAME list TRAIN.DATASET {tmp_path}/data; or, to divide it"
    found = errors_of(tmp_path / "data", tmp_path)
    assert found.count(f"{one}: distribuuuu split {tmp_path}/data/train.csv --val 0.2 --out data_lists") == 2


def test_folders_of_arrays_name_the_options_that_read_them(tmp_path):
    for name in ("train/ant", "train/bee"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "1.npy").touch()
    hint = "other files: .npy (2); fix: set DATA.CHANNELS and DATA.PIXELS"
    assert hint in errors_of(tmp_path / "data", tmp_path, "MODEL.NUM_CLASSES", 2)


def test_a_split_of_another_name_is_proposed(tmp_path):
    draw_folder(tmp_path, "train", {"ant": 2, "bee": 2})
    message = errors_of(tmp_path / "train", tmp_path)
    assert f"which are classes; fix: set TRAIN.DATASET {tmp_path}" in message and "TEST.SPLIT" in message
    draw_folder(tmp_path / "other", "training", {"ant": 1})
    assert "it has training; fix: set TRAIN.SPLIT training" in errors_of(tmp_path / "other", tmp_path)
    draw_folder(tmp_path / "a", "train", {"ant": 1, "bee": 1})
    draw_folder(tmp_path / "a", "test", {"ant": 1, "bee": 1})
    assert "fix: set TEST.SPLIT test" in missing_split("TEST", tmp_path / "a", "val", "val/CLASS/IMAGE")[1]
    draw_folder(tmp_path / "b", "val", {"ant": 1, "bee": 1})
    message = missing_split("TRAIN", tmp_path / "b", "train", "train/CLASS/IMAGE")[1]
    assert f"fix: distribuuuu split {tmp_path / 'b' / 'val'} --val 0.2 --out val_lists" in message
    draw_folder(tmp_path / "c", "vans", {"": 1})  # a class folder is not proposed as a split
    draw_folder(tmp_path / "c", "bikes", {"": 1})
    assert "fix: distribuuuu split" in missing_split("TEST", tmp_path / "c", "val", "val/CLASS/IMAGE")[1]


def test_a_folder_above_the_data_set_is_recognized(tmp_path, capsys):
    draw_folder(tmp_path / "parent" / "deep" / "data", "train", {"ant": 2, "bee": 2})
    draw_folder(tmp_path / "parent" / "deep" / "data", "val", {"ant": 2, "bee": 2})
    inner = tmp_path / "parent" / "deep" / "data"
    assert find_inner_root(tmp_path / "parent") == inner and find_inner_root(inner) is None
    assert f"fix: set TRAIN.DATASET {inner}" in errors_of(tmp_path / "parent", tmp_path)
    (tmp_path / "parent" / "empty").mkdir()
    for folder, message in ((tmp_path / "parent", f"fix: use {inner}"), (inner, "has splits already: train, val; ")):
        assert run_command("split", folder, "--val", 0.2, "--out", tmp_path / "lists") == 2
        assert message in capsys.readouterr().err
