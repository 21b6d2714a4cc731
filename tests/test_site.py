"""The documentation site and the notebooks, built and run from the first page to the last."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote

import pytest
from support.browser import Browser, find_browser

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
    with Browser(program) as browser:
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
def test_each_page_in_a_browser(site, address, browser):
    """As wide as a phone: no message, failed or foreign request, or horizontal scrolling; each link has a target."""
    problems, anchors, links = [], {}, {}
    for path in sorted(site.rglob("*.html")):
        url = address + str(path.relative_to(site)).removesuffix("index.html")
        browser.show(390, "light")
        browser.open(url)
        problems += [(url, problem) for problem in browser.problems]
        problems += [(url, asked) for asked in browser.requests if not asked.startswith((address, "data:", "blob:"))]
        if browser.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
            problems.append((url, "wider than the window"))
        anchors[url] = {"", *browser.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")}
        links[url] = browser.evaluate("[...document.links].map(link => link.href)")
    for url, targets in links.items():
        for target in targets:
            page, _, anchor = target.partition("#")
            page = page.removesuffix("index.html")
            if page in anchors and unquote(anchor) not in anchors[page]:
                problems.append((url, f"no anchor: {target}"))
            elif page.startswith(address) and page not in anchors and not (site / page[len(address) :]).is_file():
                problems.append((url, f"no page: {target}"))
    assert not problems and len(links) > 60


@pytest.mark.slow
def test_commands_and_the_measured_column_are_whole_on_a_laptop(address, browser):
    browser.show(1280, "light")
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
