"""Lists of images: DATASET/SPLIT.csv names the images and their class (`list`), or any number of them (`multilabel`).

A CSV in UTF-8 with a header; other columns are ignored:

    path,label                  image,labels
    beach/001.jpg,sea           beach/001.jpg,person;surf board;sea
    town/002.jpg,street         beach/002.jpg,

The first column is a path, absolute or relative to the folder of the CSV. `labels` are class names separated by
semicolons, as names may contain spaces; an image without labels has no class. The classes are the sorted names of the
training CSV. Spaces around a field are ignored, unless it is quoted.
"""

import csv
import functools
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import SplitDataset, file_stamp, first_few, name_at
from distribuuuu.data.datasets.layouts import missing_root
from distribuuuu.files.untrusted import open_regular

if TYPE_CHECKING:
    import numpy as np

# A field that needs no quotes.
_PLAIN = r'(?!\s)[^,"\r\n]*(?<!\s)'
# Characters that are read at a time.
_MAX_LINE = 1 << 20
# Names of the two columns.
Columns = tuple[str, str]
# The places of each kind of problem, e.g. "line 3, 'a.jpg'".
Problems = dict[str, list[str]]


@dataclass
class Table:
    """The contents of a CSV in a few objects for any number of images, which forked workers share.

    Attributes:
        names: the labels, sorted.
        paths, path_offsets: the paths of the images in UTF-8, concatenated, and the start of each; see `name_at`.
        labels, label_offsets: indices into `names`, concatenated over the images, and the start of each image.
        lines: the line of each image, from 1.
        problems: what is wrong with the file, as sentences.
    """

    names: tuple[str, ...] = ()
    paths: bytearray = field(default_factory=bytearray)
    path_offsets: array = field(default_factory=lambda: array("q", [0]))
    labels: array = field(default_factory=lambda: array("i"))
    label_offsets: array = field(default_factory=lambda: array("q", [0]))
    lines: array = field(default_factory=lambda: array("q"))
    problems: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.lines)

    def path(self, index: int) -> str:
        """Return the path of image `index` as in the CSV."""
        return name_at(self.paths, self.path_offsets, index)

    def labels_of(self, index: int) -> array:
        """Return the labels of image `index` as indices into `names`."""
        return self.labels[self.label_offsets[index] : self.label_offsets[index + 1]]

    def place(self, index: int, text: str) -> str:
        """Return the place of image `index` in the CSV for a message."""
        return f"line {self.lines[index]}, {text!r}"

    def add(self, image: str, labels: Sequence[int], line: int) -> None:
        """Add an image."""
        self.paths += os.fsencode(image)
        self.path_offsets.append(len(self.paths))
        self.labels.extend(labels)
        self.label_offsets.append(len(self.labels))
        self.lines.append(line)


def read_table(path: str | os.PathLike, columns: Columns) -> Table:
    """Return the contents of a CSV, with its problems; an unchanged file is read once.

    The second of `columns` is "labels" for any number of class names per image, and "label" for exactly one.
    """
    return _read_table(os.fspath(path), columns, file_stamp(path))


@functools.lru_cache(maxsize=4)
def _read_table(path: str, columns: Columns, stamp: tuple[int, ...]) -> Table:
    problems: Problems = {}
    table = Table()
    numbers: dict[str, int] = {}
    first_lines: dict[str, int] = {}
    try:
        with open_regular(path, encoding="utf-8-sig", newline="") as file:
            for line, image, labels in _read_rows(file, columns, problems):
                key = os.path.normpath(image)
                if key in first_lines:
                    place = f"line {line}, {image!r} as in line {first_lines[key]}"
                    problems.setdefault("names an image again", []).append(place)
                    continue
                first_lines[key] = line
                names = dict.fromkeys(_split_labels(columns, labels))
                if columns[1] == "label" and not names:
                    problems.setdefault("has images without a label", []).append(f"line {line}, {image!r}")
                    continue
                table.add(image, [numbers.setdefault(name, len(numbers)) for name in names], line)
    except OSError as error:
        return Table(problems=(f"{path} cannot be read: {error.strerror}",))
    except (UnicodeError, csv.Error) as error:
        return Table(problems=(f"{path} is not a CSV in UTF-8: {error}",))
    # From the order of appearance to alphabetical order.
    table.names = tuple(sorted(numbers))
    places = {name: place for place, name in enumerate(table.names)}
    order = [places[name] for name in numbers]
    table.labels = array("i", (order[number] for number in table.labels))
    if not problems and not len(table):
        table.problems = (f"{path} has no line but its header",)
    else:
        table.problems = _sentences(path, problems)
    return table


