"""Tables of images: CSV and TSV files with a column of paths and one or more columns of labels.

A text is in UTF-8 or UTF-16 and has a header, unless the names of its columns are given; other columns are ignored.
Spaces around a field are ignored, unless it is quoted.
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
from distribuuuu.data.datasets.targets import encode_targets, note_alike
from distribuuuu.files.image_files import TABLE_ENDINGS
from distribuuuu.files.text_file import open_text
from distribuuuu.files.untrusted import printable

# The line in which Excel names the separator of a CSV.
_SEPARATOR_LINE = re.compile(r"sep=(.)\s*")
# A field that needs no quotes.
_PLAIN = r'(?!\s)[^,"\r\n]*(?<!\s)'
# Characters that are read at a time, and those of a place in a message, which has the text of a field.
_MAX_LINE, _MAX_PLACE = 1 << 20, 300
# Texts of 0 and 1 in columns of one class each.
_BITS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1, "": 0, "nan": 0}
_UNCERTAIN = ("-1", "-1.0")
# Separators of the labels in a field that are found by the labels: a name may contain one.
_SEPARATORS = ("|", ",", "/")
# The places of each kind of problem, e.g. "line 3, 'a.jpg'".
Problems = dict[str, list[str]]


@dataclass(frozen=True)
class TableSpec:
    """The meaning of the columns of a table, see DATA.TABLE.

    Attributes:
        key: "label", one class per image; "labels", any number; or "targets", a value of each column.
        columns: the columns of the labels; several of one class each hold 0 or 1.
        split, value: the column that selects rows, and its value; empty: all rows.
        header: DATA.TABLE.columns.
        separator: between the labels in a field; empty: a semicolon, or what the labels tell.
        uncertain: the value of -1 in columns of one class each, 0 or 1; -1: an error.
    """

    path: str = "path"
    key: str = "label"
    columns: tuple[str, ...] = ("label",)
    template: str = "{}"
    delimiter: str = ""
    split: str = ""
    value: str = ""
    header: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    separator: str = ""
    uncertain: int = -1

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that a table must have."""
        return (self.path, *self.columns, *([self.split] if self.split else []))


def scan_table(path: str, spec: TableSpec) -> Content:
    """Return the content of an index of the images of a table, in its order; raise ConfigError with all problems."""
    folder, problems = os.path.dirname(path), Problems()
    finder, places, images = PathFinder(folder), dict[tuple[str, str], tuple[int, int]](), list[tuple[str, str]]()
    labels: list[list[str]] = []
    try:
        names_of = _read_names(folder, *spec.names) if spec.names else {}
        for line, text, cells in _read_rows(path, spec, problems):
            place = finder.find(spec.template.replace("{}", text))
            found = _name_labels(spec, parse_labels(spec, cells), names_of)
            if isinstance(found, str):
                problems.setdefault(found, []).append(f"line {line}, {text!r}")
            elif place is None:
                problems.setdefault("names images that do not exist", []).append(f"line {line}, {text!r}")
            elif place not in places:
                places[place] = line, len(images)
                images.append(place)
                labels.append(found)
            elif spec.key == "labels" and len(spec.columns) == 1:  # a row for each label
                known = labels[places[place][1]]
                known += [label for label in found if label not in known]
            else:
                where = f"line {line}, {text!r} as in line {places[place][0]}"
                problems.setdefault("names an image again", []).append(where)
    except OSError as error:
        raise ConfigError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error
    notes = finder.notes(path, problems)
    separator = "" if names_of else _separate(spec, labels, path, notes)
    names = _find_classes(spec, labels, names_of, problems)
    if problems:
        if missing := problems.get("names images that do not exist"):
            from distribuuuu.hints.sources import explain_missing_images

            fix = explain_missing_images(folder, missing, bool(images), spec.template)
            problems = {f"{kind}{fix}" if found is missing else kind: found for kind, found in problems.items()}
        raise ConfigError([*sentences(path, problems)])
    if not images:
        raise ConfigError(f"{path} has no line{'' if spec.header else ' but its header'}")
    notes += note_alike(path, names)
    inputs = [path, *(os.path.join(folder, name) for name in spec.names[:1])]
    meta, arrays = _to_content(spec, images, labels, names, notes, inputs)
    return {**meta, "separator": separator}, arrays


