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
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.registry import DATASETS
from distribuuuu.config.settings import read_settings, setting
from distribuuuu.data.datasets.base import (
    ImageDataset,
    class_count_mismatch,
    file_stamp,
    first_few,
)
from distribuuuu.data.datasets.layouts import TRAIN_NAMES, missing_root, sort_splits
from distribuuuu.data.datasets.table_file import (
    ENDINGS,
    Layout,
    Problems,
    Table,
    find_tables,
    find_template,
    list_missing,
    read_table,
    sentences,
)

if TYPE_CHECKING:
    import numpy as np


# The sorted names of the labels by the key of DATA.TABLE; of the targets by column, int or float for numbers.
Names = dict[str, Any]


@dataclass
class TableColumns:
    """The keys of DATA.TABLE that all kinds of lists have."""

    file: str = setting("", "table below the folder of the data, {} for the split; default: {}.csv, .tsv or .parquet")
    path: str = setting("path", "column of the paths of the images")
    template: str = setting("{}", "path of an image, with the field of the column in the place of {}")
    delimiter: str = setting("", "between the fields; default: a comma, or a tab in a .tsv")
    split: str = setting("", "column that selects the rows of TRAIN.SPLIT and TEST.SPLIT")

    def __post_init__(self) -> None:
        if PurePath(self.file).is_absolute() or ".." in PurePath(self.file).parts:
            raise ValueError(f"got file {self.file!r}; expected a path below the folder of the data")
        if "{}" not in self.template:
            raise ValueError(f"got template {self.template!r}; expected a path with {{}}, e.g. train/{{}}.jpg")
        if len(self.delimiter) > 1 or self.delimiter in ('"', "\r", "\n"):
            raise ValueError(f"got delimiter {self.delimiter!r}; expected one character, e.g. ';'")


@dataclass
class LabelColumns(TableColumns):
    """The keys of DATA.TABLE for one class per image."""

    label: tuple[str, ...] = setting(("label",), "column of the class; several: a column of 0 and 1 for each class")


@dataclass
class LabelsColumns(TableColumns):
    """The keys of DATA.TABLE for any number of classes per image."""

    path: str = setting("image", "column of the paths of the images")
    labels: tuple[str, ...] = setting(("labels",), "column of the classes; several: a column of 0 and 1 for each class")


@dataclass
class TargetsColumns(TableColumns):
    """The keys of DATA.TABLE for several targets per image."""

    targets: tuple[str, ...] = setting((), "columns of the targets: numbers, or names, which become class indices")


