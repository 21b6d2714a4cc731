"""The page of a report: sections, tiles, tables and galleries, as one HTML file without links to elsewhere."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.atomic_file import replacing
from distribuuuu.config.untrusted import printable
from distribuuuu.report.html.style import CSS, JS

# Rows from which a table has a field that filters them.
_MIN_FILTERED = 25
# The browser refuses every request and every script but those in the file.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def escape(value: Any, keep: str = "") -> str:
    """Return a value as HTML text; control and direction characters are written as escape sequences except `keep`."""
    return html.escape(printable(value, keep))


def percent(fraction: float, decimals: int = 1) -> str:
    """Return a fraction as a percentage, e.g. '91.4 %', with a space that does not break; NaN as a dash."""
    return "–" if math.isnan(fraction) else f"{100 * fraction:.{decimals}f}\N{NO-BREAK SPACE}%"


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Attributes:
        title: its title, also in the navigation.
        parts: HTML.
    """

    title: str
    parts: Sequence[str]

    @property
    def anchor(self) -> str:
        """The ID of the section."""
        return "".join(char if char.isalnum() else "-" for char in self.title.lower())

    def to_html(self) -> str:
        """Return the section."""
        return f'<section id="{self.anchor}"><h2>{escape(self.title)}</h2>{"".join(self.parts)}</section>'


def build_page(title: str, subtitle: str, sections: Sequence[Section], footer: str = "") -> str:
    """Return a complete HTML document.

    Args:
        title: its heading, as text.
        subtitle: a line below it, as text.
        sections: the sections, in order.
        footer: the last line, as text.
    """
    links = "".join(f'<a href="#{section.anchor}">{escape(section.title)}</a>' for section in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body>"
        f'<header><h1>{escape(title)}</h1><div class="sub">{escape(subtitle)}</div></header>'
        f"<nav><div>{links}</div></nav><main>{''.join(section.to_html() for section in sections)}</main>"
        f"<footer>{escape(footer)}</footer><script>{JS}</script></body></html>\n"
    )


def write_page(path: Path, text: str) -> None:
    """Write a page atomically.

    Raises:
        ConfigError: it cannot be written.
    """
    if path.exists() and not path.is_file():  # a device would be replaced by a file
        kind = "a folder" if path.is_dir() else "no regular file"
        raise ConfigError(f"--out: {path} cannot be written: it is {kind}; fix: name another file")
    try:
        with replacing(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        fix = "set --out to a file in an existing folder that is writable"
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}; fix: {fix}") from error


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of text; `kind` is "lead" for the main result, "note" for small print, "notice" to warn."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    """Return a heading within a section."""
    return f"<h3>{escape(text)}</h3>"


def tiles(entries: Sequence[tuple[str, str, str]]) -> str:
    """Return the most important figures of a page, each as (label, value, detail)."""
    names = ("label", "value", "detail")
    cells = ("".join(f'<span class="{n}">{escape(t)}</span>' for n, t in zip(names, e, strict=True)) for e in entries)
    return f'<div class="tiles">{"".join(f"<div>{cell}</div>" for cell in cells)}</div>'


def pairs(entries: Mapping[str, Any]) -> str:
    """Return a list of names and values."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in entries.items())}</dl>"


def details(summary: str, body: str) -> str:
    """Return HTML that is hidden until the reader opens it."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def preformatted(text: str) -> str:
    """Return text with its line breaks and spaces."""
    return f"<pre>{escape(text, keep=chr(10))}</pre>"


def grid(charts: Sequence[str], kind: str = "") -> str:
    """Return charts in columns, as many as fit; `kind` is "narrow" for more columns, "top" to align upper edges."""
    return f'<div class="charts {kind}">{"".join(charts)}</div>'


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: its header.
        format: the format of its numbers, e.g. ".1%"; empty: its values are texts.
        bar: draw a bar before each number, which is a fraction from 0 to 1.
        signed: color negative and positive numbers.
    """

    name: str
    format: str = ""
    bar: bool = False
    signed: bool = False

    def cell(self, value: Any) -> str:
        """Return the cell of a value; None and NaN are dashes, which are sorted last."""
        if not self.format:
            return f'<td class="text">{escape(value)}</td>'
        if value is None or math.isnan(value):
            return '<td class="num" data-v="">–</td>'
        bar = f'<span class="bar" style="background-size:{100 * value:.0f}% 100%"></span>' if self.bar else ""
        color = " bad" if self.signed and value < 0 else " good" if self.signed and value > 0 else ""
        text = format(value, self.format).replace("%", " %").replace("-", "\N{MINUS SIGN}")
        return f'<td class="num{color}" data-v="{value:.6g}">{bar}{text}</td>'


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[Any]], sortable: bool = True, ascending_by: str = ""
) -> str:
    """Return a table in a box that scrolls; a click on a header sorts it, and a long one can be filtered.

    Args:
        columns: the columns.
        rows: for each row, the value of each column: a text, or a number.
        sortable: whether it can be sorted and filtered.
        ascending_by: the column by which the rows are sorted, if any, for its header.
    """
    head = ""
    for column in columns:
        name = escape(column.name)
        kind = ' class="num"' if column.format else ""
        kind += ' aria-sort="ascending"' if column.name == ascending_by else ""
        head += f"<th{kind}>{f'<button type=button>{name}</button>' if sortable else name}</th>"
    body = "".join(
        f"<tr>{''.join(column.cell(value) for column, value in zip(columns, row, strict=True))}</tr>" for row in rows
    )
    has_filter = sortable and len(rows) >= _MIN_FILTERED
    search = '<input type="search" placeholder="filter" aria-label="filter the rows">' if has_filter else ""
    kind = ' class="sortable"' if sortable else ""
    return f'{search}<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


@dataclass(frozen=True)
class Card:
    """An image of a gallery.

    Attributes:
        title: what is most important about it.
        lines: further texts.
        file: its file or index.
        images: data URIs, shown side by side.
        is_tiny: whether its pixels are to be seen as squares.
    """

    title: str
    lines: Sequence[str] = ()
    file: str = ""
    images: Sequence[str] = field(default_factory=tuple)
    is_tiny: bool = False

    def to_html(self) -> str:
        """Return the card."""
        kind = ' class="tiny"' if self.is_tiny else ""
        name = escape(self.file)
        images = "".join(f'<img{kind} src="{uri}" alt="{name}">' for uri in self.images)
        images = f'<div class="images">{images}</div>' if images else ""
        lines = "".join(f"<div>{escape(line)}</div>" for line in self.lines)
        shown = f"…/{'/'.join(self.file.split('/')[-3:])}" if self.file.startswith("/") else self.file
        file = f'<div class="file" title="{name}">{escape(shown)}</div>'
        text = f'<div class="title">{escape(self.title)}</div>{lines}{file}'
        return f'<div class="card">{images}<div class="text">{text}</div></div>'


def gallery(cards: Sequence[Card], kind: str = "") -> str:
    """Return images with texts, in as many columns as fit; `kind` is "small" for more columns."""
    return f'<div class="gallery {kind}">{"".join(card.to_html() for card in cards)}</div>'
