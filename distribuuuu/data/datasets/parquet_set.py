"""Images in parquet and Arrow files, in the layout of the Hugging Face Hub: a column of image files, others of labels.

    train-00000-of-00001.parquet    image: {bytes, path} or bytes; label: int64 with class names, or text

A local folder, a folder that `datasets` has written by save_to_disk, or hf://datasets/OWNER/NAME, which only
`distribuuuu pack` reads. See docs/data.md.
"""

import contextlib
import fnmatch
import functools
import glob
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean, first_few
from distribuuuu.config.registry import DATASETS
from distribuuuu.config.settings import setting
from distribuuuu.data.datasets.image_list import AnyLabels, SeveralTargets, TableColumns, TableSet
from distribuuuu.data.datasets.parquet_file import ColumnFiles, holds_files
from distribuuuu.data.datasets.table_file import Layout, Names, parse_labels, sentences
from distribuuuu.files.image_files import TRAIN_NAMES, file_stamp, sort_splits
from distribuuuu.files.untrusted import parse_json, read_regular

# Where the files of a split are, in the order in which they are looked for; {} stands for the split.
_PATTERNS = ("{}.parquet", "{}-*.parquet", "{}/*.parquet", "data/{}-*.parquet", "data/{}/*.parquet", "*/{}-*.parquet",
             "*/{}/*.parquet")  # fmt: skip
_ALL_PATTERNS = ("*.parquet", "data/*.parquet")
# Bytes of the list of files that `datasets` writes.
_MAX_STATE = 16 << 20


@dataclass
class ParquetColumns(TableColumns):
    """The keys of DATA.TABLE; of `file`, the default are the names above."""

    image: str = setting("image", "column with the bytes of the image file, or with {bytes, path}")


@dataclass
class ParquetLabel(ParquetColumns):
    """The keys of DATA.TABLE for one class per image."""

    label: tuple[str, ...] = setting(("label",), "column of the class: a number or a name")


@dataclass
class ParquetLabels(ParquetColumns):
    """The keys of DATA.TABLE for any number of classes per image."""

    labels: tuple[str, ...] = setting(("labels",), "column of lists of classes; several: a column of 0 and 1 for each")


@dataclass
class ParquetTargets(ParquetColumns):
    """The keys of DATA.TABLE for several targets per image."""

    targets: tuple[str, ...] = setting((), "columns of numbers, of lists of as many numbers, or of names")


class ParquetTable:
    """The labels of the rows of a split; see `Table`, whose names are sorted as texts.

    The names of a column are those in its metadata; without them, the sorted labels, numbers by value.

    Args:
        root: the folder of the data or its URL.
        split: TRAIN.SPLIT or TEST.SPLIT.
        columns: DATA.TABLE.
        key: the name in it of the columns of the labels.

    Attributes:
        files: the files; problems: why they cannot be read.
        rows: the number of the row of each image.
    """

    def __init__(self, root: str, split: str, columns: Any, key: str):
        self.path, self.rows = root, array("q")
        self._values: dict[str, list[Any]] = {}
        self.problems: tuple[str, ...] = ()
        self.names_of: Names = {}
        try:
            self._read(root, split, columns, Layout(columns.image, key, getattr(columns, key), split=columns.split))
        except ConfigError as error:
            self.problems, self.rows = tuple(map(str, error.problems)), array("q")

    def _read(self, root: str, split: str, columns: Any, layout: Layout) -> None:
        system, paths = find_split_files(root, split, columns)
        self.files = ColumnFiles(paths, tuple(dict.fromkeys(layout.needed)), system)
        self.path, fields = self.files.paths[0], layout.columns
        _check_type(self.files.schema.field(layout.path), self.path)
        self.rows = array("q", range(len(self.files)))
        if layout.split:
            values = self.files.read_all(layout.split)
            self.rows = array("q", (row for row, value in enumerate(values) if str(value) == split))
        if not self.rows:
            raise ConfigError(f"{self.path} has no image of the split {split}")
        cells = {field: self.files.read_all(field) for field in fields}
        for field in fields if layout.key == "targets" or len(fields) == 1 else ():
            values, own = [cells[field][row] for row in self.rows], self.files.class_names(field)
            self._values[field], self.names_of[field] = read_column(values, own, layout.key, f"{self.path}, {field}")
        if not self.names_of:  # a column of 0 and 1 for each class
            self.names_of[layout.key], problems = fields, dict[str, list[str]]()
            for index, row in enumerate(self.rows):
                labels = parse_labels(layout, [_to_text(cells[field][row], ()) for field in fields])
                if isinstance(labels, str):
                    problems.setdefault(labels, []).append(self.place(index, ""))
                else:
                    self._values.setdefault(layout.key, []).append([*labels] if layout.key == "labels" else labels[0])
            if problems:
                raise ConfigError([*sentences(self.path, problems)])

    def __len__(self) -> int:
        return len(self.rows)

    def values(self, column: str) -> list[Any]:
        """Return the label of each image in a column of `names_of`: a text, a list of texts, or numbers."""
        return self._values[column]

    def place(self, index: int, text: str) -> str:
        """Return the place of image `index` for a message."""
        return f"{self.files.describe(self.rows[index])}{f', {text!r}' if text else ''}"


