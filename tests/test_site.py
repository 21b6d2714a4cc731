"""The documentation site and the notebooks, built and run from the first page to the last."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = {
    "photographs_to_onnx": ("my_lists", "model.onnx", "import onnxruntime"),
    "fork_and_add_a_loss": ("did you mean epsilon", "poly"),
}
# What a browser would fetch while a page is read.
FETCHED = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=["']?https?://""")


@pytest.fixture
def environment(monkeypatch):
    """Commands of this Python and of this checkout."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_each_page_is_once_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"[\w./-]+\.md", nav)
    assert sorted(listed) == sorted(set(listed))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(listed), pages - set(listed)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path, environment, monkeypatch):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    monkeypatch.setenv("GALLERY", str(tmp_path / "gallery"))
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    pages = {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html")}
    assert not [name for name, page in pages.items() if FETCHED.search(page)], "a page asks another host"
    assert "OPTIM.BASE_LR" in pages["options/index.html"]
    assert 'id="distribuuuu.api.train"' in pages["reference/index.html"]
    assert "accuracy" in pages["gallery/report.html"]
    assert "sharpness" in pages["source/examples/sam.py/index.html"].lower()


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, tmp_path, environment):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = str([cell.get("outputs") for cell in notebook.cells])
    assert "Traceback" not in text
    assert all(words in text for words in NOTEBOOKS[name]), text


def test_each_notebook_is_run():
    assert {path.stem for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")} == set(NOTEBOOKS)
