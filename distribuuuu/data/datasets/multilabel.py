"""Images of any number of classes each: DATASET/SPLIT.csv names the images and the classes that apply to them.

A CSV of UTF-8 with a header; other columns than these two are passed over:

    image,labels
    beach/001.jpg,person;surf board;sea
    beach/002.jpg,

`image` is a path, relative to the folder of the CSV unless it is absolute; `labels` are names with semicolons between
them, since names may have spaces. An image without labels is of no class. The classes are the sorted names of the
training CSV.
"""

import csv
import functools
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset, class_count_mismatch, file_stamp, read_file

if TYPE_CHECKING:
    import numpy as np

COLUMNS = ("image", "labels")
# Of a kind of trouble so many are named.
_MOST_NAMED = 5


@dataclass
class Table:
    """What a CSV says, in a few objects whatever the number of images: workers share it with the process they left.

    Attributes:
        names: the labels, sorted.
        paths: the images as they are written, in UTF-8, one after the other.
        path_ends: where the path of each image ends there.
        numbers: which of the names apply, by image one after the other, each name of an image once.
        number_ends: where those of each image end there.
        lines: the line of each image, from 1.
        problems: what is wrong with the file, in words.
    """

    names: tuple[str, ...] = ()
    paths: bytearray = field(default_factory=bytearray)
    path_ends: array = field(default_factory=lambda: array("q"))
    numbers: array = field(default_factory=lambda: array("i"))
    number_ends: array = field(default_factory=lambda: array("q"))
    lines: array = field(default_factory=lambda: array("q"))
    problems: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.lines)

    def path(self, index: int) -> str:
        """Return the path of image `index` as it is written."""
        begin = self.path_ends[index - 1] if index else 0
        return os.fsdecode(bytes(self.paths[begin : self.path_ends[index]]))

    def numbers_of(self, index: int) -> array:
        """Return which of the names apply to image `index`."""
        return self.numbers[self.number_ends[index - 1] if index else 0 : self.number_ends[index]]

    def add(self, image: str, numbers: Sequence[int], line: int) -> None:
        """Add an image."""
        self.paths += os.fsencode(image)
        self.path_ends.append(len(self.paths))
        self.numbers.extend(numbers)
        self.number_ends.append(len(self.numbers))
        self.lines.append(line)


def read_table(path: str | os.PathLike) -> Table:
    """Return what a CSV says, with its problems; a file that has not changed is read once."""
    try:
        status = os.stat(path)
    except OSError as error:
        return Table(problems=(f"{path} cannot be read: {error.strerror}",))
    return _read_table(os.fspath(path), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4)
def _read_table(path: str, mtime_ns: int, size: int) -> Table:
    troubles: dict[str, list[str]] = {}
    table, numbers, first_lines = Table(), {}, {}
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for line, image, labels in _read_lines(file, troubles):
                key = os.path.normpath(image)
                if key in first_lines:
                    _note(troubles, "names an image again", f"line {line}, {image!r} as in line {first_lines[key]}")
                    continue
                first_lines[key] = line
                names = dict.fromkeys(name for name in map(str.strip, labels.split(";")) if name)
                table.add(image, [numbers.setdefault(name, len(numbers)) for name in names], line)
    except OSError as error:
        return Table(problems=(f"{path} cannot be read: {error.strerror}",))
    except (UnicodeError, csv.Error) as error:
        return Table(problems=(f"{path} is not a CSV of UTF-8: {error}",))
    # From the order of their appearance to that of the alphabet.
    table.names = tuple(sorted(numbers))
    places = {name: place for place, name in enumerate(table.names)}
    order = [places[name] for name in numbers]
    table.numbers = array("i", (order[number] for number in table.numbers))
    if not troubles and not len(table):
        troubles["has no line but its header"] = []
    table.problems = _in_words(path, troubles)
    return table


def _read_lines(file, troubles: dict[str, list[str]]) -> Iterator[tuple[int, str, str]]:
    """Yield line, image and labels; lines and headers that are not understood go to `troubles`."""
    reader = csv.reader(file, strict=True)
    header = [name.strip() for name in next(reader, [])]
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        has = f"has no column {' and no column '.join(missing)}; its header, line 1, must be {','.join(COLUMNS)}"
        _note(troubles, has, f"it is {','.join(header)!r}" if header else "it is empty")
        return
    image_at, labels_at = (header.index(name) for name in COLUMNS)
    for row in reader:
        line = reader.line_num
        if not row:  # an empty line
            continue
        if len(row) != len(header):
            what = f"has lines of another number of fields than the header's {len(header)}"
            _note(troubles, f'{what} (a comma within a name needs "quotes")', f"line {line} has {len(row)}")
        elif not row[image_at].strip():
            _note(troubles, "has lines without an image", f"line {line}")
        else:
            yield line, row[image_at].strip(), row[labels_at]


def _note(troubles: dict[str, list[str]], kind: str, where: str) -> None:
    troubles.setdefault(kind, []).append(where)


def _in_words(path: str | os.PathLike, troubles: dict[str, list[str]]) -> tuple[str, ...]:
    """Return a sentence for each kind of trouble, with the first few places."""
    sentences = []
    for kind, places in troubles.items():
        more = f" and {len(places) - _MOST_NAMED} more" if len(places) > _MOST_NAMED else ""
        sentences.append(f"{path} {kind}{': ' * bool(places)}{'; '.join(places[:_MOST_NAMED])}{more}")
    return tuple(sentences)


