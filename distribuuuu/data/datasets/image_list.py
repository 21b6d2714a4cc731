"""Lists of images: a table names the images and their class (`list`), any number of classes (`multilabel`), or several
targets (`structured`).

    path,label                  image,labels
    beach/001.jpg,sea           beach/001.jpg,person;surf board;sea
    town/002.jpg,street         beach/002.jpg,

A path is absolute or relative to the folder of the table. `labels` are class names separated by semicolons, as names
may contain spaces; an image without labels has no class. The classes are the sorted names of the training table.
DATA.TABLE names the file and the columns if they are others.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean, first_few
from distribuuuu.config.registry import DATASETS
from distribuuuu.config.settings import read_settings, setting
from distribuuuu.data.datasets.base import ImageDataset, class_count_mismatch
from distribuuuu.data.datasets.table_file import (
    Layout,
    Names,
    Problems,
    Table,
    as_number,
    find_template,
    list_missing,
    read_table,
    sentences,
)
from distribuuuu.files.image_files import TABLE_ENDINGS, TRAIN_NAMES, file_stamp, find_tables, sort_splits
from distribuuuu.hints.sources import missing_root

if TYPE_CHECKING:
    import numpy as np


@dataclass
class TableColumns:
    """The keys of DATA.TABLE that all tables have."""

    file: str = setting("", "table below the data's folder, {} for the split; default: {}.csv, .tsv, .parquet, .txt")
    split: str = setting("", "column that selects the rows of TRAIN.SPLIT and TEST.SPLIT")

    def __post_init__(self) -> None:
        self._check_file("file", self.file)

    def _check_file(self, key: str, file: str) -> None:
        if PurePath(file).is_absolute() or ".." in PurePath(file).parts:
            raise ValueError(f"got {key} {file!r}; expected a path below the folder of the data")


@dataclass
class PathColumns(TableColumns):
    """The keys of DATA.TABLE that all kinds of lists have."""

    path: str = setting("path", "column of the paths of the images")
    template: str = setting("{}", "path of an image, with the field of the column in the place of {}")
    delimiter: str = setting("", "between the fields; default: a comma, or a tab in a .tsv")
    columns: tuple[str, ...] = setting((), "names of all columns of a text without a header")
    names: tuple[str, ...] = setting((), "table of class names: its file, its column of labels, its column of names")

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{}" not in self.template:
            raise ValueError(f"got template {self.template!r}; expected a path with {{}}, e.g. train/{{}}.jpg")
        if len(self.delimiter) > 1 or self.delimiter in ('"', "\r", "\n"):
            raise ValueError(f"got delimiter {self.delimiter!r}; expected one character, e.g. ';'")
        if len({*self.columns}) < len(self.columns):
            raise ValueError(f"got columns {[*self.columns]}; expected a different name for each column")
        if len(self.names) not in (0, 3):
            raise ValueError(f"got names {[*self.names]}; expected a file and two of its columns: [FILE, LABEL, NAME]")
        if self.names:
            self._check_file("names", self.names[0])


@dataclass
class LabelColumns(PathColumns):
    """The keys of DATA.TABLE for one class per image."""

    label: tuple[str, ...] = setting(("label",), "column of the class; several: a column of 0 and 1 for each class")


@dataclass
class LabelsColumns(PathColumns):
    """The keys of DATA.TABLE for any number of classes per image."""

    path: str = setting("image", "column of the paths of the images")
    labels: tuple[str, ...] = setting(("labels",), "column of the classes; several: a column of 0 and 1 for each class")


@dataclass
class TargetsColumns(PathColumns):
    """The keys of DATA.TABLE for several targets per image."""

    targets: tuple[str, ...] = setting((), "columns of the targets: numbers, or names, which become class indices")


# ------------------------------------------------------------------------------------------- kinds


class TableSet(ImageDataset):
    """The images of a table with one class each; a family defines `read`, `describe`, `read_table` and `open_split`.

    Args:
        table: the labels.
        names_of: the names that define the labels, see `Table.names_of`; None: those of the table.

    Raises:
        ConfigError: the table is invalid, or has labels that are not among the names.
    """

    Columns: type[Any] = TableColumns
    # The key of DATA.TABLE that names the columns of the labels, and the option that is at fault in messages.
    key, fault = "label", "SPLIT"

    def __init__(self, table: Any, names_of: Names | None = None):
        self._table, self.names_of = table, names_of or table.names_of
        self.classes = classes_of(self.names_of)
        if problems := [*table.problems, *sentences(table.path, find_unknown(table, self.names_of))]:
            raise ConfigError([f"DATA.NAME: {problem}" for problem in problems])
        self._encode()

    def _encode(self) -> None:
        """Compute what `label` needs."""
        ((column, names),) = self.names_of.items()
        self.labels = to_numbers(self._table.values(column), names)

    @classmethod
    def read_columns(cls, cfg) -> Any:
        """Return DATA.TABLE; the default if it is invalid, which is reported elsewhere."""
        return read_settings("DATA.TABLE", cls.Columns, cfg.DATA.TABLE)[0] or cls.Columns()

    @classmethod
    def read_table(cls, cfg, name: str) -> Any:
        """Return the table of cfg.TRAIN or cfg.TEST with its problems; it is empty if it cannot be read."""
        raise TypeError(f"{cls.__name__} must define read_table")

    @classmethod
    def open_split(cls, cfg, name: str, names_of: Names | None = None) -> "TableSet":
        """Return the images of cfg.TRAIN or cfg.TEST; without names with its own classes."""
        return cls(cls.read_table(cfg, name), names_of)

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "TableSet":
        """Return the set; classes without evaluation images are allowed."""
        if train:
            return cls.open_split(cfg, "TRAIN")
        trained = cls.read_table(cfg, "TRAIN")
        return cls.open_split(cfg, "TEST", trained.names_of if len(trained) else None)

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for problems with the table, unknown classes and a wrong number of classes."""
        if not getattr(cls.read_columns(cfg), cls.key):
            yield f"DATA.TABLE.{cls.key}", f"not set; expected columns of the table; fix: DATA.TABLE.{cls.key} '[a, b]'"
            return
        name, trained = "TRAIN" if train else "TEST", cls.read_table(cfg, "TRAIN")
        table = trained if train else cls.read_table(cfg, name)
        unknown = find_unknown(table, (trained if len(trained) else table).names_of)
        found = [*table.problems, *sentences(table.path, unknown)]
        problems = [*cls.find_file_problems(cfg, name, table), *((f"{name}.{cls.fault}", text) for text in found)]
        yield from problems
        source = trained if len(trained) else table
        num_classes = len(classes_of(source.names_of)) if len(source) and not problems else 0
        if num_classes not in (0, cfg.MODEL.NUM_CLASSES):
            yield "MODEL.NUM_CLASSES", class_count_mismatch(cfg.MODEL.NUM_CLASSES, num_classes, str(source.path))

    @classmethod
    def find_file_problems(cls, cfg, name: str, table: Any) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for problems beside those of the table."""
        yield from ()

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return the number of training classes; without training data, of evaluation classes."""
        tables = (cls.read_table(cfg, name) for name in ("TRAIN", "TEST"))
        return next((len(classes_of(table.names_of)) for table in tables if len(table)), 0)

    def __len__(self) -> int:
        return len(self._table)


