"""Images in archives, webdataset shards and parquet files: written once, into the folder of the run."""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distribuuuu.commands.finetune.finetune import ARCHIVES, PARQUET
from distribuuuu.commands.scan.splitting import open_source
from distribuuuu.config.errors import DataError
from distribuuuu.data.datasets.archive import Archive, ArchiveSource, open_archives
from distribuuuu.data.datasets.table_file import csv_line
from distribuuuu.files.atomic_file import new_folder
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.image_files import SPLIT_NAMES, find_tables, holds_images, is_image
from distribuuuu.hints.sources import find_inner_root, split_of_archive


def unpack(source: Path, out: Path, words: Sequence[str] = ()) -> Path:
    """Return the folder with the images of a source: itself, or below `out` the one that they are written into.

    A source is an archive, a shard or a parquet file, or a folder of these; else it is returned. Images whose classes
    are no folders are listed in a table for each split. `words` name the columns of parquet files.

    Raises:
        ConfigError: a file is damaged, or its images have no classes.
    """
    if not (files := _find_files(source)):
        return source
    stamps = repr(([*words], [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]))
    target = out / f"images_{hashlib.sha256(stamps.encode(errors='surrogateescape')).hexdigest()[:8]}"
    if not target.exists():
        with new_folder(target) as part:
            tables = defaultdict[str, list[tuple[str, str]]](list)
            for path in files:
                _write_images(path, path.relative_to(source), part, words, tables)
            for split, rows in tables.items():
                lines = map(csv_line, [("path", "label"), *rows])
                (part / f"{split}.csv").write_text("".join(lines), encoding="utf-8")
    return find_inner_root(target) or target


def _find_files(source: Path) -> list[Path]:
    """Return the source itself, or the files of a folder without images and tables, as far as they hold images."""
    names = () if holds_images(source) or find_tables(source) else ("", "data", *SPLIT_NAMES)
    found = [source] if source.is_file() else [path for name in names for path in sorted((source / name).glob("*"))]
    return [path for path in found if path.name.lower().endswith(ARCHIVES + PARQUET) and path.is_file()]


def _open(path: Path, words: Sequence[str]) -> tuple[Any, bool]:
    """Return the images of a file, and whether it tells their classes; else its folders do."""
    if path.name.lower().endswith(PARQUET):
        own = {"DATA.NAME": "parquet", "TRAIN.DATASET": path.parent, "DATA.TABLE.file": path.name}
        return open_source(words, own), True
    source = ArchiveSource((str(path),), layout="flat")
    index = open_archives(source, cache_folder())
    if is_shard := ".cls" in index.meta["ignored"]:
        index = open_archives(source._replace(layout="classes"), cache_folder())
    return Archive(index), is_shard


def _write_images(path: Path, inner: Path, part: Path, words: Sequence[str], tables: Any) -> None:
    """Write the images of a file under their names; if it tells their classes, add (path, class) to their table.

    The table is that of the split in `inner`, the path below the source, e.g. data/train-00000-of-00001.parquet.
    """
    images, has_classes = _open(path, words)
    splits = [word for word in re.split(r"[-._/]", str(inner)) if word.lower() in SPLIT_NAMES]
    split, top = splits[-1] if splits else "images", part
    if inner.name and not has_classes:
        top = part / inner.with_name(split_of_archive(path.name))
    for number in range(len(images)):
        name = images.index.name(number)
        if has_classes:
            name = os.path.basename(name)[-50:].encode(errors="replace").decode()
            name = f"images/{split}_{len(tables[split]):06}_{name}{'' if is_image(name) else '.jpg'}"
            tables[split].append((name, images.classes[images.label(number)]))
        try:
            data = images.read(number)
        except DataError:
            raise
        except ValueError:  # a damaged member: the check of the images names it
            data = b""
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(data)
