"""Names, paths and texts as other systems and programs write them, read where they have one meaning."""

import contextlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distribuuuu.config.errors import counted, first_few

# The line in which Excel names the separator of a CSV.
_SEPARATOR_LINE = re.compile(r"sep=(.)\s*")


def normal_form(name: str) -> str:
    """Return a name in the Unicode form NFC: macOS and some archives write the same letters as NFD."""
    return unicodedata.normalize("NFC", name)


def match_forms(source: str, unknown: Sequence[str], numbers: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """Return the numbers of names that are known in another Unicode form, and a warning about them if there are any."""
    forms: dict[str, list[str]] = {}
    for name in numbers:
        forms.setdefault(normal_form(name), []).append(name)
    found = {name: known[0] for name in unknown if len(known := forms.get(normal_form(name), [])) == 1}
    shown = first_few([f"{ascii(name)[1:-1]} for {ascii(known)[1:-1]}" for name, known in found.items()])
    text = "class names differ from those of the training data in their Unicode form only (NFC, NFD)"
    note = f"{source}: {text}, and are taken as equal: {shown}"
    return {name: numbers[known] for name, known in found.items()}, [note] * bool(found)


def find_delimiter(first: str, usual: str, needed: Sequence[str]) -> str:
    """Return the delimiter of a text by its header: another than the usual one if only that finds all columns."""

    def fits(delimiter: str) -> bool:
        fields = {field.strip().strip('"').casefold() for field in first.split(delimiter)}
        return {*map(str.casefold, needed)} <= fields

    others = [delimiter for delimiter in ("\t", ";", "|", ",") if fits(delimiter)]
    return usual if fits(usual) or len(others) != 1 else others[0]


def without_separator_line(lines: Iterator[str]) -> tuple[str, list[str]]:
    """Return the separator that a first line "sep=;" names, else "", and the lines that were read but are not that."""
    first = next(lines, "")
    named = _SEPARATOR_LINE.fullmatch(first)
    return (named[1], []) if named else ("", [first])


def without_fractions(labels: list[list[str]]) -> None:
    """Replace labels such as 1.0 by 1 if all are whole: a spreadsheet with an empty cell has made floats of them."""
    if all(re.fullmatch(r"-?\d+\.0+", label) for row in labels for label in row):
        for row in labels:
            row[:] = [label.partition(".")[0] for label in row]


class PathFinder:
    """The files that a table names, as they are or as another system writes their paths; a folder is listed once.

    Args:
        root: the folder that paths are relative to.
    """

    def __init__(self, root: str):
        self._root = root
        self._listed: dict[str, dict[str, Any]] = {}
        self._forms: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._prefixes: set[str] = set()

    def find(self, text: str) -> tuple[str, str] | None:
        """Return the folder, relative to the root or absolute, and the name of a file; None: there is none."""
        folder, name = os.path.split(os.path.normpath(text))
        if name in self._list(folder)[""]:
            return folder, name
        parts = [part for part in re.split(r"[\\/]+", re.sub(r"^[A-Za-z]:", "", text)) if part not in ("", ".")]
        is_absolute = bool(re.match(r"[/\\]|[A-Za-z]:", text))
        for start in range(len(parts) if is_absolute else min(1, len(parts))):
            if found := self._walk(parts[start:]):
                self._note(text, parts[:start], parts[start:], found, is_absolute)
                return os.path.split(os.path.join(*found))
        return None

    def _walk(self, parts: Sequence[str]) -> list[str]:
        """Return the parts of a path as they are on the disk, if only one path has them; else none."""
        found: list[str] = []
        for part in parts:
            entries = self._list(os.path.join("", *found))
            alike = [part] if part in entries[""] or part == ".." else entries.get(normal_form(part).casefold(), [])
            if len(alike) != 1:
                return []
            found += alike
        return found if found and os.path.isfile(os.path.join(self._root, *found)) else []

    def _list(self, folder: str) -> dict[str, Any]:
        """Return the entries of a folder: all of them by "", and those alike by their folded name."""
        if folder not in self._listed:
            names: list[str] = []
            with contextlib.suppress(OSError, ValueError):  # ValueError: a path with a NUL
                names = os.listdir(os.path.join(self._root, folder) or ".")
            entries: dict[str, Any] = {"": set(names)}
            for name in names:
                entries.setdefault(normal_form(name).casefold(), []).append(name)
            self._listed[folder] = entries
        return self._listed[folder]

    def _note(self, text: str, dropped: Sequence[str], parts: Sequence[str], found: list[str], absolute: bool) -> None:
        own, others = [*map(normal_form, parts)], [*map(normal_form, found)]
        forms = {
            "paths of another system, whose separator is no slash here": "\\" in text,
            "absolute paths of another machine": absolute,
            "names in another Unicode form (NFC, NFD)": own == others and [*parts] != found,
            "names in another case": own != others,
        }
        if absolute:
            self._prefixes.add("/".join(dropped) or "/")
        for form in (form for form, applies in forms.items() if applies):
            self._forms[form] += 1
            self._examples.setdefault(form, f"{text} is read as {os.path.join(*found)}")

    def notes(self, path: str, problems: dict[str, list[str]]) -> list[str]:
        """Return warnings about the paths; add a problem if those of several other folders would become one."""
        if len(self._prefixes) > 1:
            problems["has absolute paths of another machine, of several folders"] = sorted(self._prefixes)
        found = self._forms.items()
        return [f"{path}: {counted(num, 'row')} with {form}: {self._examples[form]}" for form, num in found]