def _separate(spec: TableSpec, labels: list[list[str]], path: str, notes: list[str]) -> str:
    """Separate the labels of each image that several names stand in, and return their separator; add a warning."""
    if spec.key == "targets" or len(spec.columns) > 1 or spec.separator:
        return ""
    separator = find_separator({label for row in labels for label in row})
    if separator and spec.key == "labels":
        for row in labels:
            row[:] = dict.fromkeys(part for label in row for part in _split(label, separator))
        notes.append(f"{path}: labels are separated by {separator!r}; DATA.TABLE.separator sets another one")
    elif separator:
        several = f"labels seem to be several names, separated by {separator!r}, and each combination is one class"
        notes.append(f"{path}: {several}; for several classes per image: DATA.NAME multilabel LOSS.NAME bce")
    return separator


def find_separator(labels: Iterable[str]) -> str:
    """Return the separator of the names that labels consist of, by the repetition of these; empty if there is none.

    Their parts repeat if there are fewer of them than labels, or if each part is in several labels.
    """
    known = set(labels)
    for separator in _SEPARATORS:
        parts = Counter(part for label in known for part in {*_split(label, separator)})
        joined = {part for label in known if len(_split(label, separator)) > 1 for part in _split(label, separator)}
        if joined and (len(parts) < len(known) or all(parts[part] > 1 for part in joined)):
            return separator
    return ""


def _split(field: str, separator: str) -> list[str]:
    return [part for part in map(str.strip, field.split(separator)) if part]


def _find_classes(spec: TableSpec, labels: list[list[str]], names_of: dict, problems: Problems) -> list[str]:
    """Return the sorted names of the classes."""
    if spec.key == "targets":
        return []
    without_fractions(labels)
    found = {label for row in labels for label in row}
    if spec.key == "labels" and len(spec.columns) == 1 and not spec.separator:
        several = [label for label in sorted(found) if " " in label and {*label.split()} <= found]
        if several:
            fix = "fix: separate them by semicolons, or set DATA.TABLE.separator ' '"
            problems[f"has labels that are several names; {fix}"] = several
    if len(spec.columns) > 1:  # also a column without a 1 is a class
        found |= {names_of.get(name, name) for name in spec.columns}
    if not found and labels:
        problems["has no label on any line"] = [""]
    return sort_labels(found)


def sort_labels(names: Iterable[str]) -> list[str]:
    """Return names in the order of their numbers if all are numbers, else in that of their texts."""
    names = sorted(names)
    is_number = all(re.fullmatch(r"-?\d+(\.\d+)?", name) for name in names)
    return sorted(names, key=float) if is_number else names


def _to_content(spec: TableSpec, images: list, labels: list, names: list[str], notes: list, inputs: list) -> Content:
    """Return the content of an index; the tables are the last of its files, so that a change of them is noticed."""
    folders = {folder: number for number, folder in enumerate(dict.fromkeys(folder for folder, _ in images))}
    root = os.path.dirname(inputs[0])
    files = [*folders, *(os.path.relpath(path, root or ".") for path in inputs)]
    found = {"label": (labels if spec.key == "labels" else [row[0] for row in labels], names)}
    if spec.key == "targets":
        columns = [[*values] for values in zip(*labels, strict=True)]
        found = {name: (values, sorted({*values})) for name, values in zip(spec.columns, columns, strict=True)}
    meta, arrays = encode_targets(spec.key, found)
    arrays |= {
        **pack_names("files", [*map(os.fsencode, files)]),
        "stamps": np.array([find_stamp(os.path.join(root, name)) for name in files], np.int64),
        **pack_names("names", [os.fsencode(name) for _, name in images]),
        "file": np.array([folders[folder] for folder, _ in images], np.int32),
    }
    return {**meta, "ignored": {}, "num_beside": 0, "notes": notes}, arrays


def _name_labels(spec: TableSpec, labels: list[str] | str, names_of: Mapping[str, str]) -> list[str] | str:
    """Return labels by the names of another table, or what is wrong with them."""
    if not names_of or isinstance(labels, str):
        return labels
    known = [names_of.get(label.removesuffix(".0"), "") for label in labels]
    known = known if spec.key == "targets" else list(dict.fromkeys(known))
    return known if all(known) else f"has labels without a name in {spec.names[0]}"


def _read_names(folder: str, file: str, label: str, name: str) -> dict[str, str]:
    """Return the name of each label in a table of both."""
    path, names, problems = os.path.join(folder, file), dict[str, str](), Problems()
    for line, text, (named,) in _read_rows(path, TableSpec(label, "name", (name,)), problems):
        if not named or names.setdefault(text.removesuffix(".0"), named) != named:
            problems.setdefault("has labels without one name", []).append(f"line {line}, {text!r}")
    if problems:
        raise ConfigError([*sentences(path, problems)])
    return names