class AnyLabels(TableSet):
    """Any number of classes per image."""

    targets, key = "labels", "labels"

    def _encode(self) -> None:
        ((column, names),) = self.names_of.items()
        values = self._table.values(column)
        self._numbers = to_numbers([*chain.from_iterable(values)], names)
        self._ends = to_numbers([0, *accumulate(map(len, values))], "int64")

    def label(self, index: int) -> "np.ndarray":
        """Return the float32 multi-hot vector (classes,) of image `index`."""
        import numpy as np

        target = np.zeros(len(self.classes), dtype=np.float32)
        target[self._numbers[self._ends[index] : self._ends[index + 1]]] = 1
        return target


class SeveralTargets(TableSet):
    """Several targets per image: a dict by the names of the columns.

    The targets of a column are numbers, int64 or float32, if all its training fields are; else indices of its sorted
    training names. The classes of the set are the names of the first column that has any, else the columns.
    """

    targets, key = "structured", "targets"

    def _encode(self) -> None:
        self._values = {column: to_numbers(self._table.values(column), names)
                        for column, names in self.names_of.items()}  # fmt: skip

    def label(self, index: int) -> dict[str, Any]:
        """Return the targets of image `index` by the names of the columns."""
        return {column: values[index] for column, values in self._values.items()}


