"""Data of other layouts: what the error says is followed, word for word, until the training runs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.archives import archive_folder, files_of, write_tar, write_zip
from support.commands import requires
from support.runs import ROOT, small_options
from support.sources import image_rows, to_arrow, write_parquet

from distribuuuu.commands.main import dispatch

pytestmark = [pytest.mark.slow, requires("pack", "split")]
# Pairs of KEY VALUE in a text.
_OPTIONS = re.compile(r"(?<!\S)[A-Z]+(?:\.[A-Za-z_]+)+ (?:'[^']*'|[^\s,;]+)")


def hub(images: Path, root: Path) -> Path:
    """Write the data set as the Hugging Face Hub does: Parquet files in data/, and a test split."""
    for split, name in (("train", "train"), ("val", "test")):
        write_parquet(root / "data", to_arrow(image_rows(images, split)), f"{name}-{{}}.parquet")
    return root


def kaggle(images: Path, root: Path) -> Path:
    """Write a table of one split beside a folder of images without endings in it."""
    (root / "train_images").mkdir(parents=True)
    rows = ["id,breed"]
    for path in sorted((images / "train").rglob("*.jpg")):
        rows.append(f"{path.parent.name}_{path.stem},{path.parent.name}")
        shutil.copyfile(path, root / "train_images" / f"{path.parent.name}_{path.name}")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")
    return root


def other_names(images: Path, root: Path) -> Path:
    """Copy the splits under other names."""
    shutil.copytree(images / "train", root / "training")
    shutil.copytree(images / "val", root / "test")
    return root


LAYOUTS = {
    "parquet files of the hub": hub,
    "shards": lambda images, root: archive_folder(images, root, "shards"),
    "ZIP with splits": lambda images, root: archive_folder(images, root, "one zip"),
    "tar without splits": lambda images, root: write_tar(root / "plain.tar", files_of(images / "train")),
    "ZIP without splits": lambda images, root: write_zip(root / "plain.zip", files_of(images / "train")),
    "class folders without splits": lambda images, root: Path(shutil.copytree(images / "train", root)),
    "folder above": lambda images, root: Path(shutil.copytree(images, root / "tiny")).parent,
    "splits of other names": other_names,
    "Kaggle": kaggle,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_hints_lead_to_a_training(image_folder, tmp_path, layout, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    root = LAYOUTS[layout](image_folder, tmp_path / "data")
    options = small_options(root, tmp_path / "out", "OPTIM.MAX_EPOCH", 1, "OPTIM.WARMUP_EPOCHS", 0)
    said = ""
    for _ in range(5):
        if dispatch("distribuuuu", ["train", *options]) == 0:
            return
        said += f"\n{options[30:]}: {(error := capfd.readouterr().err)[-1500:]}"
        options += follow(error, tmp_path)
    pytest.fail(said)


def follow(message: str, folder: Path) -> list[str]:
    """Run the command that the first fix of a message names, if it does; return the options to set."""
    fix, _, after = message.partition("fix: ")[2].splitlines()[0].partition("; or")[0].partition(", then ")
    fix = fix.removeprefix("unpack it: ")
    if "distribuuuu " not in fix:
        return [word for pair in _OPTIONS.findall(fix) for word in shlex.split(pair)]
    while (done := run(fix, folder)).returncode:  # e.g. the columns of a table, which have other names
        added = _OPTIONS.findall(done.stderr.partition("fix: ")[2])
        assert added and added[0] not in fix, done.stderr
        fix = " ".join([fix, *added])
    named = done.stdout.partition("to train: ")[2].splitlines()[:1] or [after]
    pairs = [shlex.split(pair) for pair in _OPTIONS.findall(named[0])]
    return [str(folder / word) if word == "OUT" else word for pair in pairs for word in pair]


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a command as a user types it, in a folder."""
    for word in ("distribuuuu", "python"):
        module = " -m distribuuuu" if word == "distribuuuu" else ""
        command = re.sub(rf"(^|&& ){word} ", lambda match, new=module: f"{match[1]}{sys.executable}{new} ", command)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, shell=True, capture_output=True, text=True, cwd=folder, env=env, timeout=300)
