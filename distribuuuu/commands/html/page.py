"""The page of a report as one HTML file without links to elsewhere, and the templates of its elements."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from distribuuuu.config import ConfigError
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.untrusted import printable

_FOLDER = Path(__file__).with_name("templates")


@functools.cache
def _environment(folder: Path = _FOLDER) -> jinja2.Environment:
    """Return templates in which values are escaped: HTML, and control and direction characters."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, _FOLDER]),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = printable
    environment.globals |= {"Column": Column, "percent": percent}
    return environment


class Macros:
    """The macros of a template, e.g. `html.tiles(entries)`; each returns `Markup`."""

    def __init__(self, path: Path):
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(_environment(self._path.parent).get_template(self._path.name).module, name)


html = Macros(_FOLDER / "elements.html")


def percent(fraction: float, decimals: int = 1) -> str:
    """Return a fraction as a percentage, e.g. '91.4 %', with a space that does not break; NaN as a dash."""
    return "–" if math.isnan(fraction) else f"{100 * fraction:.{decimals}f}\N{NO-BREAK SPACE}%"


@dataclass(frozen=True)
class PageSection:
    """A section of a page: its title, also in the navigation, and elements and charts; other texts are escaped."""

    title: str
    parts: Sequence[str]

    @property
    def anchor(self) -> str:
        """The ID of the section."""
        return "".join(char if char.isalnum() else "-" for char in self.title.lower())


def build_page(title: str, subtitle: str, sections: Sequence[PageSection], footer: str = "") -> str:
    """Return a complete HTML document, without its empty sections; the other arguments are escaped."""
    css, js = (Markup((_FOLDER / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    sections = [section for section in sections if any(section.parts)]
    template = _environment().get_template("page.html")
    return template.render(title=title, subtitle=subtitle, sections=sections, footer=footer, css=css, js=js) + "\n"


def write_page(path: Path, text: str) -> None:
    """Write a page atomically; raise ConfigError if it cannot be written."""
    try:
        # Names of files may not be UTF-8.
        with replacing(path, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)
    except OSError as error:
        fix = "set --out to a file in an existing folder that is writable"
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}; fix: {fix}") from error


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        format: the format of its numbers, e.g. ".1%"; empty: its values are texts. None and NaN are dashes.
        bar: draw a bar before each number, which is a fraction from 0 to 1.
    """

    name: str
    format: str = ""
    bar: bool = False

    def text(self, value: float) -> str:
        """Return the text of a number."""
        return format(value, self.format).replace("%", " %").replace("-", "\N{MINUS SIGN}")
