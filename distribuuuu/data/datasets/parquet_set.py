"""Images in parquet and Arrow files, in the layout of the Hugging Face Hub: a column of image files, others of labels.

    train-00000-of-00001.parquet    image: {bytes, path} or bytes; label: int64 with class names, or text

A local folder, a folder that `datasets` has written by save_to_disk, or hf://datasets/OWNER/NAME, which only
`distribuuuu pack` reads. See docs/data.md.
"""

import fnmatch
import functools
import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean
from distribuuuu.config.registry import DATASETS
from distribuuuu.config.settings import read_settings, setting
from distribuuuu.data.datasets.base import ImageDataset, class_count_mismatch, file_stamp, first_few
from distribuuuu.data.datasets.parquet_file import ColumnFiles
from distribuuuu.files.untrusted import parse_json, read_regular

# Where the files of a split are, in the order in which they are looked for; {} stands for the split.
_PATTERNS = ("{}.parquet", "{}-*.parquet", "{}/*.parquet", "data/{}-*.parquet", "data/{}/*.parquet", "*/{}-*.parquet",
             "*/{}/*.parquet")  # fmt: skip
_ALL_PATTERNS = ("*.parquet", "data/*.parquet")
# Bytes of the list of files that `datasets` writes.
_MAX_STATE = 16 << 20


@dataclass
class ParquetColumns:
    """The keys of DATA.TABLE."""

    file: str = setting("", "pattern of the files below the folder of the data, {} for the split: full/{}-*.parquet")
    image: str = setting("image", "column with the bytes of the image file, or with {bytes, path}")
    split: str = setting("", "column that selects the rows of TRAIN.SPLIT and TEST.SPLIT")

    def __post_init__(self) -> None:
        if PurePath(self.file).is_absolute() or ".." in PurePath(self.file).parts:
            raise ValueError(f"got file {self.file!r}; expected a pattern below the folder of the data")


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