@DATASETS.register("parquet")
class ParquetSet(TableSet):
    """The images of parquet or Arrow files with one class each."""

    Columns: type[Any] = ParquetLabel
    fault, holds_files = "DATASET", True

    @classmethod
    def read_table(cls, cfg, name: str) -> ParquetTable:
        """Return the labels of cfg.TRAIN or cfg.TEST with the problems of its files."""
        return ParquetTable(cfg[name].DATASET, cfg[name].SPLIT, cls.read_columns(cfg), cls.key)

    @classmethod
    def find_pack_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) if the files cannot be opened, or the classes do not fit."""
        yield from super().find_problems(cfg, train)

    @classmethod
    def find_file_problems(cls, cfg, name: str, table: ParquetTable) -> Iterator[tuple[str, str]]:
        """Yield (key, message) if the evaluation images are those of the training: the same files for two splits."""
        columns = cls.read_columns(cfg)
        if name == "TRAIN" or columns.split or cfg.TRAIN.SPLIT == cfg.TEST.SPLIT or not len(table):
            return
        if table.files.paths == find_split_files(cfg.TRAIN.DATASET, cfg.TRAIN.SPLIT, columns)[1]:
            parent = Path(os.path.abspath(cfg.TEST.DATASET)).parent
            fix = f"set TEST.DATASET to the folder of {cfg.TEST.SPLIT}, or DATA.TABLE.split COLUMN"
            if columns.file:
                fix = "DATA.TABLE.split COLUMN, or put {} for the split into DATA.TABLE.file"
            elif (parent / cfg.TEST.SPLIT / "state.json").is_file():
                fix = f"set TRAIN.DATASET {parent}"
            yield f"TEST.{cls.fault}", f"{table.path} has the training images too; fix: {fix}"

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield the same, and a URL, which would be read for each image."""
        name = "TRAIN" if train else "TEST"
        if "://" in cfg[name].DATASET:
            fix = f"fix: distribuuuu pack OUT DATA.NAME {cfg.DATA.NAME} TRAIN.DATASET {cfg.TRAIN.DATASET}"
            yield f"{name}.DATASET", f"{cfg[name].DATASET} is imported before the training; {fix}"
        else:
            yield from cls.find_pack_problems(cfg, train)

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return the number of training classes; 0 if the files cannot be opened, or are at a URL."""
        return 0 if "://" in cfg.TRAIN.DATASET else super().count_classes(cfg)

    def read(self, index: int) -> bytes:
        """Return the bytes of an image file."""
        value = self._table.files.read(self._table.files.columns[0], self._table.rows[index])
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise ValueError("has no bytes; a path in the file is not followed")
        return data

    def stamp(self, index: int) -> tuple[int, ...]:
        """Return the stamp of the file of image `index`."""
        files = self._table.files
        return file_stamp(files.paths[files.place(self._table.rows[index])[1]])

    def describe(self, index: int) -> str:
        """Return the file and the row of image `index`."""
        return self._table.place(index, "")

    def notes(self) -> list[str]:
        """Return a warning if a row group is read for each image."""
        files = self._table.files
        rows = int(max(files.starts[1:] - files.starts[:-1]))
        if rows == 1 or not self._table.path.endswith(".parquet"):
            return []
        fix = "fix: distribuuuu pack OUT, with the same options"
        return [f"a row group of up to {rows:,} images is read for each image, which is slow; {fix}"]


@DATASETS.register("parquet_multilabel")
class ParquetMultilabel(AnyLabels, ParquetSet):
    """The images of parquet or Arrow files with any number of classes each."""

    Columns = ParquetLabels


@DATASETS.register("parquet_structured")
class ParquetStructured(SeveralTargets, ParquetSet):
    """The images of parquet or Arrow files with several targets each."""

    Columns = ParquetTargets


def read_column(
    values: Sequence[Any], own: Sequence[str], key: str, place: str
) -> tuple[list[Any], tuple[str, ...] | str]:
    """Return the labels of a column as texts, and their names; or as numbers, and their type.

    Args:
        values: numbers or names; lists of them for several classes; of targets also lists of numbers.
        own: the names of numbers in this file; empty: none.
        key: label, labels or targets.
        place: the file and the column, for messages.

    Raises:
        ConfigError: the values of a target are of several kinds, or those of several classes are no lists.
    """
    import numpy as np

    if key == "targets" and not own and not any(isinstance(value, str) for value in values):
        kind = ""
        with contextlib.suppress(ValueError):  # lists of several lengths
            kind = np.array(values).dtype.kind
        if kind not in tuple("biuf"):
            raise ConfigError(f"{place}: expected numbers, lists of as many numbers, or names, and no null")
        return [*values], "float32" if kind == "f" else "int64"
    if key == "labels" and not all(isinstance(value, (list, type(None))) for value in values):
        raise ConfigError(f"{place}: expected lists of labels")
    lists = [value or [] for value in values] if key == "labels" else [[value] for value in values]
    known = {value for labels in lists for value in labels if isinstance(value, (int, str))}
    has_text = any(isinstance(value, str) for value in known)
    names = tuple(sorted(map(str, known)) if has_text else map(_to_text, sorted(known)))
    texts = [[_to_text(value, own) for value in labels] for labels in lists]
    return texts if key == "labels" else [text for (text,) in texts], tuple(own) or names


def _to_text(value: Any, own: Sequence[str] = ()) -> str:
    """Return a label as text; a number is that of a name, if there are any."""
    value = int(value) if isinstance(value, bool) else value
    if isinstance(value, int) and own:
        return own[value] if 0 <= value < len(own) else f"number {value}"
    return str(value)


def _check_type(field: Any, path: str) -> None:
    """Raise ConfigError if a column cannot hold image files."""
    if not holds_files(field.type):
        fix = "fix: DATA.TABLE.image COLUMN; for a column of paths DATA.NAME list DATA.TABLE.path COLUMN"
        raise ConfigError(f"{path}: column {field.name} has {field.type}; expected bytes of images; {fix}")


# ------------------------------------------------------------------------------------------- files


def find_split_files(root: str, split: str, columns: Any) -> tuple[Any, list[str]]:
    """Return the file system, None: local, and the paths of a split; raises ConfigError if there are none."""
    system, base, names = _list_url(root) if "://" in root else (None, root, _list_folder(root))
    for folder in (Path(root, split), Path(root)) if system is None and not columns.file else ():
        if (folder / "state.json").is_file():
            return None, _read_state(folder)
    patterns = [columns.file] if columns.file else [*_PATTERNS, *(_ALL_PATTERNS if columns.split else ())]
    found = (_find_matches(names, pattern.replace("{}", glob.escape(split))) for pattern in patterns)
    paths = [os.path.join(base, name) for name in next(filter(None, found), ())]
    if not paths:
        stems = sorted({re.sub(r"-\d+(-of-\d+)?$", "", Path(name).stem) for name in names})
        others = [
            stem for stem in sort_splits(stems) if (stem.lower() in TRAIN_NAMES) == (split.lower() in TRAIN_NAMES)
        ]
        hint = did_you_mean(split, stems) or (f"; fix: set SPLIT {others[0]}" if others else "")
        has = f"it has {first_few(stems)}{hint}" if stems else "it has no parquet file"
        raise ConfigError(f"{root} has no parquet or Arrow files of the split {split}; {has}")
    if len({os.path.dirname(path) for path in paths}) > 1 and not columns.file:
        fix = f"fix: DATA.TABLE.file '{os.path.basename(os.path.dirname(paths[0]))}/{{}}-*.parquet'"
        raise ConfigError(f"{root} has several configurations with the split {split}; {fix}")
    return system, paths


def _find_matches(names: Sequence[str], pattern: str) -> list[str]:
    """Return the sorted relative names that match a pattern, part by part."""
    wanted = pattern.split("/")
    parts = ((name, name.split("/")) for name in names)
    return sorted(name for name, own in parts if len(own) == len(wanted) and all(map(fnmatch.fnmatchcase, own, wanted)))


def _list_folder(root: str) -> list[str]:
    """Return the relative names of the parquet and Arrow files below a folder."""
    patterns = ("**/*.parquet", "**/*.arrow")
    return [name.replace(os.sep, "/") for text in patterns for name in glob.glob(text, root_dir=root, recursive=True)]


def _read_state(folder: Path) -> list[str]:
    """Return the Arrow files of a folder that `datasets` has written; raises ConfigError if its list is damaged."""
    try:
        files = parse_json(read_regular(folder / "state.json", _MAX_STATE))["_data_files"]
        names = [file["filename"] for file in files]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        problem = f"{folder / 'state.json'} cannot be read: {type(error).__name__}; fix: save it again"
        raise ConfigError(problem) from error
    if not names or not all(isinstance(name, str) and re.fullmatch(r"[^/\\]+\.arrow", name) for name in names):
        raise ConfigError(f"{folder / 'state.json'} names no Arrow files of its folder; fix: save it again")
    return [str(folder / name) for name in names]


@functools.cache
def _list_url(url: str) -> tuple[Any, str, list[str]]:
    """Return the file system of a URL, the path in it, and the relative names of the parquet files."""
    from fsspec.core import url_to_fs

    try:
        file_system, root = url_to_fs(url)
        names = sorted(name for name in file_system.find(root) if name.endswith(".parquet"))
    except ImportError as error:
        fix = f"fix: pip install 'distribuuuu[{url.partition(':')[0]}]'"
        raise ConfigError(f"{url}: needs another package: {error}; {fix}") from error
    except Exception as error:  # file systems and their HTTP clients raise nearly anything
        reason = " ".join((str(error) or type(error).__name__).split())[:200]
        raise ConfigError(f"{url} cannot be listed: {reason}; fix: check the URL, the network and HF_TOKEN") from error
    return file_system, root, [name.removeprefix(root).lstrip("/") for name in names]
