"""Tables of images: CSV and TSV files with a column of paths and one or more columns of labels.

A text is in UTF-8 or UTF-16 and has a header, unless the names of its columns are given; other columns are ignored.
Spaces around a field are ignored, but for those at the start of a quoted one.
"""

import contextlib
import csv
import functools
import itertools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted, first_few
from distribuuuu.data.datasets.array_file import Content, find_stamp, pack_names
from distribuuuu.data.datasets.targets import encode_labels, note_alike
from distribuuuu.files.image_files import EXTENSIONS, TABLE_ENDINGS
from distribuuuu.files.untrusted import open_text, printable

# A field that needs no quotes.
_PLAIN = r'(?!\s)[^,"\r\n]*(?<!\s)'
# Characters that are read at a time, and those of a place in a message, which has the text of a field.
_MAX_LINE, _MAX_PLACE = 1 << 20, 300
# Texts of 0 and 1 in columns of one class each.
_BITS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1, "": 0, "nan": 0}
_UNCERTAIN = ("-1", "-1.0")
_MISSING = "names images that do not exist"
# The places of each kind of problem, e.g. "line 3, 'a.jpg'".
Problems = dict[str, list[str]]


@dataclass(frozen=True)
class TableSpec:
    """The meaning of the columns of a table, see DATA.TABLE.

    Attributes:
        key: "label", one class per image; or "labels", any number.
        columns: the columns of the labels; several of one class each hold 0 or 1.
        split, value: the column that selects rows, and its value; empty: all rows.
        header: DATA.TABLE.columns.
        separator: between the labels in a field; empty: a semicolon.
        uncertain: the value of -1 in columns of one class each, 0 or 1; -1: an error.
        names: a further table, and its columns of labels and of the names of their classes.
    """

    path: str = "path"
    key: str = "label"
    columns: tuple[str, ...] = ("label",)
    template: str = "{}"
    delimiter: str = ""
    split: str = ""
    value: str = ""
    header: tuple[str, ...] = ()
    separator: str = ""
    uncertain: int = -1
    names: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that a table must have."""
        return (self.path, *self.columns, *([self.split] if self.split else []))


def scan_table(path: str, spec: TableSpec) -> Content:
    """Return the content of an index of the images of a table, in its order; raise ConfigError with all problems."""
    folder, problems = os.path.dirname(path), Problems()
    finder, lines, labels = PathFinder(folder), dict[tuple[str, str], int](), dict[tuple[str, str], list[str]]()
    try:
        names_of = _read_names(folder, *spec.names) if spec.names else {}
        for line, text, cells in read_rows(path, spec, problems):
            problem, place = "", finder.find(spec.template.replace("{}", text))
            found, also = parse_labels(spec, cells), ""
            if names_of:
                found = _name_labels(spec, found, names_of)
            if isinstance(found, str):
                problem = found
            elif place is None:
                problem = _MISSING
            elif place not in labels:
                lines[place], labels[place] = line, found
            elif spec.key == "labels" and len(spec.columns) == 1:  # a row for each label
                labels[place] += [label for label in found if label not in labels[place]]
            else:
                problem, also = "names an image again", f" as in line {lines[place]}"
            if problem:
                problems.setdefault(problem, []).append(f"line {line}, {text!r}{also}")
    except OSError as error:
        raise ConfigError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error
    notes = finder.notes(path, problems)
    names = _find_classes(path, spec, [*labels.values()], notes, problems)
    if problems:
        fix = "correct or remove these lines"
        if _MISSING in problems and not labels and spec.template == "{}":
            ending = "" if problems[_MISSING][0][:-1].lower().endswith(EXTENSIONS) else ".jpg"
            fix = f"DATA.TABLE.template, e.g. 'images/{{}}{ending}', or DATA.TABLE.path, the column of the paths"
        told = sentences(path, problems)
        raise ConfigError([f"{text}; fix: {fix}" if _MISSING in text else text for text in told])
    if not labels:
        raise ConfigError(f"{path} has no line{'' if spec.header else ' but its header'}; fix: add one for each image")
    folders = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in labels))}
    # The tables are the last of the files, so that a change of them is noticed.
    files = [*folders, *spec.names[:1], os.path.basename(path)]
    meta, arrays = encode_labels([*labels.values()], names, several=spec.key == "labels")
    arrays |= {
        **pack_names("files", [*map(os.fsencode, files)]),
        "stamps": np.array([find_stamp(os.path.join(folder, name)) for name in files], np.int64),
        **pack_names("names", [os.fsencode(name) for _, name in labels]),
        "file": np.array([folders[name] for name, _ in labels], np.int32),
    }
    return {**meta, "ignored": {}, "num_beside": 0, "notes": notes}, arrays


def _name_labels(spec: TableSpec, labels: list[str] | str, names_of: Mapping[str, str]) -> list[str] | str:
    """Return labels by the names of another table, or what is wrong with them."""
    if isinstance(labels, str):
        return labels
    known = list(dict.fromkeys(names_of.get(label, "") for label in labels))
    return known if all(known) else f"has labels without a name in {spec.names[0]}"


def _read_names(folder: str, file: str, label: str, name: str) -> dict[str, str]:
    """Return the name of each label in a table of both."""
    path, names, problems = os.path.join(folder, file), dict[str, str](), Problems()
    for line, text, (named,) in read_rows(path, TableSpec(label, "label", (name,)), problems):
        if not named or names.setdefault(text, named) != named:
            problems.setdefault("has labels without one name", []).append(f"line {line}, {text!r}")
    if problems:
        raise ConfigError([*sentences(path, problems)])
    return names


def _find_classes(path: str, spec: TableSpec, rows: list[list[str]], notes: list[str], problems: Problems) -> list[str]:
    """Return the sorted names of the classes; add warnings and problems."""
    without_fractions(rows)
    found = {label for row in rows for label in row}
    separator = "" if spec.separator or spec.names or len(spec.columns) > 1 else find_separator(found)
    if separator and spec.key == "labels":
        fix = f"fix: set DATA.TABLE.separator {separator!r}, or ';' if each is one name"
        problems[f"has labels that are several names; {fix}"] = sorted(name for name in found if separator in name)
    elif separator:
        several = f"labels seem to be several names, separated by {separator!r}, and each combination is one class"
        notes.append(f"{path}: {several}; for several classes per image: DATA.NAME multilabel LOSS.NAME bce")
    if len(spec.columns) > 1:  # also a column without a 1 is a class
        found |= {*spec.columns}
    if not found and rows:
        problems["has no label on any line"] = [""]
    notes += note_alike(path, names := sort_labels(found))
    return names


def find_separator(labels: set[str]) -> str:
    """Return the separator of the names that labels seem to consist of; empty if there is none.

    The parts of one are labels themselves. Or, as a name may have spaces, for another than a space, they repeat: there
    are fewer of them than labels, or each is in several labels.
    """
    for separator in ("|", ",", "/", " "):
        parts_of = {label: {*_split(label, separator)} for label in labels}
        joined = [parts for parts in parts_of.values() if len(parts) > 1]
        parts = Counter(itertools.chain.from_iterable(parts_of.values()))
        is_repeated = len(parts) < len(labels) or all(parts[part] > 1 for several in joined for part in several)
        if any(several <= labels for several in joined) or (joined and is_repeated and separator != " "):
            return separator
    return ""


def _split(field: str, separator: str) -> list[str]:
    return [part for part in map(str.strip, field.split(separator)) if part]


def sort_labels(names: Iterable[str]) -> list[str]:
    """Return names in the order of their numbers if all are numbers, else in that of their texts."""
    names = sorted(names)
    is_number = all(re.fullmatch(r"-?\d+(\.\d+)?", name) for name in names)
    return sorted(names, key=float) if is_number else names


def without_fractions(labels: list[list[str]]) -> None:
    """Replace labels such as 1.0 by 1 if all are whole: a spreadsheet with an empty cell has made floats of them."""
    if all(re.fullmatch(r"-?\d+\.0+", label) for row in labels for label in row):
        for row in labels:
            row[:] = [label.partition(".")[0] for label in row]


def parse_labels(spec: TableSpec, cells: Sequence[str]) -> list[str] | str:
    """Return the labels in the fields of an image, or what is wrong with them."""
    if len(cells) > 1:
        if any(cell in _UNCERTAIN for cell in cells):
            if spec.uncertain < 0:
                return "has -1 for an uncertain label; fix: set DATA.TABLE.uncertain 0, or 1"
            cells = [str(spec.uncertain) if cell in _UNCERTAIN else cell for cell in cells]
        bits = [_BITS.get(cell.lower()) for cell in cells]
        if None in bits:
            return "has values other than 0 and 1 in columns of one class each"
        names = [name for name, bit in zip(spec.columns, bits, strict=True) if bit]
        return names if spec.key == "labels" or len(names) == 1 else "has images without exactly one 1"
    parts = _split(cells[0], spec.separator or ";") if spec.key == "labels" else cells
    names = list(dict.fromkeys(name for name in parts if name))
    return names if names or spec.key == "labels" else "has images without a label"


def csv_line(cells: Sequence[str]) -> str:
    """Return a line of a CSV: a cell with a comma, a quote, a line break or a space at its ends is quoted."""
    cells = [cell if re.fullmatch(_PLAIN, cell) else '"{}"'.format(cell.replace('"', '""')) for cell in cells]
    return ",".join(cells) + "\n"


def sentences(path: str | os.PathLike, problems: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return a sentence for each kind of problem, with its first few places."""
    texts = {kind: [printable(place[:_MAX_PLACE]) for place in places] for kind, places in problems.items() if places}
    return tuple(f"{path} {kind}: {first_few(places, '; ')}".removesuffix(": ") for kind, places in texts.items())


