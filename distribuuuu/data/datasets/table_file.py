"""Tables of images: CSV, TSV and parquet files with a column of paths and one or more columns of labels.

A CSV is in UTF-8 and has a header, unless the names of its columns are given; other columns are ignored. Spaces around
a field are ignored, unless it is quoted.
"""

import csv
import functools
import itertools
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import first_few, near_matches
from distribuuuu.files.image_files import (
    EXTENSIONS,
    TABLE_ENDINGS,
    file_stamp,
    is_class,
    is_image,
    list_classes,
    name_at,
)
from distribuuuu.files.untrusted import open_regular

# A field that needs no quotes.
_PLAIN = r'(?!\s)[^,"\r\n]*(?<!\s)'
# Characters that are read at a time.
_MAX_LINE = 1 << 20
# Characters of a place in a message, which has the text of a field.
_MAX_PLACE = 300
# Texts of 0 and 1 in columns of one class each.
_BITS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}
# Usual names of columns, in lower case, for the fix in a message.
_USUAL = {
    "path": ("path", "image", "file", "filename", "file_name", "filepath", "image_path", "image_name", "image_id",
             "img", "id"),
    "label": ("label", "labels", "class", "classes", "category", "target", "tags"),
}  # fmt: skip
# The places of each kind of problem, e.g. "line 3, 'a.jpg'".
Problems = dict[str, list[str]]
# By column: the names that define the labels, in the order of the classes, or the type of numbers.
Names = dict[str, tuple[str, ...] | str]
# The number of a line, its path and its labels.
CsvLine = tuple[int, str, list[str]]


@dataclass(frozen=True)
class Layout:
    """The meaning of the columns of a table.

    Attributes:
        path: the column of the paths.
        key: "label", one class per image; "labels", any number; or "targets", a value of each column.
        columns: the columns of the labels; several of one class each hold 0 or 1.
        template: the path of an image, with the field of the column in the place of {}.
        delimiter: between the fields; empty: by the ending of the file.
        split: the column that selects rows; empty: all rows.
        value: the value of that column.
        header: the names of the columns of a text without a header; empty: it has one.
        names: a further table, its column of labels, and that of their names, which replace them; empty: none.
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

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that a table must have."""
        return (self.path, *self.columns, *([self.split] if self.split else []))


@dataclass
class Table:
    """The contents of a table in a few objects for any number of images, which forked workers share.

    Attributes:
        path, layout: the file and the meaning of its columns.
        names: the labels, sorted; of targets the fields.
        paths, path_offsets: the paths of the images in UTF-8, concatenated, and the start of each; see `name_at`.
        labels, label_offsets: indices into `names`, concatenated over the images, and the start of each image.
        lines: the line of each image, from 1.
        problems: what is wrong with the file, as sentences.
    """

    path: str
    layout: Layout
    names: tuple[str, ...] = ()
    paths: bytearray = field(default_factory=bytearray)
    path_offsets: array = field(default_factory=lambda: array("q", [0]))
    labels: array = field(default_factory=lambda: array("i"))
    label_offsets: array = field(default_factory=lambda: array("q", [0]))
    lines: array = field(default_factory=lambda: array("q"))
    problems: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.lines)

    @functools.cached_property
    def names_of(self) -> Names:
        """The sorted names of the labels by the key of their columns; of targets by column, or the type of numbers."""
        if self.layout.key != "targets":
            return {self.layout.key: self.names}
        found: Names = {}
        for column in self.layout.columns:
            names = sorted(set(self.values(column)))
            numbers = [as_number(name) for name in names]
            is_whole = all(isinstance(number, int) for number in numbers)
            found[column] = tuple(names) if None in numbers else "int64" if is_whole else "float32"
        return found

    def values(self, column: str) -> list[Any]:
        """Return the label of each image in a column of `names_of`: a text, or of several classes a list of texts."""
        if self.layout.key == "labels":
            parts = (self.labels[start:end] for start, end in itertools.pairwise(self.label_offsets))
            return [[self.names[number] for number in part] for part in parts]
        columns = [*self.names_of] if self.layout.key == "label" else self.layout.columns
        return [self.names[number] for number in self.labels[columns.index(column) :: len(columns)]]

    def image(self, index: int) -> str:
        """Return the path of image `index` as in the table."""
        return name_at(self.paths, self.path_offsets, index)

    def place(self, index: int, text: str) -> str:
        """Return the place of image `index` in the table for a message."""
        return f"line {self.lines[index]}, {text!r}"

    def add(self, image: str, labels: Sequence[int], line: int) -> None:
        """Add an image."""
        self.paths += os.fsencode(image)
        self.path_offsets.append(len(self.paths))
        self.labels.extend(labels)
        self.label_offsets.append(len(self.labels))
        self.lines.append(line)