@DATASETS.register("multilabel")
class Multilabel(ImageDataset):
    """The images of a CSV.

    Args:
        path: the CSV.
        classes: the names to label by, when the CSV may hold only some of them; None: its own.

    Raises:
        ConfigError: the CSV is not sound, or has labels beyond the classes.
    """

    multilabel = has_files = True

    def __init__(self, path: str | os.PathLike, classes: tuple[str, ...] | None = None):
        import numpy as np

        self.folder = Path(path).parent
        self._path = Path(path)
        self._table = read_table(path)
        self.classes = self._table.names if classes is None else classes
        problems = [*self._table.problems, *_unknown_labels(path, self._table, self.classes)]
        if problems:
            raise ConfigError([f"DATA.NAME multilabel: {problem}" for problem in problems])
        numbers = {name: number for number, name in enumerate(self.classes)}
        # From a name of the table to its class.
        self._class_of = np.array([numbers[name] for name in self._table.names], dtype=np.int64)

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "Multilabel":
        """Return the set; evaluation labels by the training classes, so a class without evaluation images is right."""
        if train:
            return cls(csv_path(cfg.TRAIN))
        return cls(csv_path(cfg.TEST), read_table(csv_path(cfg.TRAIN)).names or None)

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for what is wrong with a CSV and for images that are not there."""
        section = "TRAIN" if train else "TEST"
        path = csv_path(cfg[section])
        if not path.is_file():
            yield _no_such_file(section, path)
            return
        table, trained = read_table(path), () if train else read_table(csv_path(cfg.TRAIN)).names
        unknown = _unknown_labels(path, table, trained) if trained else ()
        for problem in (*table.problems, *unknown, *_missing_images(path, table), *_odd_labels(path, table)):
            yield f"{section}.SPLIT", problem
        if not trained and table.names and len(table.names) != cfg.MODEL.NUM_CLASSES:
            yield "MODEL.NUM_CLASSES", class_count_mismatch(cfg.MODEL.NUM_CLASSES, len(table.names), str(path))

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return the number of labels in the training CSV; without one, in the evaluation's."""
        return next((len(names) for part in (cfg.TRAIN, cfg.TEST) if (names := read_table(csv_path(part)).names)), 0)

    @classmethod
    def count_images(cls, cfg, most: int) -> int:
        """Return the number of training images; 0 when the CSV cannot be read."""
        return len(read_table(csv_path(cfg.TRAIN)))

    def __len__(self) -> int:
        return len(self._table)

    def read(self, index: int) -> bytearray:
        """Return the bytes of image `index`."""
        return read_file(self.describe(index))

    def check_place(self) -> tuple[Path | None, str]:
        """Return a name in a folder beside the CSV, and the CSV's own stamp."""
        return self.folder / ".distribuuuu" / self._path.name, str(file_stamp(self._path))

    def label(self, index: int) -> "np.ndarray":
        """Return float32 (classes,) of image `index`: 1 for each class that applies, else 0."""
        import numpy as np

        target = np.zeros(len(self.classes), dtype=np.float32)
        target[self._class_of[self._table.numbers_of(index)]] = 1
        return target

    def describe(self, index: int) -> str:
        """Return the file of image `index`."""
        return os.path.join(self.folder, self._table.path(index))


def csv_path(section) -> Path:
    """Return the CSV of the section TRAIN or TEST of a config."""
    return Path(section.DATASET) / f"{section.SPLIT}.csv"


def _no_such_file(section: str, path: Path) -> tuple[str, str]:
    if not path.parent.is_dir():
        return f"{section}.DATASET", f"no such folder: {path.parent}; it should hold {path.name}"
    beside = sorted(other.stem for other in path.parent.glob("*.csv"))
    has = f"it has {', '.join(beside[:_MOST_NAMED])}" if beside else "it has no .csv at all"
    return f"{section}.SPLIT", f"no file {path.name} in {path.parent}; {has}{did_you_mean(path.stem, beside)}"


def _unknown_labels(path: str | os.PathLike, table: Table, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return what to say of labels that are no classes: each where it comes first."""
    known, places = set(classes), []
    unknown = {number for number, name in enumerate(table.names) if name not in known}
    for index in range(len(table)) if unknown else ():
        for number in unknown.intersection(table.numbers_of(index)):
            name = table.names[number]
            places.append(f"line {table.lines[index]}, {name!r}{did_you_mean(name, classes)}")
            unknown.remove(number)
    return _in_words(path, {"has labels that the training data lacks": places} if places else {})


def _odd_labels(path: str | os.PathLike, table: Table) -> tuple[str, ...]:
    """Return what to say of a table of images without one label, or of names that are several names."""
    if len(table) and not table.names:
        return (f"{path} has no label on any line",)
    known = set(table.names)
    several = [name for name in table.names if " " in name and set(name.split()) <= known]
    return _in_words(path, {"has labels that are several: put semicolons between them": several} if several else {})


def _missing_images(path: str | os.PathLike, table: Table) -> tuple[str, ...]:
    """Return what to say of images that are not there; each folder is listed once, which is quicker than to ask."""
    folder, places = Path(path).parent, []
    listed: dict[str, frozenset[str]] = {}
    for index in range(len(table)):
        image = os.path.join(folder, table.path(index))
        parent, name = os.path.split(image)
        if parent not in listed:
            try:
                listed[parent] = frozenset(os.listdir(parent))
            except (OSError, ValueError):  # ValueError: a path with a NUL
                listed[parent] = frozenset()
        if name not in listed[parent] and not os.path.isfile(image):  # in any case that the disk takes for the same
            places.append(f"line {table.lines[index]}, {table.path(index)!r}")
    return _in_words(path, {"names images that are not there": places} if places else {})
