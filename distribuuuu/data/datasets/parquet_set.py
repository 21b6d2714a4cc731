"""Images in parquet files, in the layout of the Hugging Face Hub: a column of image files, others of labels.

    train-00000-of-00001.parquet    image: {bytes, path} or bytes; label: int64 with class names, or text

A row group is read for an image, so `distribuuuu pack` imports them before a training. TRAIN.DATASET is a folder or
hf://datasets/OWNER/NAME. See docs/large_data.md.
"""

import contextlib
import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import DataError, did_you_mean
from distribuuuu.config.registry import DATASETS
from distribuuuu.config.settings import setting
from distribuuuu.data.datasets.array_file import Content, find_stamp, pack_names
from distribuuuu.data.datasets.base import ImageDataset, SplitDataset
from distribuuuu.data.datasets.image_list import TableColumns, TableSet
from distribuuuu.data.datasets.index import Index
from distribuuuu.data.datasets.table_file import TableSpec, parse_labels
from distribuuuu.data.datasets.targets import encode_targets
from distribuuuu.files.untrusted import parse_json, printable

# Where the files of a split are, in the order in which they are looked for; {} stands for the split.
_PATTERNS = ("{}.parquet", "{}-*.parquet", "{}/*.parquet", "data/{}-*.parquet", "data/{}/*.parquet", "*/{}-*.parquet",
             "*/{}/*.parquet")  # fmt: skip
_ALL_PATTERNS = ("*.parquet", "data/*.parquet")
# Bytes of the texts and entries in the metadata of a file, and of the largest row group, uncompressed.
_MAX_METADATA, _MAX_GROUP = 64 << 20, 4 << 30


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

    targets: tuple[str, ...] = setting((), "columns of numbers or of names")


@DATASETS.register("parquet")
class ParquetSet(TableSet):
    """The images of parquet files with one class each."""

    Columns: type[Any] = ParquetLabel
    fault = "DATASET"

    def __init__(self, rows: "ParquetRows", numbers: np.ndarray, index: Index, trained: Index | None):
        super().__init__(index, trained)
        self._rows, self._numbers = rows, numbers
        self.has_files, self.holds_files = False, True

    @classmethod
    def open_split(cls, cfg, name: str, trained: ImageDataset | None = None) -> ImageDataset:
        """Return the images of cfg.TRAIN or cfg.TEST."""
        root, split, columns = cfg[name].DATASET, cfg[name].SPLIT, cls.read_columns(cfg)
        if name == "TEST" and columns.file and "{}" not in columns.file and not columns.split:
            fix = "fix: DATA.TABLE.split COLUMN, or put {} for the split into DATA.TABLE.file"
            raise ConfigError(f"{columns.file} has the training images too; {fix}")
        spec = TableSpec(columns.image, cls.key, getattr(columns, cls.key), split=columns.split, value=split)
        rows = ParquetRows(*find_files(root, split, columns), tuple(dict.fromkeys(spec.needed)))
        numbers, content = scan_rows(rows, spec)
        return cls(rows, numbers, Index(root, "", *content), trained.index if isinstance(trained, ParquetSet) else None)

    @classmethod
    def find_pack_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) if the files cannot be opened, or the classes do not fit."""
        yield from SplitDataset.find_problems.__func__(cls, cfg, train)  # type: ignore[attr-defined]

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield that the files are imported first."""
        if train:
            packed = {"label": "packed", "labels": "packed_multilabel"}.get(cls.key, "packed_structured")
            fix = f"fix: distribuuuu pack OUT DATA.NAME {cfg.DATA.NAME} TRAIN.DATASET {cfg.TRAIN.DATASET}"
            yield "DATA.NAME", f"parquet files are packed before a training; {fix}, then DATA.NAME {packed}"

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return 0: the files are opened to count the classes."""
        return 0

    def read(self, index: int) -> bytes:
        """Return the bytes of an image file."""
        value = self._rows.read(int(self._numbers[self.place(index)]))
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise ValueError("has no bytes; a path in the file is not followed")
        return data

    def describe(self, index: int) -> str:
        """Return the file and the row, from 1, of image `index`."""
        place = self.place(index)
        return f"{os.path.basename(self.index.file_of(place))}, {self.index.name(place)}"


@DATASETS.register("parquet_multilabel")
class ParquetMultilabel(ParquetSet):
    """The images of parquet files with any number of classes each."""

    targets, key, Columns = "labels", "labels", ParquetLabels


@DATASETS.register("parquet_structured")
class ParquetStructured(ParquetSet):
    """The images of parquet files with several targets each."""

    targets, key, Columns = "structured", "targets", ParquetTargets


# ------------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Report an error of pyarrow or of a file system as a ConfigError that names the file."""
    try:
        yield
    except ConfigError:
        raise
    except ImportError as error:
        fix = "fix: pip install 'distribuuuu[parquet]', for hf:// also 'distribuuuu[hf]'"
        raise ConfigError(f"DATA.NAME: {path} needs a package that is not installed: {error}; {fix}") from error
    except Exception as error:  # they raise nearly anything for a damaged file
        reason = printable(" ".join(str(error).split()))[:200]
        raise ConfigError(f"{path} cannot be read: {type(error).__name__}: {reason}") from error