def read_table(path: str | os.PathLike, layout: Layout) -> Table:
    """Return the contents of a table, with its problems; an unchanged file is read once."""
    files = [os.fspath(path), *(os.path.join(os.path.dirname(path), name) for name in layout.names[:1])]
    return _read_table(files[0], layout, tuple(map(file_stamp, files)))


@functools.lru_cache(maxsize=4)
def _read_table(path: str, layout: Layout, stamps: tuple[tuple[int, ...], ...]) -> Table:
    table, problems, numbers, first_lines = Table(path, layout), Problems(), dict[str, int](), dict[str, int]()
    try:
        names_of = _read_names(os.path.dirname(path), *layout.names) if layout.names else {}
        if len(layout.columns) > 1 and layout.key != "targets":  # also a column without a 1 is a class
            classes = dict.fromkeys(names_of.get(name, name) for name in layout.columns)
            numbers |= {name: number for number, name in enumerate(classes)}
        for line, image, cells in _read_rows(path, layout, problems):
            image = layout.template.replace("{}", image)
            key = os.path.normpath(image)
            if key in first_lines:
                place = f"line {line}, {image!r} as in line {first_lines[key]}"
                problems.setdefault("names an image again", []).append(place)
                continue
            first_lines[key] = line
            names = parse_labels(layout, cells)
            if names_of and not isinstance(names, str):
                names = _replace_labels(names, names_of, layout)
            if isinstance(names, str):
                problems.setdefault(names, []).append(f"line {line}, {image!r}")
            else:
                table.add(image, [numbers.setdefault(name, len(numbers)) for name in names], line)
    except ConfigError as error:
        return Table(path, layout, problems=tuple(map(str, error.problems)))
    except OSError as error:
        return Table(path, layout, problems=(f"{error.filename or path} cannot be read: {error.strerror or error}",))
    # From the order of appearance to alphabetical order.
    table.names = tuple(sorted(numbers))
    places = {name: place for place, name in enumerate(table.names)}
    order = [places[name] for name in numbers]
    table.labels = array("i", (order[number] for number in table.labels))
    empty = f"{path} has no line{'' if layout.header else ' but its header'}"
    table.problems = sentences(path, problems) if problems or len(table) else (empty,)
    return table


def _replace_labels(labels: Sequence[str], names_of: dict[str, str], layout: Layout) -> Sequence[str] | str:
    """Return the names of the labels of an image, or what is wrong with them."""
    if any(label not in names_of for label in labels):
        return f"has labels without a name in {layout.names[0]}"
    names = [names_of[label] for label in labels]
    return [*dict.fromkeys(names)] if layout.key == "labels" else names  # labels of one name are one class


def parse_labels(layout: Layout, cells: Sequence[Any]) -> Sequence[str] | str:
    """Return the labels in the fields of an image, or what is wrong with them; a field may be a list of labels."""
    if layout.key == "targets":
        return cells if all(cells) else "has images without a target"
    if len(cells) > 1:
        bits = [_BITS.get(cell.lower()) for cell in cells]
        if None in bits:
            return "has values other than 0 and 1 in columns of one class each"
        names = [name for name, bit in zip(layout.columns, bits, strict=True) if bit]
        return names if layout.key == "labels" or len(names) == 1 else "has images without exactly one 1"
    parts = cells
    if layout.key == "labels":
        parts = cells[0] if isinstance(cells[0], list) else [*map(str.strip, cells[0].split(";"))]
    names = list(dict.fromkeys(name for name in parts if name))
    return names if names or layout.key == "labels" else "has images without a label"


