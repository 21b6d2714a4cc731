"""The documentation as it is read: the site, the notebooks, and the page about photographs."""

import csv
import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from PIL import Image
from support.browser import Browser, find_browser
from support.images import draw_folder
from support.runs import ROOT, small_options

NOTEBOOKS = {
    "photographs_to_onnx": ("my_lists", "model.onnx", "import onnxruntime"),
    "fork_and_add_a_loss": ("did you mean epsilon", "poly"),
}
# What a browser would fetch while a page is read.
FETCHED = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=["']?https?://""")


@pytest.fixture
def environment(monkeypatch):
    """Commands of this Python and of this checkout."""
    set_environment(monkeypatch)


def set_environment(monkeypatch) -> None:
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


@pytest.fixture
def browser():
    if not (program := find_browser()):
        pytest.skip("Chromium is not installed")
    with Browser(program, width=1280) as browser:
        yield browser


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words) -> None:
        """Print nothing."""


@pytest.fixture
def address(site):
    """The URL of the site, from a server in a thread."""
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
def test_commands_and_the_measured_column_are_whole_on_a_laptop(address, browser):
    for page in ("", "photographs/", "predict/", "launchers/"):
        browser.open(address + page)
        cut = "[...document.querySelectorAll('pre > code')].filter(one => one.scrollWidth > one.clientWidth + 1).length"
        assert browser.evaluate(cut) == 0, page
    browser.open(f"{address}MODEL_ZOO/")
    headers = "[...document.querySelectorAll('th')].filter(one => one.textContent == 'top-1 here')"
    over = "one.getBoundingClientRect().right - one.closest('.md-typeset__table').getBoundingClientRect().right"
    assert max(browser.evaluate(f"{headers}.map(one => {over})")) <= 1


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


INTERRUPT = """
def interrupt():
    path = os.path.join(options["OUT_DIR"], "metrics.jsonl")
    while not os.path.exists(path) or not open(path).read():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
distribuuuu.train(None, {**options, "OPTIM.MAX_EPOCH": 200})
"""
LEFT = """
print(open(f"/proc/self/task/{os.getpid()}/children").read().split())
print(signal.getsignal(signal.SIGINT) is before)
"""


@pytest.mark.slow
def test_a_notebook_trains_stops_resumes_and_continues_after_errors(image_folder, tmp_path):
    nbformat, nbclient, _ = map(pytest.importorskip, ("nbformat", "nbclient", "ipykernel"))
    words = small_options(image_folder, tmp_path / "out", "TRAIN.WORKERS", 1)
    options = dict(zip(words[::2], words[1::2], strict=True))
    sources = [
        f"import os, signal, sys, threading, time\nsys.path.insert(0, {str(ROOT)!r})\nimport distribuuuu\n"
        f"options = {options!r}\nbefore = signal.getsignal(signal.SIGINT)",
        "distribuuuu.train(None, {**options, 'NO.KEY': 1})",
        INTERRUPT,
        "result = distribuuuu.train(None, {**options, 'OPTIM.MAX_EPOCH': 1, 'TRAIN.AUTO_RESUME': False})",
        "print(distribuuuu.evaluate(result)['top1'] == result.metrics['top1'])",
        LEFT,
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(notebook, timeout=300, allow_errors=True, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    errors = {number: output.ename for number, cell in enumerate(outputs) for output in cell if "ename" in output}
    assert errors == {1: "ConfigError", 2: "KeyboardInterrupt"}
    texts = ["".join(str(output.get("text", output.get("data", ""))) for output in cell) for cell in outputs]
    assert "a checkpoint was saved" in str(outputs[2][-1]) and "epoch 1/1" in texts[3], "the text of the progress bar"
    assert texts[4].endswith("True\n") and texts[5] == "[]\nTrue\n"
    assert "can only test a child process" not in "".join(texts)


PAGE = (ROOT / "docs" / "photographs.md").read_text(encoding="utf-8")
COMMANDS = re.search(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
# What the page advises without a network.
FROM_SCRATCH = " ".join(re.search(r"`(--cfg clothing10/resnet14\s.*?)`", PAGE, re.DOTALL)[1].split())
# Runs the code of a model card for each image in a process without this package.
CARD = """
import runpy, sys
predict = runpy.run_path("card.py")["predict"]
print("\\n".join(predict(path)[0][0] for path in sys.argv[1:]))
assert not any(name.partition(".")[0] in ("distribuuuu", "torch") for name in sys.modules)
"""


@pytest.mark.slow
def test_the_commands_lead_to_an_onnx_file_with_the_answers_of_predict(tmp_path):
    pytest.importorskip("onnxruntime")
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
    command = ["bash", "-euo", "pipefail", "-c", COMMANDS.replace("--cfg photographs", FROM_SCRATCH)]
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