def parse_labels(spec: TableSpec, cells: Sequence[Any]) -> list[str] | str:
    """Return the labels in the fields of an image, or what is wrong with them; a field may be a list of labels."""
    if spec.key == "targets":
        return [*cells] if all(cells) else "has images without a target"
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
    parts = cells
    if spec.key == "labels":
        parts = cells[0] if isinstance(cells[0], list) else _split(cells[0], spec.separator or ";")
    names = list(dict.fromkeys(name for name in parts if name))
    return names if names or spec.key == "labels" else "has images without a label"


def csv_line(cells: Sequence[str]) -> str:
    """Return a line of a CSV, which is read back as it is: a cell with line breaks or spaces at its ends is quoted."""
    return ",".join(cell if re.fullmatch(_PLAIN, cell) else _quote(cell) for cell in cells) + "\n"


def _quote(cell: str) -> str:
    return '"{}"'.format(cell.replace('"', '""'))


def sentences(path: str | os.PathLike, problems: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return a sentence for each kind of problem, with its first few places."""
    texts = {kind: [printable(place[:_MAX_PLACE]) for place in places] for kind, places in problems.items() if places}
    return tuple(f"{path} {kind}: {first_few(places, '; ')}".removesuffix(": ") for kind, places in texts.items())


# ------------------------------------------------------------------------------------------- rows


def _read_rows(path: str, spec: TableSpec, problems: Problems) -> Iterator[tuple[int, str, list[str]]]:
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
            if image.strip():
                yield line, image, labels
            else:
                problems.setdefault("has lines without an image", []).append(f"line {line}")
    except (UnicodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not a CSV in UTF-8: {error}; fix: save it as CSV in UTF-8") from error
    if values and is_empty:
        problems[f"has no row with {spec.split} {spec.value}; the column has"] = sorted(values)


def _read_csv(path: str, spec: TableSpec, problems: Problems) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the fields of the needed columns of each row of a text."""
    delimiter = spec.delimiter or TABLE_ENDINGS.get(os.path.splitext(path)[1].lower(), ",")
    with open_text(path, newline="") as file:
        source: list[str] = []  # the lines of the current row
        # A longer line, which no list has, is read in pieces, of which one is invalid: a file may have a single line.
        lines = iter(functools.partial(file.readline, _MAX_LINE), "")
        if not spec.delimiter:
            named, first = without_separator_line(lines)
            if first and not spec.header:
                delimiter = find_delimiter(first[0], delimiter, spec.needed)
            delimiter, lines = named or delimiter, itertools.chain(first, lines)
        reader = csv.reader(_noted(lines, source), strict=True, delimiter=delimiter)
        header = [*spec.header] or [name.strip() for name in next(reader, [])]
        places = find_columns(spec, header, path)
        source.clear()
        for row in reader:
            text = "".join(source)
            source.clear()
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
                yield reader.line_num, [row[at] if _quote(row[at]) in text else row[at].strip() for at in places]


def _noted(lines: Iterator[str], source: list[str]) -> Iterator[str]:
    """Yield the lines, and append each to `source`."""
    for line in lines:
        source.append(line)
        yield line


def find_columns(spec: TableSpec, header: Sequence[str], path: str) -> list[int]:
    """Return the places of the needed columns; raise ConfigError if one is missing. Case matters only between them."""
    folded = [name.casefold() for name in header]
    names = [header[folded.index(name.casefold())] if folded.count(name.casefold()) == 1 else name
             for name in spec.needed]  # fmt: skip
    if any(name not in header for name in names):
        from distribuuuu.hints.sources import explain_columns

        problem = explain_columns(spec, header)
        raise ConfigError(f"{path} {problem}{'' if header else ': it is empty'}")
    return [header.index(name) for name in names]


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


# ---------------------------------------------------------------------------------- paths of other systems


def _normal_form(name: str) -> str:
    """Return a name in the Unicode form NFC: macOS and some archives write the same letters as NFD."""
    return unicodedata.normalize("NFC", name)


class PathFinder:
    """The files that a table names, relative to a root or as another system writes them; a folder is listed once."""

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
            alike = [part] if part in entries[""] or part == ".." else entries.get(_normal_form(part).casefold(), [])
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
                entries.setdefault(_normal_form(name).casefold(), []).append(name)
            self._listed[folder] = entries
        return self._listed[folder]

    def _note(self, text: str, dropped: Sequence[str], parts: Sequence[str], found: list[str], absolute: bool) -> None:
        own, others = [*map(_normal_form, parts)], [*map(_normal_form, found)]
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