@DATASETS.register("list")
class ImageList(ImageDataset):
    """The images of a table with one class each.

    Args:
        path: the table.
        classes: the class names that define the labels, if the table may lack some of them; None: its own.
        layout: the meaning of its columns; None: the default.

    Raises:
        ConfigError: the table is invalid, or has labels that are not in `classes`.
    """

    has_files = True
    Columns: type[TableColumns] = LabelColumns
    # The key of DATA.TABLE that names the columns of the labels, and DATA.NAME.
    key, name = "label", "list"
    # Of several targets: the names or the type of the numbers in each column.
    names_of: Names = {}

    def __init__(self, path: str | os.PathLike, classes: tuple[str, ...] | None = None, layout: Layout | None = None):
        self.folder, self._path = Path(path).parent, Path(path)
        self.layout = layout or self.build_layout(self.Columns(), "")
        self._table = read_table(path, self.layout)
        self.classes = self._table.names if classes is None else classes
        names_of = self.names_of or {self.key: self.classes}
        if problems := [*self._table.problems, *sentences(path, self.find_unknown(self._table, names_of))]:
            raise ConfigError([f"DATA.NAME {self.name}: {problem}" for problem in problems])
        self._prepare()

    def _prepare(self) -> None:
        """Compute what `label` needs from the table and the classes."""
        import numpy as np

        numbers = {name: number for number, name in enumerate(self.classes)}
        # From the index of a name in the table to its class.
        self._class_of = np.array([numbers[name] for name in self._table.names], dtype=np.int64)

    # -------------------------------------------------------------------------------- from a config

    @classmethod
    def build_layout(cls, columns: Any, value: str) -> Layout:
        """Return the layout of a table by the settings of DATA.TABLE and the name of the split."""
        names = columns.path, cls.key, getattr(columns, cls.key)
        return Layout(*names, columns.template, columns.delimiter, columns.split, value if columns.split else "")

    @classmethod
    def locate(cls, cfg, section) -> tuple[Path, Layout]:
        """Return the table of cfg.TRAIN or cfg.TEST, which may not exist, and its layout."""
        root = Path(section.DATASET)
        columns = read_settings("DATA.TABLE", cls.Columns, cfg.DATA.TABLE)[0] or cls.Columns()  # reported elsewhere
        layout = cls.build_layout(columns, section.SPLIT)
        if columns.file:
            return root / columns.file.replace("{}", section.SPLIT), layout
        if columns.split and len(tables := find_tables(root)) == 1:
            return root / tables[0], layout
        names = [root / f"{section.SPLIT}{ending}" for ending in ENDINGS]
        return next((path for path in names if path.is_file()), names[0]), layout

    @classmethod
    def read_names(cls, path: Path, layout: Layout) -> Names:
        """Return the sorted labels of a table by the key of their columns; empty if it cannot be read."""
        return {cls.key: read_table(path, layout).names}

    @classmethod
    def read_classes(cls, path: Path, layout: Layout) -> tuple[str, ...]:
        """Return the classes of a table; empty if it cannot be read."""
        names_of = cls.read_names(path, layout)
        is_readable = len(read_table(path, layout)) > 0
        return _classes_of(names_of) if is_readable else ()

    @classmethod
    def find_unknown(cls, table: Table, names_of: Names) -> Problems:
        """Return the first place of each label that is not a class."""
        classes, places = _classes_of(names_of), list[str]()
        known = set(classes)
        unknown = {number for number, name in enumerate(table.names) if name not in known}
        for index in range(len(table)) if unknown else ():
            for number in unknown.intersection(table.labels_of(index)):
                name = table.names[number]
                places.append(table.place(index, name) + did_you_mean(name, classes))
                unknown.remove(number)
        return {"has labels that the training data lacks": places}

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "ImageList":
        """Return the set; classes without evaluation images are allowed."""
        path, layout = trained_at = cls.locate(cfg, cfg.TRAIN)
        if train:
            return cls(path, None, layout)
        path, layout = cls.locate(cfg, cfg.TEST)
        names_of = cls.read_names(*trained_at) if read_table(*trained_at) else None
        return cls(path, names_of[cls.key] if names_of else None, layout)

    @classmethod
    def open_split(cls, cfg, section) -> "ImageList":
        """Return the images of cfg.TRAIN or cfg.TEST with their own classes."""
        path, layout = cls.locate(cfg, section)
        return cls(path, None, layout)

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for problems with the files, unknown classes and a wrong number of classes."""
        name, trained_at = "TRAIN" if train else "TEST", cls.locate(cfg, cfg.TRAIN)
        path, layout = cls.locate(cfg, cfg[name])
        if not train and (path, layout) == trained_at and cfg.TRAIN.SPLIT != cfg.TEST.SPLIT:
            fix = "fix: DATA.TABLE.split COLUMN, or put {} for the split into DATA.TABLE.file"
            yield "TEST.SPLIT", f"{path} is the training table too; {fix}"
            return
        if not layout.columns:
            yield f"DATA.TABLE.{cls.key}", f"not set; expected columns of the table; fix: DATA.TABLE.{cls.key} '[a, b]'"
            return
        names_of = cls.read_names(*trained_at) if read_table(*trained_at) else {}
        problems = list(cls._find_split_problems(name, cfg[name], path, layout, names_of))
        yield from problems
        source = trained_at if names_of else (path, layout)
        num_classes = 0 if problems else len(cls.read_classes(*source))
        if num_classes not in (0, cfg.MODEL.NUM_CLASSES):
            yield "MODEL.NUM_CLASSES", class_count_mismatch(cfg.MODEL.NUM_CLASSES, num_classes, str(source[0]))

    @classmethod
    def _find_split_problems(
        cls, name: str, section, path: Path, layout: Layout, names_of: Names
    ) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for a missing or invalid table, unknown labels and missing images."""
        root, key = Path(section.DATASET), f"{name}.SPLIT"
        if not root.is_dir():
            yield missing_root(name, root, path.name)
        elif not path.is_file():
            existing = find_tables(path.parent)
            stems = [other.rpartition(".")[0] for other in existing]
            has = f"it has {first_few(stems)}" if existing else "it has no .csv file"
            hint = did_you_mean(path.stem, stems)
            splits = [stem for stem in sort_splits(stems) if (stem.lower() in TRAIN_NAMES) == (name == "TRAIN")]
            other = [key, *splits[:1]] if splits else ["DATA.TABLE.file", *existing[:1], "DATA.TABLE.split COLUMN"]
            fix = f"; fix: {' '.join(other)}" if existing and not hint else ""
            yield key, f"no file {path.name} in {path.parent}; {has}{hint}{fix}"
        else:
            table = read_table(path, layout)
            found = cls.find_unknown(table, names_of) if names_of else {}
            if missing := list_missing(path.parent, table):
                is_default = layout.template == "{}"
                fix = find_template(path.parent, table.path(0)) if is_default and len(missing) == len(table) else ""
                words = f" (fix: DATA.TABLE.template {fix!r})" if fix else ""
                found |= {f"names images that do not exist{words}": missing}
            found |= _odd_labels(table) if cls.key == "labels" and len(layout.columns) == 1 else {}
            yield from ((key, problem) for problem in (*table.problems, *sentences(path, found)))
            if len(table) and not table.names:
                yield key, f"{path} has no label on any line"

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return the number of training classes; without training data, of evaluation classes."""
        counts = (len(cls.read_classes(*cls.locate(cfg, section))) for section in (cfg.TRAIN, cfg.TEST))
        return next(filter(None, counts), 0)

    @classmethod
    def count_images(cls, cfg, most: int) -> int:
        """Return the number of training images; 0 if the table cannot be read."""
        return len(read_table(*cls.locate(cfg, cfg.TRAIN)))

    # ------------------------------------------------------------------------------------- images

    def __len__(self) -> int:
        return len(self._table)

    def check_record(self) -> tuple[Path | None, str]:
        """Return a path in a folder beside the table, and the stamp of the table."""
        value = f".{self.layout.value}".replace("/", "_") if self.layout.split else ""
        name = f"{self._path.name}{value}"
        return self.folder / ".distribuuuu" / name, str(file_stamp(self._path))

    def label(self, index: int) -> Any:
        """Return the class of image `index`."""
        return int(self._class_of[self._table.labels_of(index)[0]])

    def describe(self, index: int) -> str:
        """Return the file of image `index`."""
        return os.path.join(self.folder, self._table.path(index))


@DATASETS.register("multilabel")
class Multilabel(ImageList):
    """The images of a table with any number of classes each."""

    targets, key, name, Columns = "labels", "labels", "multilabel", LabelsColumns

    def label(self, index: int) -> "np.ndarray":
        """Return the float32 multi-hot vector (classes,) of image `index`."""
        import numpy as np

        target = np.zeros(len(self.classes), dtype=np.float32)
        target[self._class_of[self._table.labels_of(index)]] = 1
        return target


@DATASETS.register("structured")
class StructuredList(ImageList):
    """The images of a table with several targets each: a dict by the names of the columns.

    The targets of a column are numbers, int64 or float32, if all its training fields are; else indices of its sorted
    training names. The classes of the set are the names of the first column that has any, else the columns.

    Args:
        path, layout: see `ImageList`.
        names_of: the names of each column, see `read_names`; None: its own.
    """

    targets, key, name, Columns = "structured", "targets", "structured", TargetsColumns

    def __init__(self, path: str | os.PathLike, names_of: Names | None = None, layout: Layout | None = None):
        layout = layout or self.build_layout(self.Columns(), "")
        self.names_of = self.read_names(Path(path), layout) if names_of is None else names_of
        super().__init__(path, _classes_of(self.names_of), layout)

    def _prepare(self) -> None:
        import numpy as np

        texts, fields = self._table.names, np.frombuffer(self._table.labels, np.int32)
        self._values = {}
        for place, (column, names) in enumerate(self.names_of.items()):
            numbers = dict(zip(names, range(len(names)), strict=True)) if isinstance(names, tuple) else {}
            of_text = [numbers.get(text, 0) if numbers else as_number(text) or 0 for text in texts]
            values = np.array(of_text, np.float32 if names is float else np.int64)
            self._values[column] = values[fields[place :: len(self.names_of)]]

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "StructuredList":
        """Return the set; the evaluation targets have the names of the training table."""
        path, layout = trained_at = cls.locate(cfg, cfg.TRAIN)
        if train:
            return cls(path, None, layout)
        path, layout = cls.locate(cfg, cfg.TEST)
        return cls(path, cls.read_names(*trained_at) if read_table(*trained_at) else None, layout)

    @classmethod
    def read_names(cls, path: Path, layout: Layout) -> Names:
        """Return the sorted names in each column, or the type of its numbers."""
        table, columns = read_table(path, layout), layout.columns
        found = {}
        for place, column in enumerate(columns):
            names = sorted({table.names[number] for number in set(table.labels[place :: len(columns)])})
            numbers = [as_number(name) for name in names]
            is_whole = all(isinstance(number, int) for number in numbers)
            found[column] = tuple(names) if None in numbers else int if is_whole else float
        return found

    @classmethod
    def find_unknown(cls, table: Table, names_of: Names) -> Problems:
        """Return the first places of names that the training data lacks, and of texts in columns of numbers."""
        places = []
        for place, (column, names) in enumerate(names_of.items()):
            is_named = isinstance(names, tuple)
            known = set(names) if is_named else {name for name in table.names if as_number(name) is not None}
            for index, number in enumerate(table.labels[place :: len(names_of)]):
                if (name := table.names[number]) not in known:
                    near = did_you_mean(name, names if is_named else ())
                    places.append(table.place(index, f"{column} {name}") + near)
        return {"has targets that the training data lacks": places}

    def label(self, index: int) -> dict[str, Any]:
        """Return the targets of image `index` by the names of the columns."""
        return {column: values[index] for column, values in self._values.items()}


def _classes_of(names_of: Names) -> tuple[str, ...]:
    """Return the first names, else the columns."""
    return next((names for names in names_of.values() if isinstance(names, tuple)), tuple(names_of))


def as_number(text: str) -> int | float | None:
    """Return a field as a number that a tensor can hold; None if it is none."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if -(2**63) <= number < 2**63 else None
    return None


def _odd_labels(table: Table) -> Problems:
    """Return the labels that are several names with spaces in place of semicolons."""
    known = set(table.names)
    several = [name for name in table.names if " " in name and set(name.split()) <= known]
    return {"has labels that are several names, to be separated by semicolons": several}