def as_number(text: str) -> int | float | None:
    """Return a field as a number that a tensor can hold; None if it is none."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if -(2**63) <= number < 2**63 else None
    return None


def csv_line(cells: Sequence[str]) -> str:
    """Return a line of a CSV, which is read back as it is: a cell with line breaks or spaces at its ends is quoted."""
    return ",".join(cell if re.fullmatch(_PLAIN, cell) else _quote(cell) for cell in cells) + "\n"


def _quote(cell: str) -> str:
    return '"{}"'.format(cell.replace('"', '""'))


def _strip_unless_quoted(cell: str, source: str) -> str:
    """Return a cell without the spaces at its ends, unless the text of its row quotes it with these."""
    return cell if _quote(cell) in source else cell.strip()


# ------------------------------------------------------------------------------------------- rows


def _read_rows(path: str, layout: Layout, problems: Problems) -> Iterator[CsvLine]:
    """Yield line, path and labels of the rows of a split; add invalid lines to `problems`.

    Raises:
        ConfigError: the header lacks a column, or the file is no text in UTF-8; the message has no key.
    """
    read = _read_parquet if path.lower().endswith(".parquet") else _read_csv
    values: set[str] = set()
    is_empty = True
    try:
        for line, cells in read(path, layout, problems):
            image, *labels = cells
            if layout.split:
                value = labels.pop()
                if len(values) < 100:
                    values.add(value)
                if value != layout.value:
                    continue
            is_empty = False
            if image.strip():
                yield line, image, labels
            else:
                problems.setdefault("has lines without an image", []).append(f"line {line}")
    except (UnicodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not a CSV in UTF-8: {error}") from error
    if values and is_empty:
        problems[f"has no row with {layout.split} {layout.value}; the column has"] = sorted(values)


def _read_csv(path: str, layout: Layout, problems: Problems) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the fields of the needed columns of each row of a text."""
    source: list[str] = []  # the lines of the current row

    def read_lines() -> Iterator[str]:
        # A longer line, which no list has, is read in pieces, of which one is invalid: a file may have a single line.
        for line in iter(functools.partial(file.readline, _MAX_LINE), ""):
            source.append(line)
            yield line

    with open_regular(path, encoding="utf-8-sig", newline="") as file:
        delimiter = layout.delimiter or TABLE_ENDINGS.get(os.path.splitext(path)[1].lower()) or ","
        reader = csv.reader(read_lines(), strict=True, delimiter=delimiter)
        header = [*layout.header] or [name.strip() for name in next(reader, [])]
        if problem := find_missing(layout, header):
            raise ConfigError(f"{path} {problem}{'' if header else ': it is empty'}")
        places = [header.index(name) for name in layout.needed]
        source.clear()
        for row in reader:
            line, text = reader.line_num, "".join(source)
            source.clear()
            if not row:  # an empty line
                continue
            if len(row) != len(header):
                of = "DATA.TABLE.columns'" if layout.header else "the header's"
                kind = f"has lines with another number of fields than {of} {len(header)}"
                kind += f" (a {'comma' if delimiter == ',' else 'delimiter'} within a name needs " + '"quotes")'
                problems.setdefault(kind, []).append(f"line {line} has {len(row)}")
            else:
                yield line, [_strip_unless_quoted(row[place], text) for place in places]


def _read_names(folder: str, file: str, label: str, name: str) -> dict[str, str]:
    """Return the name of each label in a table of both."""
    path, names, problems = os.path.join(folder, file), dict[str, str](), Problems()
    for line, text, (named,) in _read_rows(path, Layout(label, "name", (name,)), problems):
        if not named or names.setdefault(text, named) != named:
            problems.setdefault("has labels without one name", []).append(f"line {line}, {text!r}")
    if problems:
        raise ConfigError([*sentences(path, problems)])
    return names


def _read_parquet(path: str, layout: Layout, problems: Problems) -> Iterator[tuple[int, list[str]]]:
    """Yield the row, from 1, and the fields of the needed columns of each row of a parquet file, as texts."""
    from distribuuuu.data.datasets.parquet_file import read_columns

    def find_problem(header: Sequence[str], files: Sequence[str]) -> str:
        if not files or (layout.path in header and layout.path not in files):
            return find_missing(layout, header)
        name = {"labels": "parquet_multilabel", "targets": "parquet_structured"}.get(layout.key, "parquet")
        return f"has image files, not paths, in its column {files[0]}; fix: set DATA.NAME {name}"

    rows = read_columns(path, find_problem, layout.needed)
    for number, row in enumerate(rows, 1):
        yield number, ["" if cell is None else str(cell) for cell in row]


