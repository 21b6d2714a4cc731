"""Images in parquet and Arrow files, as the Hugging Face Hub and its package `datasets` write them.

    train-00000-of-00001.parquet    image: {bytes, path} or bytes; label: int64 with class names, or text

Arrow files hold the bytes of images as they are: an index has their places, and a training reads them as those of an
archive. A parquet file is copied into an Arrow file in the cache once. See docs/large_data.md.
"""

import contextlib
import glob
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.config import ConfigError
from distribuuuu.config.errors import did_you_mean, first_few
from distribuuuu.config.registry import DATASETS
from distribuuuu.config.settings import setting
from distribuuuu.data.datasets.archive_members import read_member
from distribuuuu.data.datasets.array_file import Content, find_stamp, pack_names
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.datasets.image_list import TableFile, TableSet
from distribuuuu.data.datasets.index import open_index
from distribuuuu.data.datasets.table_file import sort_labels
from distribuuuu.data.datasets.targets import encode_labels
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.locks import take_turn
from distribuuuu.files.untrusted import parse_json, printable

# Where the files of a split are, in the order in which they are looked for; {} stands for the split. The last five are
# those of `save_to_disk` and of the cache of the package `datasets`; the very last one is a folder of one split.
_PATTERNS = ("{}.parquet", "{}-*.parquet", "{}/*.parquet", "data/{}.parquet", "data/{}-*.parquet", "data/{}/*.parquet",
             "*/{}.parquet", "*/{}-*.parquet", "*/{}/*.parquet", "{}.arrow", "{}/data-*.arrow", "*-{}.arrow",
             "*-{}-[0-9]*.arrow", "data-*-of-*.arrow")  # fmt: skip
# Bytes of the texts and entries in the metadata of a file, and of the largest row group, uncompressed.
_MAX_METADATA, _MAX_GROUP = 64 << 20, 4 << 30
# Seconds to wait for another process that copies the same file; its lock ends with it.
_LONGEST_COPY_S = 86_400.0


@dataclass
class ParquetColumns(TableFile):
    """The keys of DATA.TABLE; of `file`, the default are the names above."""

    image: str = setting("image", "column with the bytes of the image file, or with {bytes, path}")
    label: str = setting("label", "column of the class: a number or a name")


@DATASETS.register("parquet")
class ParquetSet(TableSet):
    """The images of parquet files with one class each."""

    Columns: type[Any] = ParquetColumns
    fault = "DATASET"

    @classmethod
    def open_split(cls, cfg, name: str, trained: ImageDataset | None = None) -> ImageDataset:
        """Return the images of cfg.TRAIN or cfg.TEST."""
        root, split, columns = cfg[name].DATASET, cfg[name].SPLIT, cls.read_columns(cfg)
        if name == "TEST" and columns.file and "{}" not in columns.file:
            fix = "fix: put {} for the split into DATA.TABLE.file"
            raise ConfigError(f"{columns.file} has the training images too; {fix}")
        cache = cache_folder(cfg.DATA.CACHE_DIR)
        paths = find_arrow_files(root, split, columns, cache)
        folder = os.path.commonpath([os.path.dirname(path) for path in paths])
        names = [os.path.relpath(path, folder) for path in paths]
        is_alone = not columns.file and re.fullmatch(r"data-\d+-of-\d+\.arrow", names[0])
        if name == "TEST" and is_alone and folder == os.path.abspath(root) == os.path.abspath(cfg.TRAIN.DATASET):
            fix = "fix: TEST.DATASET FOLDER, or save both splits by DatasetDict.save_to_disk"
            raise ConfigError(f"{root} has one split only, the training images; {fix}")
        scan = partial(scan_files, folder, names, columns)
        index = open_index(f"{root}, split {split}", folder, f"{names} {columns} by number", cache, scan)
        if name == "TRAIN" and (wrong := index.classes[index.meta["num_named"] :]):
            raise ConfigError(f"{root} has labels that are no classes: {first_few(wrong)}; fix: remove these rows")
        return cls(index, trained.classes if trained else None)

    def read(self, index: int) -> bytearray:
        """Return the bytes of an image file."""
        data = read_member(self.index, self.place(index))
        if not data:
            raise ValueError("has no bytes; a path in the file is not followed")
        return data


# ------------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Report an error of pyarrow or of a file system as a ConfigError that names the file."""
    try:
        yield
    except ConfigError:
        raise
    except ImportError as error:
        fix = "fix: pip install 'distribuuuu[parquet]'"
        raise ConfigError(f"DATA.NAME: {path} needs a package that is not installed: {error}; {fix}") from error
    except Exception as error:  # they raise nearly anything for a damaged file
        reason = printable(" ".join(str(error).split()))[:200]
        raise ConfigError(f"{path} cannot be read: {type(error).__name__}: {reason}") from error


