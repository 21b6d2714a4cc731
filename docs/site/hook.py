"""Hook of MkDocs: pages from outside of docs/, files of the repository as pages, and the API reference.

Pages are written for readers of the repository, so their links are paths of it. Here each link is resolved to a file of
the repository and replaced by the address of that file's page. A page of docs/ keeps its path without `docs/`.
"""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

from distribuuuu import _MODULE_OF

ROOT = Path(__file__).parents[2]
# Files outside of docs/ that are pages. The first is the start page; docs/README.md is replaced by the navigation.
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md",
         *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tutorial").rglob("*.md")))  # fmt: skip
START = {"README.md": "index.md", "docs/README.md": "index.md"}
# A link or an image; code of a page may look like one, so only links to existing files are replaced.
LINK = re.compile(r"(\]\()([^()\s#]+)((?:#[^()\s]*)?\))")
# The pages of commands that a fork may delete.
COMMAND_PAGES = ("doctor", "plan", "sweep", "report", "predict", "trackers")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash", ".json": "json"}


def site_path(path: str) -> str:
    """Return the path of a file of the repository in the site."""
    if path in START:
        return START[path]
    path = path.removeprefix("docs/")
    if Path(path).suffix in (".md", ".svg", ".png"):
        return path
    if Path(path).suffix == ".ipynb":
        return str(Path(path).with_suffix(".md"))
    return f"source/{path}.md"


def repository_path(site: str) -> str:
    """Return the path in the repository of a page of the site."""
    if site == "index.md":
        return "README.md"
    if site.startswith("notebooks/"):
        return f"docs/{Path(site).with_suffix('.ipynb')}"
    return site if site in PAGES else f"docs/{site}"


def find_targets(text: str, page: str) -> dict[str, str]:
    """Return the files of the repository that the links of a page name: link -> path. `page` is its path."""
    links = {match[2] for match in LINK.finditer(text) if "://" not in match[2]}
    paths = {link: posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) for link in links}
    return {link: path for link, path in paths.items() if not path.startswith("..") and (ROOT / path).is_file()}


def replace_links(text: str, page: str) -> str:
    """Return the text of a page with links for the site."""
    targets, start = find_targets(text, page), posixpath.dirname(site_path(page)) or "."

    def replace(match: re.Match) -> str:
        if match[2] not in targets:
            return match[0]
        return match[1] + posixpath.relpath(site_path(targets[match[2]]), start) + match[3]

    return LINK.sub(replace, text)


def source_page(path: str) -> str:
    """Return the page that shows a file of the repository."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n````{language}\n{(ROOT / path).read_text(encoding='utf-8')}\n````\n"


def notebook_page(path: Path) -> str:
    """Return the page of a notebook: its text, and its code in blocks."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    text = "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in parts)
    return f"{text}\n\n[Download this notebook]({path.name})\n"


def reference_page() -> str:
    """Return the API reference: directives of mkdocstrings for the names that docs/python_api.md lists."""
    table = (ROOT / "docs/python_api.md").read_text(encoding="utf-8").partition("## Stable API")[2]
    lines = ["# API reference", "", "The [stable API](python_api.md#stable-api), from the docstrings."]
    for module, names in re.findall(r"^\| `([\w.]+)` \| (.+) \|$", table, re.MULTILINE):
        lines += ["", f"## {module}"]
        for name in re.findall(r"`(\w+)`", names):
            home = _MODULE_OF[name] if module == "distribuuuu" else module
            lines += ["", f"::: {home}.{name}"]
    return "\n".join(lines) + "\n"


def gallery_page() -> str:
    """Return the page that links to the pages of the gallery."""
    titles = {
        "report.html": "Report of a run: classes, mistakes",
        "sweep.html": "Sweep over the learning rate",
    }
    lines = ["# Gallery", "", "Pages as the commands write them, of short runs of `shapes/resnet14`:", ""]
    return "\n".join([*lines, *(f"- [{title}](gallery/{name})" for name, title in titles.items())]) + "\n"


def keep_existing(nav: list, missing: set[str]) -> list:
    """Return the navigation without the pages of deleted commands."""
    kept: list = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, value),) = entry.items()
            value = keep_existing(value, missing) if isinstance(value, list) else value
            kept += [] if value == [] or (isinstance(value, str) and value in missing) else [{title: value}]
        elif entry not in missing:
            kept.append(entry)
    return kept


def on_files(files: Files, config) -> Files:
    """Add the pages from outside of docs/ and the files that pages link to."""
    commands = {f"{name}.md" for name in COMMAND_PAGES if not (ROOT / "docs" / f"{name}.md").exists()}
    config.nav = keep_existing(config.nav, commands)
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in PAGES}
    pages = {site_path(path): text for path, text in texts.items()}
    for file in files.documentation_pages():
        if file.src_uri.endswith(".md"):
            texts[repository_path(file.src_uri)] = file.content_string
    linked = {path for page, text in texts.items() for path in find_targets(text, page).values()}
    notebooks = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
    pages |= {site_path(f"docs/notebooks/{path.name}"): notebook_page(path) for path in notebooks}
    pages |= {"reference.md": reference_page(), "gallery.md": gallery_page()}
    pages |= {site_path(path): source_page(path) for path in sorted(linked) if site_path(path).startswith("source/")}
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    for path in sorted(linked):
        if Path(path).suffix in (".svg", ".png") and not path.startswith("docs/"):
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "site.css", abs_src_path=str(ROOT / "docs" / "site" / "site.css")))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Replace the links of a page that exists in the repository."""
    if page.file.src_uri == "MODEL_ZOO.md":
        page.meta["hide"] = ["toc"]  # its tables need the width
    path = repository_path(page.file.src_uri)
    if path == "README.md":  # its picture is HTML, for light and dark
        markdown = re.sub(r'\b(src|srcset)="docs/', r'\1="', markdown)
    return replace_links(markdown, path) if (ROOT / path).is_file() else markdown
