"""Images in archives, shards, parquet files and other data sets: written once, into the folder of the run."""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distribuuuu.commands.finetune.finetune import ARCHIVES, PARQUET
from distribuuuu.commands.scan.data_config import open_images, read_data_cfg
from distribuuuu.commands.scan.scan import open_item
from distribuuuu.commands.scan.splitting import open_source
from distribuuuu.config import ConfigError, get_cfg
from distribuuuu.config.errors import DataError
from distribuuuu.data.datasets.archive import Archive, ArchiveSource, open_archives
from distribuuuu.data.datasets.base import ImageDataset, is_file
from distribuuuu.data.datasets.table_file import csv_line
from distribuuuu.data.decode import build_decode_options
from distribuuuu.files.atomic_file import new_folder
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.image_files import SPLIT_NAMES, find_tables, holds_images, is_image
from distribuuuu.hints.sources import find_inner_root, split_of_archive


def unpack(source: Path, out: Path, words: Sequence[str] = ()) -> Path:
    """Return the folder with the images of a source: itself, or below `out` the one that they are written into.

    A source is an archive, a shard or a parquet file, or a folder of these; else it is returned. Images whose classes
    are no folders are listed in a table for each split. `words` name the columns of parquet files, or the DATA.NAME of
    another data set in the folder, and its options. Of a pack and of such a set, the images of two splits are written.

    Raises:
        ConfigError: a file is damaged, or its images have no classes.
    """
    named = _open_named(source, words)
    files = () if named else _find_files(source)
    if not (files or named):
        return source
    stamps = repr(([*words], [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files],
                   *(images.digest for images in named.values())))  # fmt: skip
    target = out / f"images_{hashlib.sha256(stamps.encode(errors='surrogateescape')).hexdigest()[:8]}"
    if not target.exists():
        with new_folder(target) as part:
            tables = defaultdict[str, list[tuple[str, str]]](list)
            for split, images in named.items():
                _write_images(images, part, split, tables[split])
            for path in files:
                (images, has_classes), inner = _open(path, words), path.relative_to(source)
                splits = [word for word in re.split(r"[-._/]", str(inner)) if word.lower() in SPLIT_NAMES]
                split = splits[-1] if splits else "images"
                own = split_of_archive(path.name)  # which may be a folder in it, too
                names = ("",) if has_classes else map(images.index.name, range(len(images)))
                is_in_own = all(name.startswith(f"{own}/") for name in names)
                top = part if has_classes or not inner.name else part / inner.parent / ("" if is_in_own else own)
                _write_images(images, top, split, tables[split] if has_classes else None)
            for split, rows in tables.items():
                lines = map(csv_line, [("path", "label"), *rows])
                (part / f"{split}.csv").write_text("".join(lines), encoding="utf-8")
    return find_inner_root(target) or target


def _find_files(source: Path) -> list[Path]:
    """Return the source itself, or the files of a folder without images and tables, as far as they hold images."""
    names = () if holds_images(source, depth=4) or find_tables(source) else ("", "data", *SPLIT_NAMES)
    # Without those that macOS writes beside the files.
    found = [source] if source.is_file() else [path for name in names for path in sorted((source / name).glob("[!.]*"))]
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


def _open_named(source: Path, words: Sequence[str]) -> dict[str, ImageDataset]:
    """Return the training and the evaluation images of a pack, or of the DATA.NAME in the words; {} of others."""
    pack = ("DATA.NAME", "packed") if any(source.glob("*/index.bin")) else ()
    if not pack and "DATA.NAME" not in words[::2]:
        return {}
    cfg, problems = read_data_cfg(None, [*pack, *words, "TRAIN.DATASET", str(source), "TEST.DATASET", str(source)])
    if problems:
        raise ConfigError(problems)
    named = {split: open_images(cfg, train=split == "train") for split in ("train", "test")}
    if named["train"].targets != "label":
        raise ConfigError(f"DATA.NAME: got {cfg.DATA.NAME}, whose images have several labels; expected one class each")
    return named


def _write_images(images: Any, top: Path, split: str, rows: list[tuple[str, str]] | None = None) -> None:
    """Write images below `top`, under their names; or numbered, with (path, class) of each appended to `rows`."""
    for number in range(len(images)):
        try:
            data = images.read(number)
        except DataError:
            raise
        except ValueError:  # a damaged member: the check of the images names it
            data = b""
        if rows is None:
            name = images.index.name(number)
        else:
            name = os.path.basename(images.describe(number).partition(" (image ")[0])[-50:]
            name = f"images/{split}_{len(rows):06}_{name.encode(errors='replace').decode()}"
            name += "" if is_image(name) and is_file(data) else ".jpg" if is_file(data) else ".png"
            rows.append((name, images.classes[images.label(number)]))
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        if is_file(data):
            (top / name).write_bytes(data)
        else:
            open_item(data, build_decode_options(get_cfg())).save(top / name, "PNG")