def find_arrow_files(root: str, split: str, columns: ParquetColumns, cache: Path) -> list[str]:
    """Return the paths of the Arrow files of a split, or of the copies of its parquet files; ConfigError: none."""
    if "://" in root:
        fix = "fix: hf download OWNER/NAME --repo-type dataset --local-dir FOLDER"
        raise ConfigError(f"got {root}; expected a folder; {fix}")
    patterns = [columns.file] if columns.file else _PATTERNS
    base = glob.escape(os.path.abspath(root))
    names = (f"{base}/{pattern.replace('{}', glob.escape(split))}" for pattern in patterns)
    found = (sorted(filter(os.path.isfile, glob.glob(name, recursive=True))) for name in names)
    paths = next(filter(None, found), [])
    if not paths:
        every = (glob.glob(f"{glob.escape(root)}/{name}") for name in ("*.parquet", "data/*.parquet"))
        held = sorted({os.path.basename(path) for some in every for path in some})
        from distribuuuu.hints.sources import similar_option

        option = similar_option(split, dict.fromkeys(re.split("[-.]", name)[0] for name in held))
        fix = f"; fix: set {option or 'SPLIT to what such a name begins with'}"
        has = f"; it has {first_few(held)}{fix}" if held else ""
        raise ConfigError(f"{root} has no parquet or Arrow files of the split {split}{has}")
    if len({os.path.dirname(path) for path in paths}) > 1 and not columns.file:
        fix = f"fix: DATA.TABLE.file '{os.path.basename(os.path.dirname(paths[0]))}/{{}}*.parquet'"
        raise ConfigError(f"{root} has several configurations with the split {split}; {fix}")
    return [path if path.endswith(".arrow") else copy_parquet(path, columns, cache) for path in paths]


def copy_parquet(path: str, columns: ParquetColumns, cache: Path) -> str:
    """Return the path of the uncompressed Arrow file with the rows of a parquet file, which is written once.

    It is written again if the parquet file changes. The sizes of untrusted files are limited.
    """
    with _naming(path):
        import pyarrow.parquet
    from tqdm import tqdm

    own = hashlib.sha256(os.fsencode(os.path.dirname(path))).hexdigest()[:32]
    copy = cache / "arrow" / own / f"{os.path.splitext(os.path.basename(path))[0]}.arrow"
    with _naming(path), take_turn(copy, _LONGEST_COPY_S):
        stamp = find_stamp(path)
        with contextlib.suppress(OSError, pyarrow.ArrowInvalid), pyarrow.memory_map(str(copy)) as opened:
            if pyarrow.ipc.open_stream(opened).schema.metadata.get(b"source") == repr(stamp).encode():
                return str(copy)
        limits = {"thrift_string_size_limit": _MAX_METADATA, "thrift_container_size_limit": _MAX_METADATA >> 6}
        with pyarrow.parquet.ParquetFile(path, **limits) as file:
            check_columns(path, file.schema_arrow, columns)
            groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
            if any(group.total_byte_size > _MAX_GROUP for group in groups):
                raise ValueError(f"a row group of more than {_MAX_GROUP >> 30} GiB")
            if sum(group.num_rows for group in groups) > stamp[0]:  # each image has at least a byte
                raise ValueError("more rows than bytes")
            needed, free = sum(group.total_byte_size for group in groups), shutil.disk_usage(copy.parent).free
            if needed > free:
                fix = "fix: DATA.CACHE_DIR FOLDER, or distribuuuu pack on a machine with more space"
                raise ConfigError(f"{copy} needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; {fix}")
            metadata = {**(file.schema_arrow.metadata or {}), b"source": repr(stamp).encode()}
            schema = file.schema_arrow.with_metadata(metadata)
            text = f"{path} to {copy}, {needed / 1e9:.1f} GB"
            with replacing(copy) as target, pyarrow.ipc.new_stream(target, schema) as writer:
                for number in tqdm(range(len(groups)), desc=text, unit="group", leave=False, delay=1):
                    writer.write_table(file.read_row_group(number, use_threads=False).cast(schema))
    return str(copy)