def csv_line(cells: Sequence[str]) -> str:
    """Return a line of a CSV, which is read back as it is: a cell with line breaks or spaces at its ends is quoted."""
    return ",".join(cell if re.fullmatch(_PLAIN, cell) else _quote(cell) for cell in cells) + "\n"


def _quote(cell: str) -> str:
    return '"{}"'.format(cell.replace('"', '""'))


def _strip_unless_quoted(cell: str, source: str) -> str:
    """Return a cell without the spaces at its ends, unless the text of its row quotes it with these."""
    return cell if _quote(cell) in source else cell.strip()


def _split_labels(columns: Columns, text: str) -> list[str]:
    """Return the class names in a field of the second column."""
    return [name for name in (map(str.strip, text.split(";")) if columns[1] == "labels" else [text]) if name]


def _read_rows(file, columns: Columns, problems: Problems) -> Iterator[tuple[int, str, str]]:
    """Yield line, image and labels; add invalid lines and headers to `problems`."""
    source: list[str] = []  # the lines of the current row

    def read_lines() -> Iterator[str]:
        # A longer line, which no list has, is read in pieces, of which one is invalid: a file may have a single line.
        for line in iter(functools.partial(file.readline, _MAX_LINE), ""):
            source.append(line)
            yield line

    reader = csv.reader(read_lines(), strict=True)
    header = [name.strip() for name in next(reader, [])]
    if missing := [name for name in columns if name not in header]:
        kind = f"has no column {' and no column '.join(missing)}; its header, line 1, must be {','.join(columns)}"
        problems[kind] = [f"it is {','.join(header)!r}" if header else "it is empty"]
        return
    image_at, labels_at = (header.index(name) for name in columns)
    source.clear()
    for row in reader:
        line, text = reader.line_num, "".join(source)
        source.clear()
        if not row:  # an empty line
            continue
        if len(row) != len(header):
            kind = f"has lines with another number of fields than the header's {len(header)}"
            kind += ' (a comma within a name needs "quotes")'
            problems.setdefault(kind, []).append(f"line {line} has {len(row)}")
        elif not row[image_at].strip():
            problems.setdefault("has lines without an image", []).append(f"line {line}")
        else:
            image, labels = (_strip_unless_quoted(row[place], text) for place in (image_at, labels_at))
            yield line, image, labels