def find_files(root: str, split: str, columns: Any) -> tuple[Any, list[str]]:
    """Return the file system of fsspec and the paths of a split; raises ConfigError if there are none."""
    patterns = [columns.file] if columns.file else [*_PATTERNS, *(_ALL_PATTERNS if columns.split else ())]
    with _naming(root):
        import fsspec

        system, base = fsspec.url_to_fs(root)
        names = (f"{glob.escape(base)}/{pattern.replace('{}', glob.escape(split))}" for pattern in patterns)
        paths = next(filter(None, (sorted(filter(system.isfile, system.glob(name))) for name in names)), [])
    if not paths:
        from distribuuuu.hints.sources import explain_parquet

        raise ConfigError(f"{root} has no Parquet files of the split {split}{explain_parquet(Path(root), split)}")
    if len({os.path.dirname(path) for path in paths}) > 1 and not columns.file:
        fix = f"fix: DATA.TABLE.file '{os.path.basename(os.path.dirname(paths[0]))}/{{}}-*.parquet'"
        raise ConfigError(f"{root} has several configurations with the split {split}; {fix}")
    return system, paths


class ParquetRows:
    """The rows of several files in their order. The sizes of untrusted files are limited.

    Args:
        system: the file system of fsspec.
        columns: the columns that each file must have; the first holds image files.

    Attributes:
        places: the file of each row group, and its number in the file.
        starts: the index of the first row of each row group, and the number of rows, int64 (groups + 1,).
    """

    def __init__(self, system: Any, paths: Sequence[str], columns: Sequence[str]):
        self.paths, self.columns, self._system = list(paths), tuple(columns), system
        self.places: list[tuple[int, int]] = []
        rows: list[int] = []
        for number, path in enumerate(self.paths):
            with _naming(path), self._open(number) as file:
                schema = file.schema_arrow
                if missing := [name for name in columns if name not in schema.names]:
                    has = f"it has {', '.join(schema.names)}{did_you_mean(missing[0], schema.names)}"
                    raise ConfigError(f"{path} has no column {', '.join(missing)}; {has}; fix: see DATA.TABLE")
                groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
                if any(group.total_byte_size > _MAX_GROUP for group in groups):
                    raise ValueError(f"a row group of more than {_MAX_GROUP >> 30} GiB")
                if sum(group.num_rows for group in groups) > self._system.size(path):  # each image has at least a byte
                    raise ValueError("more rows than bytes")
            if number == 0:
                self.schema = schema
            self.places += [(number, group) for group in range(len(groups))]
            rows += [group.num_rows for group in groups]
        self.starts = np.cumsum([0, *rows], dtype=np.int64)
        self._kept: tuple[int, list[Any]] = -1, []

    def _open(self, number: int) -> Any:
        import pyarrow.parquet

        limits = {"thrift_string_size_limit": _MAX_METADATA, "thrift_container_size_limit": _MAX_METADATA >> 6}
        return pyarrow.parquet.ParquetFile(self._system.open(self.paths[number], "rb"), **limits)

    def _read_group(self, group: int, column: str) -> list[Any]:
        number, place = self.places[group]
        with self._open(number) as file:
            return file.read_row_group(place, columns=[column], use_threads=False).column(column).to_pylist()

    def read(self, row: int) -> Any:
        """Return the image of a row; the row group that was read last is kept."""
        group = int(self.starts.searchsorted(row, side="right")) - 1
        if self._kept[0] != group:
            try:
                self._kept = group, self._read_group(group, self.columns[0])
            except OSError as error:  # the fault of the disk or the network, not of the image
                raise DataError(f"{self.paths[self.places[group][0]]} cannot be read: {error}") from error
        return self._kept[1][row - int(self.starts[group])]

    def read_all(self, column: str) -> list[Any]:
        """Return the values of a column, which must be small."""
        values: list[Any] = []
        for group, (number, _) in enumerate(self.places):
            with _naming(self.paths[number]):
                values += self._read_group(group, column)
        return values

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the names of the classes in a column, which the package `datasets` stores; empty if there are none."""
        try:
            content = parse_json((self.schema.metadata or {}).get(b"huggingface", b"{}"))
            feature = content["info"]["features"][column]
            names = feature.get("feature", feature)["names"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return ()
        is_valid = isinstance(names, list) and all(isinstance(name, str) for name in names)
        return tuple(names) if is_valid and len(set(names)) == len(names) else ()


# ------------------------------------------------------------------------------------------ labels


def scan_rows(rows: ParquetRows, spec: TableSpec) -> tuple[np.ndarray, Content]:
    """Return the rows of a split, and the content of their index; images are not read.

    The names of a column are those in its metadata; without them, the sorted labels, numbers by value.
    """
    path, kind = rows.paths[0], rows.schema.field(spec.path).type
    if "binary" not in str(kind):
        fix = "fix: DATA.TABLE.image COLUMN; save a table of paths as CSV, for DATA.NAME list"
        raise ConfigError(f"{path}: column {spec.path} has {kind}; expected bytes of images; {fix}")
    numbers = np.arange(rows.starts[-1])
    if spec.split:
        values = rows.read_all(spec.split)
        numbers = np.array([row for row, value in enumerate(values) if str(value) == spec.value], np.int64)
    if not len(numbers):
        raise ConfigError(f"{path} has no image of the split {spec.value}")
    values_of = {column: rows.read_all(column) for column in spec.columns}
    cells = {column: [values[row] for row in numbers] for column, values in values_of.items()}
    if spec.key == "targets" or len(spec.columns) == 1:
        found = {name: _read_column(cells[name], rows.class_names(name), spec.key, path) for name in spec.columns}
    else:  # a column of 0 and 1 for each class
        texts = zip(*(["" if value is None else _to_text(value) for value in values] for values in cells.values()),
                    strict=True)  # fmt: skip
        labels = [parse_labels(spec, row) for row in texts]
        if wrong := [label for label in labels if isinstance(label, str)]:
            raise ConfigError(f"{path} {wrong[0]}")
        found = {"label": (labels if spec.key == "labels" else [names[0] for names in labels], spec.columns)}
    meta, arrays = encode_targets(spec.key, found)
    file = np.array([number for number, _ in rows.places], np.int32).repeat(np.diff(rows.starts))
    rows_in_file = (numbers - np.searchsorted(file, file)[numbers]).tolist()
    arrays |= {
        **pack_names("files", [*map(os.fsencode, rows.paths)]),
        "stamps": np.array([find_stamp(path) for path in rows.paths], np.int64),
        **pack_names("names", [b"row %d" % (row + 1) for row in rows_in_file]),
        "file": file[numbers],
    }
    return numbers, ({**meta, "notes": [], "ignored": {}, "num_beside": 0}, arrays)


def _read_column(values: Sequence[Any], own: Sequence[str], key: str, path: str) -> tuple[list[Any], Sequence[str]]:
    """Return the labels of a column as texts, and the names of the classes in their order.

    The values are numbers or names, or lists of them for several classes; `own` are the names of numbers in this file.
    """
    if key == "labels" and not all(isinstance(value, (list, type(None))) for value in values):
        raise ConfigError(f"{path}: expected lists of labels")
    if key == "targets" and any(value is None or isinstance(value, (list, dict)) for value in values):
        raise ConfigError(f"{path}: expected numbers or names as targets, and no null")
    lists = [value or [] for value in values] if key == "labels" else [[value] for value in values]
    known = {value for labels in lists for value in labels}
    has_numbers = all(isinstance(value, (int, float)) for value in known)
    names = map(_to_text, sorted(known)) if has_numbers else sorted(map(str, known))
    texts = [[_to_text(value, own) for value in labels] for labels in lists]
    return texts if key == "labels" else [text for (text,) in texts], tuple(own) or tuple(names)


def _to_text(value: Any, own: Sequence[str] = ()) -> str:
    """Return a label as text; a number is that of a name, if there are any."""
    value = int(value) if isinstance(value, bool) else value
    if isinstance(value, int) and own:
        return own[value] if 0 <= value < len(own) else f"number {value}"
    return str(value)