@DATASETS.register("parquet")
class ParquetSet(ImageDataset):
    """The images of parquet or Arrow files with one class each.

    The classes are the names in the metadata of the training files; without them, the sorted labels, numbers by value.

    Args:
        root: the folder of the data or its URL.
        split: TRAIN.SPLIT or TEST.SPLIT.
        columns: DATA.TABLE.
        names_of: the names of the classes in each column, those of the training set; None: its own.

    Raises:
        ConfigError: the files are missing or damaged, or have a label that the training set lacks.
    """

    Columns: type[ParquetColumns] = ParquetLabel
    # The key of DATA.TABLE that names the columns of the labels.
    key = "label"

    def __init__(self, root: str, split: str, columns: Any, names_of: dict[str, Any] | None = None):
        import numpy as np

        self.folder, self._image = Path(root), columns.image
        self.fields: tuple[str, ...] = getattr(columns, self.key)
        needed = (columns.image, *self.fields, *([columns.split] if columns.split else []))
        self.files = open_files(root, split, columns, needed)
        _check_type(self.files.schema.field(columns.image), self.files.paths[0])
        self._rows = np.arange(len(self.files))
        if columns.split:
            self._rows = np.flatnonzero([str(value) == split for value in self.files.read_all(columns.split)])
        if not len(self._rows):
            raise ConfigError(f"{self.files.paths[0]} has no image of the split {split}")
        self._read_labels(names_of)

    def _read_labels(self, names_of: dict[str, Any] | None) -> None:
        """Read the columns of the labels."""
        self._values: dict[str, Any] = {}
        self.names_of: dict[str, Any] = {}
        for column in self.fields:
            values = self.files.read_all(column)
            values = [values[row] for row in self._rows]
            own = self.files.class_names(column)
            names = names_of[column] if names_of else own or sort_names(values)
            self._values[column] = to_numbers(values, own, names, f"{self.files.paths[0]}, column {column}")
            self.names_of[column] = names
        self.classes = self.names_of[self.fields[0]]
        self.labels = self._values[self.fields[0]]

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "ParquetSet":
        """Return the training or the evaluation set, which has the classes of the training set."""
        columns = cls.read_columns(cfg)
        trained = cls(cfg.TRAIN.DATASET, cfg.TRAIN.SPLIT, columns)
        if train:
            return trained
        return cls(cfg.TEST.DATASET, cfg.TEST.SPLIT, columns, trained.names_of)

    @classmethod
    def read_columns(cls, cfg) -> Any:
        """Return DATA.TABLE; the default if it is invalid, which is reported elsewhere."""
        return read_settings("DATA.TABLE", cls.Columns, cfg.DATA.TABLE)[0] or cls.Columns()

    @classmethod
    def find_pack_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) if the files cannot be opened, or the classes do not fit."""
        name, columns = "TRAIN" if train else "TEST", cls.read_columns(cfg)
        if not getattr(columns, cls.key):
            yield f"DATA.TABLE.{cls.key}", f"not set; expected columns; fix: DATA.TABLE.{cls.key} '[a, b]'"
            return
        if cls.key == "label" and len(columns.label) > 1:
            fix = "fix: DATA.NAME parquet_multilabel DATA.TABLE.labels"
            yield "DATA.TABLE.label", f"got {list(columns.label)}; expected one column; {fix}"
            return
        try:
            images = cls.from_cfg(cfg, train)
        except ConfigError as error:
            yield from ((f"{name}.DATASET", str(problem)) for problem in error.problems)
            return
        if len(images.classes) != cfg.MODEL.NUM_CLASSES:
            message = class_count_mismatch(cfg.MODEL.NUM_CLASSES, len(images.classes), images.files.paths[0])
            yield "MODEL.NUM_CLASSES", message

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
        """Return the number of training classes; 0 if the files cannot be opened."""
        try:
            return 0 if "://" in cfg.TRAIN.DATASET else len(cls.from_cfg(cfg, train=True).classes)
        except ConfigError:
            return 0

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> bytes:
        """Return the bytes of an image file."""
        value = self.files.read(self._image, int(self._rows[index]))
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise ValueError("has no bytes; a path in the file is not followed")
        return data

    def stamp(self, index: int) -> tuple[int, ...]:
        """Return the stamp of the file of image `index`."""
        return file_stamp(self.files.paths[self.files.place(int(self._rows[index]))[1]])

    def describe(self, index: int) -> str:
        """Return the file and the row of image `index`."""
        return self.files.describe(int(self._rows[index]))

    def notes(self) -> list[str]:
        """Return a warning if a row group is read for each image."""
        if not self.files.paths[0].endswith(".parquet"):
            return []
        rows = int(max(self.files.starts[1:] - self.files.starts[:-1]))
        fix = f"fix: distribuuuu pack OUT DATA.NAME parquet TRAIN.DATASET {self.folder}"
        note = f"a row group of up to {rows:,} images is read for each image, which is slow; {fix}"
        return [note] if rows > 1 else []


@DATASETS.register("parquet_multilabel")
class ParquetMultilabel(ParquetSet):
    """The images of parquet or Arrow files with any number of classes each."""

    targets, key, Columns = "labels", "labels", ParquetLabels

    def _read_labels(self, names_of: dict[str, Any] | None) -> None:
        import numpy as np

        if len(self.fields) > 1:
            super()._read_labels(dict.fromkeys(self.fields, ("0", "1")))
            self.classes = self.fields
            self._hot = np.stack([self._values[column] for column in self.fields], axis=1).astype(bool)
            return
        (column,) = self.fields
        values = self.files.read_all(column)
        lists = [values[row] or [] for row in self._rows]
        if not all(isinstance(labels, list) for labels in lists):
            raise ConfigError(f"{self.files.paths[0]}, column {column}: expected lists of labels")
        flat, own = [label for labels in lists for label in labels], self.files.class_names(column)
        names = names_of[column] if names_of else own or sort_names(flat)
        numbers = to_numbers(flat, own, names, f"{self.files.paths[0]}, column {column}")
        self.classes, self.names_of = names, {column: names}
        self._hot = np.zeros((len(lists), len(names)), bool)
        self._hot[np.repeat(np.arange(len(lists)), list(map(len, lists))), numbers] = True

    def label(self, index: int) -> Any:
        """Return the float32 multi-hot vector (classes,) of image `index`."""
        return self._hot[index].astype("float32")


@DATASETS.register("parquet_structured")
class ParquetStructured(ParquetSet):
    """The images of parquet or Arrow files with several targets each: a dict by the names of the columns.

    The classes of the set are the names of the first column that has any, else the columns.
    """

    targets, key, Columns = "structured", "targets", ParquetTargets

    def _read_labels(self, names_of: dict[str, Any] | None) -> None:
        import numpy as np

        self._values, self.names_of = {}, {}
        for column in self.fields:
            values = self.files.read_all(column)
            values = [values[row] for row in self._rows]
            own, place = self.files.class_names(column), f"{self.files.paths[0]}, column {column}"
            is_text = bool(own) or any(isinstance(value, str) for value in values)
            names = (names_of[column] if names_of else own or sort_names(values)) if is_text else ()
            if names:
                self._values[column] = to_numbers(values, own, names, place)
            else:
                self._values[column] = _to_array(values, place)
            self.names_of[column] = names
        self.classes = next(filter(None, self.names_of.values()), self.fields)
        self.labels = np.zeros(len(self._rows), np.int64)

    def label(self, index: int) -> dict[str, Any]:
        """Return the targets of image `index` by the names of the columns."""
        return {column: values[index] for column, values in self._values.items()}


def _to_array(values: Sequence[Any], place: str) -> Any:
    """Return numbers, or lists of as many numbers, as an array."""
    import numpy as np

    try:
        array = np.array(values)
    except ValueError:  # lists of several lengths
        array = np.array([""])
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"{place}: expected numbers, lists of as many numbers, or names, and no null")
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)


def _plain(value: Any) -> str | int | None:
    """Return a label as text or integer; None if it is neither."""
    return int(value) if isinstance(value, bool) else value if isinstance(value, (str, int)) else None


def sort_names(values: Sequence[Any]) -> tuple[str, ...]:
    """Return the labels as texts: numbers by value, names by the alphabet."""
    known = {plain for plain in map(_plain, values) if plain is not None}
    has_text = any(isinstance(value, str) for value in known)
    return tuple(sorted(map(str, known)) if has_text else map(str, sorted(known)))


def to_numbers(values: Sequence[Any], own: Sequence[str], names: Sequence[str], place: str) -> Any:
    """Return labels as indices into `names`, int64.

    Args:
        values: numbers or names.
        own: the names of numbers in this file; empty: none.
        names: of the classes.
        place: the file and the column, for messages.

    Raises:
        ConfigError: a label is none of the names.
    """
    import numpy as np

    numbers = {name: number for number, name in enumerate(names)}
    found: dict[str | int | None, int] = {}
    for value in {_plain(value) for value in values}:
        name = str(value)
        if isinstance(value, int) and own:
            name = own[value] if 0 <= value < len(own) else ""
        if value is None or name not in numbers:
            hint = did_you_mean(str(value), names) or f"; the classes are {first_few(names)}"
            raise ConfigError(f"{place}: got the label {value!r}, which is no class of the training data{hint}")
        found[value] = numbers[name]
    return np.array([found[_plain(value)] for value in values], dtype=np.int64)


def _check_type(field: Any, path: str) -> None:
    """Raise ConfigError if a column cannot hold image files."""
    from distribuuuu.data.datasets.parquet_file import import_pyarrow

    types = import_pyarrow().types
    names = [child.name for child in field.type] if types.is_struct(field.type) else []
    if not (types.is_binary(field.type) or types.is_large_binary(field.type) or "bytes" in names):
        fix = "fix: DATA.TABLE.image COLUMN; for a column of paths DATA.NAME list DATA.TABLE.path COLUMN"
        raise ConfigError(f"{path}: column {field.name} has {field.type}; expected bytes of images; {fix}")


# ------------------------------------------------------------------------------------------- files


def open_files(root: str, split: str, columns: Any, needed: Sequence[str]) -> ColumnFiles:
    """Return the files of a split of a folder or URL; raises ConfigError if there are none, or a column is missing."""
    if "://" in root:
        file_system, names = _list_url(root)
        paths, system = _find_among(names, split, columns), file_system
    else:
        paths, system = _find_local(Path(root), split, columns), None
        names = [] if paths else glob.glob("**/*.parquet", root_dir=root, recursive=True)
    if not paths:
        stems = sorted({re.sub(r"-\d+(-of-\d+)?$", "", Path(name).stem) for name in names})
        has = f"it has {first_few(stems)}{did_you_mean(split, stems)}" if stems else "it has no parquet file"
        raise ConfigError(f"{root} has no parquet or Arrow files of the split {split}; {has}")
    if len({os.path.dirname(path) for path in paths}) > 1 and not columns.file:
        fix = f"fix: DATA.TABLE.file '{os.path.basename(os.path.dirname(paths[0]))}/{{}}-*.parquet'"
        raise ConfigError(f"{root} has several configurations with the split {split}; {fix}")
    return ColumnFiles(paths, tuple(dict.fromkeys(needed)), system)


def _patterns(split: str, columns: Any) -> list[str]:
    patterns = [columns.file] if columns.file else [*_PATTERNS, *(_ALL_PATTERNS if columns.split else ())]
    return [pattern.replace("{}", glob.escape(split)) for pattern in patterns]


def _find_among(names: Sequence[str], split: str, columns: Any) -> list[str]:
    for pattern in _patterns(split, columns):
        depth = pattern.count("/")
        fitting = [name for name in names if "/" in name]
        found = [name for name in fitting if fnmatch.fnmatchcase("/".join(name.split("/")[-1 - depth :]), pattern)]
        if found:
            return sorted(found)
    return []


def _find_local(root: Path, split: str, columns: Any) -> list[str]:
    for folder in (root / split, root):
        if not columns.file and (folder / "state.json").is_file():
            return _read_state(folder)
    for pattern in _patterns(split, columns):
        if found := sorted(glob.glob(pattern, root_dir=root)):
            return [str(root / name) for name in found]
    return []


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
def _list_url(url: str) -> tuple[Any, list[str]]:
    """Return the file system and the parquet files of a URL."""
    from fsspec.core import url_to_fs

    try:
        file_system, root = url_to_fs(url)
        names = sorted(name for name in file_system.find(root) if name.endswith(".parquet"))
    except ImportError as error:
        fix = f"fix: pip install 'distribuuuu[{url.partition(':')[0]}]'"
        raise ConfigError(f"{url}: needs another package: {error}; {fix}") from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{url} cannot be listed: {reason}; fix: check the URL and HF_TOKEN") from error
    return file_system, names