def _sentences(path: str | os.PathLike, problems: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return a sentence for each kind of problem, with its first few places."""
    return tuple(f"{path} {kind}: {first_few(places, '; ')}" for kind, places in problems.items() if places)


@DATASETS.register("list")
class ImageList(SplitDataset):
    """The images of a CSV with one class each.

    Args:
        path: the CSV.
        classes: the class names that define the labels, if the CSV may lack some of them; None: its own.

    Raises:
        ConfigError: the CSV is invalid, or has labels that are not in `classes`.
    """

    has_files = True
    columns: Columns = ("path", "label")

    def __init__(self, path: str | os.PathLike, classes: tuple[str, ...] | None = None):
        import numpy as np

        self.folder, self._path = Path(path).parent, Path(path)
        self._table = read_table(path, self.columns)
        self.classes = self._table.names if classes is None else classes
        problems = [*self._table.problems, *_sentences(path, _unknown_labels(self._table, self.classes))]
        if problems:
            name = "multilabel" if self.targets == "labels" else "list"
            raise ConfigError([f"DATA.NAME {name}: {problem}" for problem in problems])
        numbers = {name: number for number, name in enumerate(self.classes)}
        # From the index of a name in the table to its class.
        self._class_of = np.array([numbers[name] for name in self._table.names], dtype=np.int64)

    @classmethod
    def split_path(cls, section) -> Path:
        """Return the CSV of cfg.TRAIN or cfg.TEST."""
        return Path(section.DATASET) / f"{section.SPLIT}.csv"

    @classmethod
    def read_classes(cls, path: Path) -> tuple[str, ...]:
        """Return the sorted labels of a CSV."""
        return read_table(path, cls.columns).names

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "ImageList":
        """Return the set; classes without evaluation images are allowed."""
        return cls(cls.split_path(cfg.TRAIN)) if train else cls(cls.split_path(cfg.TEST), cls.training_classes(cfg))

    @classmethod
    def find_split_problems(cls, name: str, section, trained: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for a missing or invalid CSV, unknown labels and missing images."""
        path = cls.split_path(section)
        if not path.parent.is_dir():
            yield missing_root(name, path.parent, path.name)
        elif not path.is_file():
            existing = sorted(other.stem for other in path.parent.glob("*.csv"))
            has = f"it has {first_few(existing)}" if existing else "it has no .csv file"
            hint = did_you_mean(path.stem, existing)
            yield f"{name}.SPLIT", f"no file {path.name} in {path.parent}; {has}{hint}"
        else:
            table = read_table(path, cls.columns)
            found = _unknown_labels(table, trained) if trained else {}
            found |= {"names images that do not exist": _missing_images(path.parent, table)}
            found |= _odd_labels(table) if cls.targets == "labels" else {}
            yield from ((f"{name}.SPLIT", problem) for problem in (*table.problems, *_sentences(path, found)))
            if len(table) and not table.names:
                yield f"{name}.SPLIT", f"{path} has no label on any line"

    @classmethod
    def count_images(cls, cfg, most: int) -> int:
        """Return the number of training images; 0 if the CSV cannot be read."""
        return len(read_table(cls.split_path(cfg.TRAIN), cls.columns))

    def __len__(self) -> int:
        return len(self._table)

    def check_record(self) -> tuple[Path | None, str]:
        """Return a path in a folder beside the CSV, and the stamp of the CSV."""
        return self.folder / ".distribuuuu" / self._path.name, str(file_stamp(self._path))

    def label(self, index: int) -> "int | np.ndarray":
        """Return the class of image `index`."""
        return int(self._class_of[self._table.labels_of(index)[0]])

    def describe(self, index: int) -> str:
        """Return the file of image `index`."""
        return os.path.join(self.folder, self._table.path(index))


@DATASETS.register("multilabel")
class Multilabel(ImageList):
    """The images of a CSV with any number of classes each."""

    targets = "labels"
    columns = ("image", "labels")

    def label(self, index: int) -> "np.ndarray":
        """Return the float32 multi-hot vector (classes,) of image `index`."""
        import numpy as np

        target = np.zeros(len(self.classes), dtype=np.float32)
        target[self._class_of[self._table.labels_of(index)]] = 1
        return target


def _unknown_labels(table: Table, classes: tuple[str, ...]) -> Problems:
    """Return the first place of each label that is not a class."""
    known, places = set(classes), []
    unknown = {number for number, name in enumerate(table.names) if name not in known}
    for index in range(len(table)) if unknown else ():
        for number in unknown.intersection(table.labels_of(index)):
            name = table.names[number]
            places.append(table.place(index, name) + did_you_mean(name, classes))
            unknown.remove(number)
    return {"has labels that the training data lacks": places}


def _odd_labels(table: Table) -> Problems:
    """Return the labels that are several names with spaces in place of semicolons."""
    known = set(table.names)
    several = [name for name in table.names if " " in name and set(name.split()) <= known]
    return {"has labels that are several names, to be separated by semicolons": several}


def _missing_images(folder: Path, table: Table) -> list[str]:
    """Return the places of images that do not exist; each folder is listed once, which is faster than one stat each."""
    places = []
    listed: dict[str, frozenset[str]] = {}
    for index in range(len(table)):
        image = os.path.join(folder, table.path(index))
        parent, name = os.path.split(image)
        if parent not in listed:
            try:
                listed[parent] = frozenset(os.listdir(parent))
            except (OSError, ValueError):  # ValueError: a path with a NUL
                listed[parent] = frozenset()
        if name not in listed[parent] and not os.path.isfile(image):  # on a case-insensitive disk it may still exist
            places.append(table.place(index, table.path(index)))
    return places
