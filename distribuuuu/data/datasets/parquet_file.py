"""Columns of parquet and Arrow files, local or at a URL, by row group (pip install 'distribuuuu[parquet]').

The files may be of others: their sizes are limited, and their Arrow buffers are validated before a value is read.
"""

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import DataError, counted, did_you_mean
from distribuuuu.files.untrusted import open_regular, parse_json, printable

# Bytes of the texts and entries in the metadata of a file, and of the largest row group, uncompressed.
_MAX_METADATA, _MAX_GROUP = 64 << 20, 4 << 30
# Row groups that a thread keeps.
_KEPT = 2
# Attempts to read from a URL, and the seconds of the first pause between two, which doubles.
_ATTEMPTS, _PAUSE_S = 5, 0.5
_ARROW = (".arrow",)


def import_pyarrow() -> Any:
    """Return pyarrow with its reader of parquet files; raise ConfigError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        fix = "fix: pip install 'distribuuuu[parquet]'"
        raise ConfigError(f"DATA.NAME: parquet and Arrow files need pyarrow, which is not installed; {fix}") from error
    return pyarrow


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Report an error of pyarrow as a ConfigError that names the file."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # pyarrow and the file systems raise nearly anything for a damaged file
        reason = printable(" ".join(str(error).split()))[:200]
        raise ConfigError(f"{path} cannot be read: {type(error).__name__}: {reason}") from error


class ColumnFile:
    """A parquet file, or an Arrow file of the stream or the file format, which is memory-mapped.

    Attributes:
        schema, names: the columns.
        rows: the number of rows of each row group or record batch.
    """

    def __init__(self, path: str, file_system: Any = None):
        self.path = path
        self._batches: list[Any] = []
        with naming(path):
            source = self._open_source(file_system)
            if path.endswith(_ARROW):
                self._read_batches(source)
            else:
                self._read_footer(source)
            self.names: list[str] = list(self.schema.names)  # fails for names that are not UTF-8

    def _open_source(self, file_system: Any) -> Any:
        pyarrow = import_pyarrow()
        if file_system is not None:
            return file_system.open(self.path, "rb")
        open_regular(self.path).close()  # a named pipe or a device would block
        return pyarrow.memory_map(self.path)

    def _read_footer(self, source: Any) -> None:
        limits = {"thrift_string_size_limit": _MAX_METADATA, "thrift_container_size_limit": _MAX_METADATA >> 6}
        self._file = import_pyarrow().parquet.ParquetFile(source, **limits)
        self.schema, metadata = self._file.schema_arrow, self._file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self.rows = [group.num_rows for group in groups]
        if any(not 0 <= rows <= 1 << 31 for rows in self.rows) or sum(self.rows) != metadata.num_rows:
            raise ValueError(f"{sum(self.rows):,} rows in its row groups, {metadata.num_rows:,} in all")
        if any(group.total_byte_size > _MAX_GROUP for group in groups):
            raise ValueError(f"a row group of more than {_MAX_GROUP >> 30} GiB")

    def _read_batches(self, source: Any) -> None:
        pyarrow = import_pyarrow()
        try:
            reader = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            reader = pyarrow.ipc.open_file(source)
        self.schema, self._batches = reader.schema, reader.read_all().to_batches()
        self.rows = [batch.num_rows for batch in self._batches]

    def read(self, group: int, columns: Sequence[str]) -> Any:
        """Return columns of a row group as an Arrow table; a damaged one raises an exception of any kind."""
        if not self._batches:
            return self._file.read_row_group(group, columns=list(columns), use_threads=False)
        batch = self._batches[group].select(list(columns))
        batch.validate(full=True)  # offsets outside of a buffer would crash the process
        return batch


def holds_files(kind: Any) -> bool:
    """Return whether a column of an Arrow type can hold image files: bytes, or a struct with them."""
    types = import_pyarrow().types
    if types.is_struct(kind):
        return "bytes" in [field.name for field in kind]
    return types.is_binary(kind) or types.is_large_binary(kind)


def read_columns(
    path: str, find_problem: Callable[[list[str], list[str]], str], columns: Sequence[str]
) -> Iterator[tuple]:
    """Yield the values of columns in each row of a file.

    Raises:
        ConfigError: the file cannot be read, or `find_problem` returns one for the names of its columns, and of those
            that hold image files.
    """
    file = ColumnFile(path)
    if problem := find_problem(file.names, [field.name for field in file.schema if holds_files(field.type)]):
        raise ConfigError(f"{path} {problem}")
    for group in range(len(file.rows)):
        with naming(path):
            table = file.read(group, columns)
            values = [table.column(name).to_pylist() for name in columns]
        yield from zip(*values, strict=True)


class ColumnFiles:
    """The rows of several files in their order, read by index.

    Args:
        paths: the files.
        columns: the columns that each of them must have.
        file_system: of fsspec, for paths at a URL; None: local.

    Attributes:
        starts: the index of the first row of each row group, and the number of rows, int64 (groups + 1,).
    """

    def __init__(self, paths: Sequence[str], columns: Sequence[str], file_system: Any = None):
        import numpy as np

        self.paths, self.columns, self._file_system = list(paths), tuple(columns), file_system
        self._places: list[tuple[int, int]] = []
        rows: list[int] = []
        for number, path in enumerate(self.paths):
            file = ColumnFile(path, file_system)
            if number == 0:
                self.schema = file.schema
            if missing := [name for name in columns if name not in file.names]:
                has = f"it has {', '.join(file.names)}{did_you_mean(missing[0], file.names)}"
                raise ConfigError(f"{path} has no column {', '.join(missing)}; {has}; fix: see DATA.TABLE")
            size = os.path.getsize(path) if file_system is None else sum(file.rows)
            if sum(file.rows) > size:  # each image has at least a byte
                raise ConfigError(f"{path} cannot be read: {counted(sum(file.rows), 'row')} in {counted(size, 'byte')}")
            self._places += [(number, group) for group in range(len(file.rows))]
            rows += file.rows
        self.starts = np.cumsum([0, *rows], dtype=np.int64)
        self._local, self._pid = threading.local(), os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _local=threading.local())

    def __len__(self) -> int:
        return int(self.starts[-1])

    def place(self, index: int) -> tuple[int, int, int]:
        """Return the number of the row group of row `index`, its file, and the row in the group."""
        group = int(self.starts.searchsorted(index, side="right")) - 1
        return group, self._places[group][0], index - int(self.starts[group])

    def describe(self, index: int) -> str:
        """Return the file name and the row, from 1, of row `index`."""
        _, file, _ = self.place(index)
        first = next(group for group, place in enumerate(self._places) if place[0] == file)
        return f"{Path(self.paths[file]).name}, row {index - int(self.starts[first]) + 1}"

    def read_all(self, column: str) -> list[Any]:
        """Return the values of a column, which must be small."""
        values: list[Any] = []
        for group, (file, _) in enumerate(self._places):
            with naming(self.paths[file]):
                values += self._read_group(group, (column,)).column(column).to_pylist()
        if len(values) != len(self):
            raise ConfigError(f"{self.paths[0]} cannot be read: {len(values)} values of {column} for {len(self)} rows")
        return values

    def read(self, column: str, index: int) -> Any:
        """Return a value; the row groups that a thread has read last are kept."""
        group, _, row = self.place(index)
        if self._pid != os.getpid():  # a fork shares neither files nor connections
            self._local, self._pid = threading.local(), os.getpid()
        kept = self._local.__dict__.setdefault("groups", OrderedDict())
        if (column, group) not in kept:
            while len(kept) >= _KEPT:
                kept.popitem(last=False)
            kept[column, group] = self._read_group(group, (column,)).column(column)
        kept.move_to_end((column, group))
        return kept[column, group][row].as_py()

    def _read_group(self, group: int, columns: Sequence[str]) -> Any:
        file, number = self._places[group]
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._open(file).read(number, columns)
            except Exception as error:  # HTTP clients have errors of their own
                if self._file_system is None or (isinstance(error, ValueError) and not isinstance(error, ConfigError)):
                    raise
                if attempt == _ATTEMPTS:  # the network's fault, not the image's
                    path, reason = self.paths[file], printable(" ".join(str(error).split()))[:200]
                    raise DataError(f"{path}: cannot be read in {_ATTEMPTS} attempts: {reason}") from error
                self._local.__dict__.pop("file", None)
                time.sleep(_PAUSE_S * 2**attempt)
        raise AssertionError

    def _open(self, number: int) -> ColumnFile:
        """Return a file; a thread keeps the last one open."""
        kept = self._local.__dict__.get("file")
        if kept is None or kept[0] != number:
            kept = self._local.file = number, ColumnFile(self.paths[number], self._file_system)
        return kept[1]

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the names of the classes in a column, which the package `datasets` stores; empty if there are none."""
        try:
            content = parse_json((self.schema.metadata or {}).get(b"huggingface", b"{}"))
            feature = content["info"]["features"][column]
            names = feature.get("feature", feature)["names"]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return ()
        is_valid = isinstance(names, list) and all(isinstance(name, str) for name in names)
        return tuple(names) if is_valid and len(set(names)) == len(names) else ()
