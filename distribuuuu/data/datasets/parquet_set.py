"""Images in parquet and Arrow files, in the layout of the Hugging Face Hub: a column of image files, others of labels.

    train-00000-of-00001.parquet    image: {bytes, path} or bytes; label: int64 with class names, or text

A local folder, a folder that `datasets` has written by save_to_disk, or hf://datasets/OWNER/NAME, which only
`distribuuuu pack` reads. See docs/data.md.
"""

import contextlib
import fnmatch
import functools
import glob
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.config import ConfigError
from distribuuuu.config.registry import DATASETS
from distribuuuu.config.settings import setting
from distribuuuu.data.datasets.array_file import pack_names
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.datasets.image_list import TableColumns, TableSet
from distribuuuu.data.datasets.index import Content, Index, encode_targets, find_stamp, open_index
from distribuuuu.data.datasets.parquet_file import ColumnFiles, holds_files
from distribuuuu.data.datasets.table_file import TableSpec, parse_labels, sentences
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.image_files import file_stamp
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


@DATASETS.register("parquet")
class ParquetSet(TableSet):
    """The images of parquet or Arrow files with one class each."""

    Columns: type[Any] = ParquetLabel
    fault, holds_files = "DATASET", True

    def __init__(self, index: Index, trained: Index | None, files: ColumnFiles):
        self._files = files
        super().__init__(index, trained)
        self.has_files, self.holds_files = False, True

    @classmethod
    def open_split(cls, cfg, name: str, trained: ImageDataset | None = None) -> ImageDataset:
        """Return the images of cfg.TRAIN or cfg.TEST."""
        root, split, columns = cfg[name].DATASET, cfg[name].SPLIT, cls.read_columns(cfg)
        system, paths = find_split_files(name, root, split, columns)
        if name == "TEST" and not columns.split and cfg.TRAIN.SPLIT != split:
            try:
                is_same = paths == find_split_files("TRAIN", cfg.TRAIN.DATASET, cfg.TRAIN.SPLIT, columns)[1]
            except ConfigError:
                is_same = False
            if is_same:
                from distribuuuu.hints.sources import explain_same_parquet

                raise ConfigError(explain_same_parquet(paths[0], root, split, columns.file))
        spec = TableSpec(columns.image, cls.key, getattr(columns, cls.key), split=columns.split, value=split)
        scan = functools.partial(scan_parquet, root, paths, spec, system)
        if system is not None:
            index = Index(root, "", *scan())
        else:
            words = repr((paths, spec)).encode("utf-8", "surrogateescape")
            own = f"parquet-{hashlib.sha256(words).hexdigest()[:32]}"
            cache = cache_folder(cfg.DATA.CACHE_DIR)
            index = open_index(root, root, own, cache, scan, in_root=cls.index_in_root, is_inside=False)
        files = ColumnFiles(paths, (spec.path,), system)
        return cls(index, trained.index if isinstance(trained, ParquetSet) else None, files)

    @classmethod
    def find_pack_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) if the files, which may be at a URL, cannot be opened, or the classes do not fit."""
        yield from super().find_problems(cfg, train)

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
        row = int(self.index.arrays["row"][self.place(index)])
        value = self._files.read(self._files.columns[0], row)
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise ValueError("has no bytes; a path in the file is not followed")
        return data

    def stamp(self, index: int) -> tuple[int, ...]:
        """Return the stamp of the file of image `index`."""
        return file_stamp(self.index.file_of(self.place(index)))

    def describe(self, index: int) -> str:
        """Return the file and the row, from 1, of image `index`."""
        return self._files.describe(int(self.index.arrays["row"][self.place(index)]))

    def notes(self) -> list[str]:
        """Return a warning if a row group is read for each image."""
        rows = int(max(self._files.starts[1:] - self._files.starts[:-1]))
        if rows == 1 or not self._files.paths[0].endswith(".parquet"):
            return super().notes()
        fix = "fix: distribuuuu pack OUT, with the same options"
        slow = f"a row group of up to {rows:,} images is read for each image, which is slow; {fix}"
        return [*super().notes(), slow]


@DATASETS.register("parquet_multilabel")
class ParquetMultilabel(ParquetSet):
    """The images of parquet or Arrow files with any number of classes each."""

    targets, key, Columns = "labels", "labels", ParquetLabels


@DATASETS.register("parquet_structured")
class ParquetStructured(ParquetSet):
    """The images of parquet or Arrow files with several targets each."""

    targets, key, Columns = "structured", "targets", ParquetTargets


def scan_parquet(root: str, paths: Sequence[str], spec: TableSpec, system: Any = None) -> Content:
    """Return the content of an index of the rows of some files, whose images are not read.

    The names of a column are those in its metadata; without them, the sorted labels, numbers by value.

    Raises:
        ConfigError: a file cannot be read, or the values of a column are no labels.
    """
    files, path = ColumnFiles(paths, tuple(dict.fromkeys(spec.needed)), system), paths[0]
    field = files.schema.field(spec.path)
    if not holds_files(field.type):
        fix = "fix: DATA.TABLE.image COLUMN; for a column of paths DATA.NAME list DATA.TABLE.path COLUMN"
        raise ConfigError(f"{path}: column {field.name} has {field.type}; expected bytes of images; {fix}")
    rows = np.arange(len(files))
    if spec.split:
        rows = np.array([row for row, value in enumerate(files.read_all(spec.split)) if str(value) == spec.value], int)
    if not len(rows):
        raise ConfigError(f"{path} has no image of the split {spec.value}")
    # By column: its values, and their names or their type.
    found: dict[str, tuple[list[Any], tuple[str, ...] | str]] = {}
    cells = {column: files.read_all(column) for column in spec.columns}
    if spec.key == "targets" or len(spec.columns) == 1:
        for column in spec.columns:
            values, own = [cells[column][row] for row in rows], files.class_names(column)
            found[column] = read_column(values, own, spec.key, f"{path}, {column}")
    else:  # a column of 0 and 1 for each class
        labels, problems = [], dict[str, list[str]]()
        for row in rows:
            names = parse_labels(spec, [_to_text(cells[column][row], ()) for column in spec.columns])
            labels.append(names)
            if isinstance(names, str):
                problems.setdefault(names, []).append(files.describe(int(row)))
        if problems:
            raise ConfigError([*sentences(path, problems)])
        found["label"] = labels if spec.key == "labels" else [names[0] for names in labels], spec.columns
    meta, arrays = encode_targets(spec.key, found)
    names = [os.path.relpath(path, root) if system is None else path for path in paths]
    arrays |= {
        **pack_names("files", [*map(os.fsencode, names)]),
        "stamps": np.array([find_stamp(path) for path in paths], np.int64),
        **pack_names("names", [b""] * len(rows)),
        "row": rows.astype(np.int64),
        "file": np.array([files.place(int(row))[1] for row in rows], np.int32),
    }
    return {**meta, "notes": [], "ignored": {}, "num_beside": 0}, arrays


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


# ------------------------------------------------------------------------------------------- files


def find_split_files(name: str, root: str, split: str, columns: Any) -> tuple[Any, list[str]]:
    """Return the file system, None: local, and the paths of a split; raises ConfigError if there are none."""
    system, base, names = _list_url(root) if "://" in root else (None, root, _list_folder(root))
    for folder in (Path(root, split), Path(root)) if system is None and not columns.file else ():
        if (folder / "state.json").is_file():
            return None, _read_state(folder)
    patterns = [columns.file] if columns.file else [*_PATTERNS, *(_ALL_PATTERNS if columns.split else ())]
    found = (_find_matches(names, pattern.replace("{}", glob.escape(split))) for pattern in patterns)
    paths = [os.path.join(base, name) for name in next(filter(None, found), ())]
    if not paths:
        from distribuuuu.hints.sources import explain_parquet

        raise ConfigError(explain_parquet(name, root, split, names))
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