# ------------------------------------------------------------------------------------------- rows


def read_rows(path: str, spec: TableSpec, problems: Problems) -> Iterator[tuple[int, str, list[str]]]:
    """Yield line, path and labels of the rows of a split; add invalid lines to `problems`."""
    values: set[str] = set()
    is_empty = True
    try:
        for line, cells in _read_csv(path, spec, problems):
            image, *labels = cells
            if spec.split:
                value = labels.pop()
                if len(values) < 100:
                    values.add(value)
                if value != spec.value:
                    continue
            is_empty = False
            if image:
                yield line, image, labels
            else:
                problems.setdefault("has lines without an image", []).append(f"line {line}")
    except (UnicodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not a CSV in UTF-8: {error}; fix: save it as CSV in UTF-8") from error
    if values and is_empty:
        problems[f"has no row with {spec.split} {spec.value}; the column has"] = sorted(values)


def _read_csv(path: str, spec: TableSpec, problems: Problems) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the fields of the needed columns of each row of a text."""
    with open_text(path, newline="") as file:
        # A longer line, which no list has, is read in pieces, of which one is invalid: a file may have a single line.
        lines = iter(functools.partial(file.readline, _MAX_LINE), "")
        first, delimiter = next(lines, ""), spec.delimiter
        if not delimiter and (named := re.fullmatch(r"sep=(.)\s*", first)):  # the first line in a CSV of Excel
            first, delimiter = next(lines, ""), named[1]
        delimiter = delimiter or find_delimiter(path, first, spec)
        rows = itertools.chain([first] if first else [], lines)
        reader = csv.reader(rows, strict=True, delimiter=delimiter, skipinitialspace=delimiter != " ")
        header = [*spec.header] or [name.strip() for name in next(reader, [])]
        places = find_columns(spec, header, path)
        for row in reader:
            if not any(map(str.strip, row)):  # an empty line, or one of a spreadsheet
                continue
            while len(row) > len(header) and not row[-1].strip():
                row.pop()
            if len(row) != len(header):
                of = "DATA.TABLE.columns'" if spec.header else "the header's"
                kind = f"has lines with another number of fields than {of} {len(header)}"
                kind += f" (a {'comma' if delimiter == ',' else 'delimiter'} within a name needs " + '"quotes")'
                problems.setdefault(kind, []).append(f"line {reader.line_num} has {len(row)}")
            else:
                yield reader.line_num, [row[at].rstrip() for at in places]


def find_delimiter(path: str, first: str, spec: TableSpec) -> str:
    """Return the delimiter of a text: that of its ending, unless only another one finds all columns in its header."""
    usual, needed = TABLE_ENDINGS.get(os.path.splitext(path)[1].lower(), ","), {*map(str.casefold, spec.needed)}
    for delimiter in (usual, "\t", ";", "|", ",") if not spec.header else ():
        if needed <= {field.strip().strip('"').casefold() for field in first.split(delimiter)}:
            return delimiter
    return usual


def find_columns(spec: TableSpec, header: Sequence[str], path: str) -> list[int]:
    """Return the places of the needed columns; raise ConfigError if one is missing. Case matters only between them."""
    folded = [name.casefold() for name in header]
    names = [header[folded.index(name.casefold())] if folded.count(name.casefold()) == 1 else name
             for name in spec.needed]  # fmt: skip
    if any(name not in header for name in names):
        from distribuuuu.hints.sources import explain_columns

        raise ConfigError(f"{path} {explain_columns(spec, header)}")
    return [header.index(name) for name in names]


# ---------------------------------------------------------------------------------- paths of other systems


def _folded(name: str) -> str:
    """Return a name in lower case and the Unicode form NFC: macOS and some archives write the same letters as NFD."""
    return unicodedata.normalize("NFC", name).casefold()


class PathFinder:
    """The files that a table names, relative to a root or as another system writes them; a folder is listed once."""

    def __init__(self, root: str):
        self._root = root
        self._listed: dict[str, dict[str, Any]] = {}
        self._num_read_otherwise, self._example = 0, ""
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
                self._prefixes |= {"/".join(parts[:start]) or "/"} if is_absolute else set()
                self._num_read_otherwise += 1
                self._example = self._example or f"{text} is read as {os.path.join(*found)}"
                return os.path.split(os.path.join(*found))
        return None

    def _walk(self, parts: Sequence[str]) -> list[str]:
        """Return the parts of a path as they are on the disk, if only one path has them; else none."""
        found: list[str] = []
        for part in parts:
            entries = self._list(os.path.join("", *found))
            alike = [part] if part in entries[""] or part == ".." else entries.get(_folded(part), [])
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
                entries.setdefault(_folded(name), []).append(name)
            self._listed[folder] = entries
        return self._listed[folder]

    def notes(self, path: str, problems: dict[str, list[str]]) -> list[str]:
        """Return a warning about the paths; add a problem if those of several other folders would become one."""
        if len(self._prefixes) > 1:
            problems["has absolute paths of another machine, of several folders"] = sorted(self._prefixes)
        other = "paths of another system or machine, or in another case or Unicode form (NFC, NFD)"
        note = f"{path}: {counted(self._num_read_otherwise, 'row')} with {other}: {self._example}"
        return [note] if self._num_read_otherwise else []