def classes_of(names_of: Names) -> tuple[str, ...]:
    """Return the first names, else the columns."""
    return next((names for names in names_of.values() if isinstance(names, tuple)), tuple(names_of))


def to_numbers(values: list[Any], names: tuple[str, ...] | str) -> "np.ndarray":
    """Return names as indices, int64, and numbers, or texts of numbers, in the type that `names` is."""
    import numpy as np

    if isinstance(names, str):
        return np.array([as_number(value) if isinstance(value, str) else value for value in values], names)
    numbers = {name: number for number, name in enumerate(names)}
    return np.fromiter((numbers[value] for value in values), np.int64, len(values))


def find_unknown(table: Any, names_of: Names) -> Problems:
    """Return the first place of each label that is not among the names of its column, or is no number."""
    places = []
    for column, names in names_of.items() if len(table) else ():
        known, prefix, values = set(names), f"{column} " if len(names_of) > 1 else "", table.values(column)
        is_named, lists = isinstance(names, tuple), values if isinstance(values[0], list) else [values]
        if is_named and known.issuperset(chain.from_iterable(lists)):  # the usual case, without a loop in Python
            continue
        for index, value in enumerate(values):
            for one in value if isinstance(value, list) else (value,):
                if one not in known and (is_named or (isinstance(one, str) and as_number(one) is None)):
                    known.add(one)
                    near = did_you_mean(one, names if is_named else ())
                    places.append(table.place(index, f"{prefix}{one}") + near)
    return {"has labels that the training data lacks": places}


# ------------------------------------------------------------------------------------------- lists