def find_missing(layout: Layout, header: Sequence[str]) -> str:
    """Return the problem with the columns of a table, and the words that name the right ones; empty if none."""
    missing = [name for name in dict.fromkeys(layout.needed) if name not in header]
    if not missing:
        return ""
    other = next((mark for mark in ("\t", ";", "|", ",", " ") if len(header) == 1 and mark in header[0]), "")
    fields = [field.strip() for field in header[0].split(other)] if other else header
    words = [f"DATA.TABLE.delimiter {other!r}"] if other else []
    if not layout.header and any(map(is_image, fields)):
        words.append(f"DATA.TABLE.columns '[{', '.join(_name_columns(layout, fields))}]', as it has no header")
    elif header and not other:
        words += _suggest_words(layout, header)
    known = f"its columns are {first_few(header, num=20)}" if header else "it has no columns"
    fix = f"; fix: add {' '.join(words)}" if words else ""
    fix = "; fix: see DATA.TABLE.names" if layout.key == "name" else fix
    return f"has no column {' and no column '.join(missing)}; {known}{fix}"


def _name_columns(layout: Layout, fields: Sequence[str]) -> list[str]:
    """Return names for the columns of a text without a header, by the fields of its first line."""
    names = [f"column_{number}" for number in range(1, len(fields) + 1)]
    path = next(place for place, field in enumerate(fields) if is_image(field))
    names[path] = layout.path
    if len(fields) > 1 and layout.columns:
        names[1 if path == 0 else 0] = layout.columns[0]
    return names


def _suggest_words(layout: Layout, header: Sequence[str]) -> Iterator[str]:
    """Yield the KEY VALUE pairs that name columns of the header in the place of missing ones."""
    rest = [name for name in header if name not in layout.needed]
    wanted = {"path": (layout.path,), layout.key: layout.columns, "split": (layout.split,)}
    for key, names in wanted.items():
        if len(names) != 1 or not names[0] or names[0] in header:
            continue
        usual_names = _USUAL.get(key.rstrip("s"), ())
        usual = [name for name in rest if name.lower() in usual_names]
        similar = near_matches(names[0], rest)
        # A name that was given comes close to the right one, a default one may not.
        near = [*usual, *similar] if names[0] in usual_names else [*similar, *usual]
        near += rest if len(rest) == 1 else ()
        yield f"DATA.TABLE.{key} {near[0] if near else 'COLUMN'}"
        rest = [name for name in rest if name not in near[:1]]


def sentences(path: str | os.PathLike, problems: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return a sentence for each kind of problem, with its first few places."""
    texts = {kind: [place[:_MAX_PLACE] for place in places] for kind, places in problems.items() if places}
    return tuple(f"{path} {kind}: {first_few(places, '; ')}" for kind, places in texts.items())


# ------------------------------------------------------------------------------------------- files


def list_missing(folder: Path, table: Table) -> list[str]:
    """Return the places of images that do not exist; each folder is listed once, which is faster than one stat each."""
    places = []
    listed: dict[str, frozenset[str]] = {}
    for index in range(len(table)):
        image = os.path.join(folder, table.image(index))
        parent, name = os.path.split(image)
        if parent not in listed:
            try:
                listed[parent] = frozenset(os.listdir(parent))
            except (OSError, ValueError):  # ValueError: a path with a NUL
                listed[parent] = frozenset()
        if name not in listed[parent] and not os.path.isfile(image):  # on a case-insensitive disk it may still exist
            places.append(table.place(index, table.image(index)))
    return places


def find_template(folder: Path, name: str) -> str:
    """Return the template of an existing file for the field `name`, e.g. "train/{}.jpg"; empty if there is none."""
    if "/" in name or not is_class(name):
        return ""
    places = ["", *(f"{part}/" for part in list_classes(folder)[:50])]
    endings = ("", *EXTENSIONS, *(ending.upper() for ending in EXTENSIONS))
    found = (f"{place}{{}}{ending}" for place in places for ending in endings)
    return next((text for text in found if os.path.isfile(folder / text.replace("{}", name))), "")