def check_columns(path: str, schema: Any, columns: ParquetColumns) -> None:
    """Raise ConfigError if a file lacks a column, or if one has other values than images and single classes."""
    if missing := [name for name in (columns.image, columns.label) if name not in schema.names]:
        has = f"it has {', '.join(schema.names)}{did_you_mean(missing[0], schema.names)}"
        raise ConfigError(f"{path} has no column {', '.join(missing)}; {has}; fix: see DATA.TABLE")
    kind = str(schema.field(columns.image).type)
    if not re.fullmatch(r"(large_)?binary|struct<(.*, )?bytes: (large_)?binary(,.*)?>", kind):
        fix = "fix: DATA.TABLE.image COLUMN; save a table of paths as CSV, for DATA.NAME list"
        raise ConfigError(f"{path}: column {columns.image} has {kind}; expected bytes of images; {fix}")
    if (kind := schema.field(columns.label).type).num_fields:
        fix = "fix: DATA.TABLE.label COLUMN; for several classes save files and a CSV, for DATA.NAME multilabel"
        raise ConfigError(f"{path}: column {columns.label} has {kind}; expected one class per image; {fix}")


def find_images(column: Any, whole: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets in a file and the sizes of the images of a column, int64; those without bytes have the size 0.

    `whole` is the file, mapped into memory, which the column points into.
    """
    offsets, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for chunk in column.chunks:
        values = chunk.flatten()[chunk.type.get_field_index("bytes")] if chunk.type.num_fields else chunk
        _, ends, data = values.buffers()
        width = np.int64 if str(values.type) == "large_binary" else np.int32
        ends = np.frombuffer(ends, width, len(values) + 1, values.offset * np.dtype(width).itemsize).astype(np.int64)
        first = data.address - whole.address if data else 0
        if len(values) and not 0 <= first <= first + int(ends[-1]) <= whole.size:
            raise ValueError("it is compressed; expected an Arrow file as `datasets` writes it")
        offsets.append(first + ends[:-1])
        sizes.append(np.diff(ends) * values.is_valid().to_numpy(zero_copy_only=False))
    return np.concatenate(offsets), np.concatenate(sizes)


def class_names(metadata: Any, column: str) -> tuple[str, ...]:
    """Return the names of the classes in a column, which the package `datasets` stores; empty if there are none."""
    try:
        names = parse_json((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"][column]["names"]
    except (ValueError, LookupError, TypeError, AttributeError):
        return ()
    is_valid = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if is_valid and len(set(names)) == len(names) else ()


# ------------------------------------------------------------------------------------------ labels


def scan_files(folder: str, names: Sequence[str], columns: ParquetColumns) -> Content:
    """Return the content of the index of a split; images are not read.

    The names of the classes are those in the metadata; without them, the sorted labels, numbers by value.
    """
    paths = [os.path.join(folder, name) for name in names]
    stamps = [find_stamp(path) for path in paths]
    tables = [_read_table(path, columns) for path in paths]
    nums = [len(sizes) for *_, sizes in tables]
    values, own = [value for values, *_ in tables for value in values], tables[0][1]
    if not values:
        raise ConfigError(f"{paths[0]} has no images")
    named = own or sort_labels({_to_text(value) for value in {*values} - {None}})
    meta, arrays = encode_labels([[_to_text(value, own)] for value in values], named)
    arrays |= {
        **pack_names("files", [*map(os.fsencode, names)]),
        "stamps": np.array(stamps, np.int64),
        **pack_names("names", [b"row %d" % row for num in nums for row in range(1, 1 + num)]),
        "file": np.arange(len(tables), dtype=np.int32).repeat(nums),
        "offset": np.concatenate([offsets for *_, offsets, _ in tables]),
        "size": np.concatenate([sizes for *_, sizes in tables]),
        "packed": np.zeros(len(values), np.uint32),
        "crc32": np.zeros(len(values), np.uint32),
    }
    return {**meta, "num_named": len(named), "notes": [], "ignored": {}, "num_beside": 0}, arrays


def _read_table(path: str, columns: ParquetColumns) -> tuple[list[Any], tuple[str, ...], np.ndarray, np.ndarray]:
    """Return the labels in an Arrow file, the names of its classes, and the places of its images, see `find_images`."""
    with _naming(path):
        import pyarrow

        with pyarrow.memory_map(path) as file:
            whole = file.read_buffer()
            is_file = whole.slice(0, 6).to_pybytes() == b"ARROW1"
            table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(whole).read_all()
            check_columns(path, table.schema, columns)
            needed = table.select([columns.image, columns.label])
            needed.validate(full=True)
            own = class_names(table.schema.metadata, columns.label)
            return needed[columns.label].to_pylist(), own, *find_images(table[columns.image], whole)


def _to_text(value: Any, own: Sequence[str] = ()) -> str:
    """Return a label as text; a number is that of a name, if there are any."""
    value = int(value) if isinstance(value, bool) else value
    if value is None or (isinstance(value, int) and own):
        return own[value] if value is not None and 0 <= value < len(own) else f"number {value}"
    return str(value)