@DATASETS.register("list")
class ImageList(TableSet):
    """The images of a table of paths with one class each.

    Args:
        path: the table.
        names: the classes, or the names of each column, if the table may lack some of them; None: its own.
        layout: the meaning of its columns; None: the default.

    Raises:
        ConfigError: the table is invalid, or has labels that are not in `classes`.
    """

    has_files = True
    Columns: type[Any] = LabelColumns

    def __init__(
        self, path: str | os.PathLike, names: tuple[str, ...] | Names | None = None, layout: Layout | None = None
    ):
        self.folder, self._path = Path(path).parent, Path(path)
        self.layout = layout or self.build_layout(self.Columns(), "")
        names_of: Names | None = {self.key: names} if isinstance(names, tuple) else names
        super().__init__(read_table(path, self.layout), names_of)

    @classmethod
    def build_layout(cls, columns: Any, value: str) -> Layout:
        """Return the layout of a table by the settings of DATA.TABLE and the name of the split."""
        names, value = (columns.path, cls.key, getattr(columns, cls.key)), value if columns.split else ""
        return Layout(*names, columns.template, columns.delimiter, columns.split, value, columns.columns, columns.names)

    @classmethod
    def locate(cls, cfg, section) -> tuple[Path, Layout]:
        """Return the table of cfg.TRAIN or cfg.TEST, which may not exist, and its layout."""
        root, columns = Path(section.DATASET), cls.read_columns(cfg)
        layout = cls.build_layout(columns, section.SPLIT)
        if columns.file:
            return root / columns.file.replace("{}", section.SPLIT), layout
        if columns.split and len(tables := find_tables(root)) == 1:
            return root / tables[0], layout
        names = [root / f"{section.SPLIT}{ending}" for ending in TABLE_ENDINGS]
        return next((path for path in names if path.is_file()), names[0]), layout

    @classmethod
    def read_table(cls, cfg, name: str) -> Table:
        """Return the table of cfg.TRAIN or cfg.TEST with its problems."""
        return read_table(*cls.locate(cfg, cfg[name]))

    @classmethod
    def open_split(cls, cfg, name: str, names_of: Names | None = None) -> "ImageList":
        """Return the images of cfg.TRAIN or cfg.TEST; without names with its own classes."""
        path, layout = cls.locate(cfg, cfg[name])
        return cls(path, names_of, layout)

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for a missing table, and for problems with it and with its images."""
        name = "TRAIN" if train else "TEST"
        root, (path, layout) = Path(cfg[name].DATASET), cls.locate(cfg, cfg[name])
        if not train and (path, layout) == cls.locate(cfg, cfg.TRAIN) and cfg.TRAIN.SPLIT != cfg.TEST.SPLIT:
            fix = "fix: DATA.TABLE.split COLUMN, or put {} for the split into DATA.TABLE.file"
            yield "TEST.SPLIT", f"{path} is the training table too; {fix}"
        elif not root.is_dir():
            yield missing_root(name, root, path.name)
        elif not path.is_file():
            yield _missing_table(name, path)
        else:
            yield from super().find_problems(cfg, train)

    @classmethod
    def find_file_problems(cls, cfg, name: str, table: Table) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for missing images, and for labels that look like several."""
        path, layout = cls.locate(cfg, cfg[name])
        found: Problems = {}
        if missing := list_missing(path.parent, table):
            is_default = layout.template == "{}"
            fix = find_template(path.parent, table.image(0)) if is_default and len(missing) == len(table) else ""
            words = f" (fix: DATA.TABLE.template {fix!r})" if fix else ""
            found = {f"names images that do not exist{words}": missing}
        if cls.key == "labels" and len(layout.columns) == 1:
            known = set(table.names)
            several = [text for text in table.names if " " in text and set(text.split()) <= known]
            found["has labels that are several names, to be separated by semicolons"] = several
        yield from ((f"{name}.SPLIT", problem) for problem in sentences(path, found))
        if len(table) and not table.names:
            yield f"{name}.SPLIT", f"{path} has no label on any line"

    @classmethod
    def count_images(cls, cfg, most: int) -> int:
        """Return the number of training images; 0 if the table cannot be read."""
        return len(cls.read_table(cfg, "TRAIN"))

    def check_record(self) -> tuple[Path | None, str]:
        """Return a path in a folder beside the table, and the stamp of the table."""
        value = f".{self.layout.value}".replace("/", "_") if self.layout.split else ""
        return self.folder / ".distribuuuu" / f"{self._path.name}{value}", str(file_stamp(self._path))

    def describe(self, index: int) -> str:
        """Return the file of image `index`."""
        return os.path.join(self.folder, self._table.image(index))


@DATASETS.register("multilabel")
class Multilabel(AnyLabels, ImageList):
    """The images of a table of paths with any number of classes each."""

    Columns = LabelsColumns


@DATASETS.register("structured")
class StructuredList(SeveralTargets, ImageList):
    """The images of a table of paths with several targets each."""

    Columns = TargetsColumns


def _missing_table(name: str, path: Path) -> tuple[str, str]:
    """Return (key, message) for a table that does not exist."""
    existing = find_tables(path.parent)
    stems = [other.rpartition(".")[0] for other in existing]
    has = f"it has {first_few(stems)}" if existing else "it has no .csv file"
    hint = did_you_mean(path.stem, stems)
    splits = [stem for stem in sort_splits(stems) if (stem.lower() in TRAIN_NAMES) == (name == "TRAIN")]
    other = [f"{name}.SPLIT", *splits[:1]] if splits else ["DATA.TABLE.file", *existing[:1], "DATA.TABLE.split COLUMN"]
    fix = f"; fix: {' '.join(other)}" if existing and not hint else ""
    return f"{name}.SPLIT", f"no file {path.name} in {path.parent}; {has}{hint}{fix}"
