"""Lists of images: a table names the images and their class (`list`), or any number of classes (`multilabel`).

    path,label                  image,labels
    beach/001.jpg,sea           beach/001.jpg,person;surf board;sea
    town/002.jpg,street         beach/002.jpg,

A path is absolute or relative to the folder of the table. `labels` are class names separated by semicolons, as names
may contain spaces; an image without labels has no class. The classes are the sorted names of the training table.
DATA.TABLE names the file and the columns if they are others.
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.read_settings import read_settings
from distribuuuu.config.registry import DATASETS
from distribuuuu.config.settings import setting
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.datasets.index import Index, IndexedImages, open_index
from distribuuuu.data.datasets.table_file import TableSpec, scan_table
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.image_files import TABLE_ENDINGS, find_tables


@dataclass
class TableFile:
    """The key of DATA.TABLE that all tables have."""

    file: str = setting("", "table below the data's folder, {} for the split; default: {}.csv, .tsv, .txt")

    def __post_init__(self) -> None:
        if PurePath(self.file).is_absolute() or ".." in PurePath(self.file).parts:
            raise ValueError(f"got file {self.file!r}; expected a path below the folder of the data")


@dataclass
class PathColumns(TableFile):
    """The keys of DATA.TABLE that all kinds of lists have."""

    path: str = setting("path", "column of the paths of the images")
    template: str = setting("{}", "path of an image, with the field of the column in the place of {}")
    delimiter: str = setting("", "between the fields; default: a comma, or a tab in a .tsv")
    columns: tuple[str, ...] = setting((), "names of all columns of a text without a header")
    split: str = setting("", "column that selects the rows of TRAIN.SPLIT and TEST.SPLIT")
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
        TableFile(file="".join(self.names[:1]))  # it is below the folder, too


@dataclass
class LabelColumns(PathColumns):
    """The keys of DATA.TABLE for one class per image."""

    label: tuple[str, ...] = setting(("label",), "column of the class; several: a column of 0 and 1 for each class")


@dataclass
class LabelsColumns(PathColumns):
    """The keys of DATA.TABLE for any number of classes per image."""

    path: str = setting("image", "column of the paths of the images")
    labels: tuple[str, ...] = setting(("labels",), "column of the classes; several: a column of 0 and 1 for each class")
    separator: str = setting("", "between the labels in a field; default: ';'")
    uncertain: int = setting(-1, "in columns of one class each, the value of -1: 0 or 1; empty fields are 0", -1, 1)


# ------------------------------------------------------------------------------------------- kinds


class TableSet(IndexedImages):
    """The images of a table, with one or more labels each; a family defines `open_split`."""

    Columns: type[Any] = TableFile
    names_places = True
    # The key of DATA.TABLE that names the columns of the labels.
    key = "label"

    @classmethod
    def read_columns(cls, cfg) -> Any:
        """Return DATA.TABLE, which must name columns of labels; the default if it is invalid (reported elsewhere)."""
        columns = read_settings("DATA.TABLE", cls.Columns, cfg.DATA.TABLE)[0] or cls.Columns()
        if not getattr(columns, cls.key):
            message = f"not set; expected columns of the table; fix: DATA.TABLE.{cls.key} '[a, b]'"
            raise ConfigError(Problem(f"DATA.TABLE.{cls.key}", message))
        return columns

    def label(self, index: int) -> Any:
        """Return the class of image `index`, or the float32 multi-hot vector (classes,)."""
        if self.targets == "label":
            return super().label(index)
        place, ends = self.place(index), self.index.arrays["label_offsets"]
        target = np.zeros(len(self.classes), np.float32)
        target[self.labels[ends[place] : ends[place + 1]]] = 1
        return target


@DATASETS.register("list")
class ImageList(TableSet):
    """The images of a table of paths with one class each."""

    has_files = True
    Columns: type[Any] = LabelColumns

    @classmethod
    def open_table(cls, path: str | os.PathLike, spec: TableSpec | None = None, cache_dir: str = "") -> Index:
        """Return the index of a table, by default with the usual columns; raise ConfigError if it is invalid."""
        path = os.fspath(path)
        spec = spec or cls.build_spec(cls.Columns(), "")
        name, scan = f"{os.path.basename(path)} {spec}", partial(scan_table, path, spec)
        return open_index(path, os.path.dirname(path), name, cache_folder(cache_dir), scan)

    @classmethod
    def build_spec(cls, columns: Any, value: str) -> TableSpec:
        """Return the meaning of a table's columns by the settings of DATA.TABLE and the name of the split."""
        names, value = (columns.path, cls.key, getattr(columns, cls.key)), value if columns.split else ""
        options = columns.template, columns.delimiter, columns.split, value, columns.columns
        others = getattr(columns, "separator", ""), getattr(columns, "uncertain", -1)
        return TableSpec(*names, *options, *others, columns.names)

    @classmethod
    def locate(cls, cfg, name: str) -> tuple[Path, TableSpec]:
        """Return the table of cfg.TRAIN or cfg.TEST, which may not exist, and the meaning of its columns."""
        section, columns = cfg[name], cls.read_columns(cfg)
        root, spec = Path(section.DATASET), cls.build_spec(columns, section.SPLIT)
        if columns.file:
            return root / columns.file.replace("{}", section.SPLIT), spec
        if columns.split and len(tables := find_tables(root)) == 1:
            return root / tables[0], spec
        by_name = {path.name.lower(): path for path in root.glob("*")} if root.is_dir() else {}
        names = [f"{section.SPLIT}{ending}" for ending in TABLE_ENDINGS]
        existing = (root / name if (root / name).is_file() else by_name.get(name.lower()) for name in names)
        return next(filter(None, existing), root / names[0]), spec

    @classmethod
    def open_split(cls, cfg, name: str, trained: ImageDataset | None = None) -> ImageDataset:
        """Return the images of cfg.TRAIN or cfg.TEST."""
        path, spec = cls.locate(cfg, name)
        if name == "TEST" and (path, spec) == cls.locate(cfg, "TRAIN") and cfg.TRAIN.SPLIT != cfg.TEST.SPLIT:
            fix = "fix: DATA.TABLE.split COLUMN, or put {} for the split into DATA.TABLE.file"
            raise ConfigError(f"{path} is the training table too; {fix}")
        if not path.is_file():
            from distribuuuu.hints.sources import missing_file

            raise ConfigError(Problem(*missing_file(name, path.parent, path.name, is_archive=False)))
        return cls(cls.open_table(path, spec, cfg.DATA.CACHE_DIR), trained.classes if trained else None)


@DATASETS.register("multilabel")
class Multilabel(ImageList):
    """The images of a table of paths with any number of classes each."""

    targets, key, Columns = "labels", "labels", LabelsColumns
