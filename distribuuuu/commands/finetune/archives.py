"""Archives of images: unpacked once, into the folder of the run."""

import hashlib
from pathlib import Path

from distribuuuu.commands.finetune.finetune import ENDINGS
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import DataError
from distribuuuu.data.datasets.archive import Archive, ArchiveSource, open_archives
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.image_files import find_tables, is_class, list_classes
from distribuuuu.files.new_folder import new_folder
from distribuuuu.hints.sources import find_inner_root, split_of_archive


def unpack(source: Path, out: Path) -> Path:
    """Return the folder with the images of a source: itself, or below `out` the one that archives are unpacked into.

    A source is an archive, or a folder with an archive for each split or class, or with shards; else it is returned.

    Raises:
        ConfigError: an archive is damaged, or has labels that cannot be the names of folders.
    """
    if not (files := _find_archives(source)):
        return source
    stamps = repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])
    target = out / f"images_{hashlib.sha256(stamps.encode(errors='surrogateescape')).hexdigest()[:8]}"
    if not target.exists():
        with new_folder(target) as part:
            for path in files:
                _unpack_one(path, part if path == source else part / split_of_archive(path.name))
    return find_inner_root(target) or target


def check_archives(source: Path) -> bool:
    """Tell whether a source has archives, before any is unpacked; raise ConfigError if one is damaged."""
    files = _find_archives(source)
    for path in files:
        open_archives(ArchiveSource((str(path),), layout="flat"), cache_folder())
    return bool(files)


def _find_archives(source: Path) -> list[Path]:
    if source.is_dir() and not (list_classes(source) or find_tables(source)):
        return sorted(filter(_is_archive, source.iterdir()))
    return [source] if source.is_file() and _is_archive(source) else []


def _is_archive(path: Path) -> bool:
    return path.name.lower().endswith(ENDINGS)


def _unpack_one(path: Path, target: Path) -> None:
    """Write the images of an archive under their names; those of shards, which have labels, under their classes."""
    index = open_archives(ArchiveSource((str(path),), layout="flat"), cache_folder())
    has_labels = ".cls" in index.meta["ignored"]  # of webdataset shards
    images = Archive(open_archives(ArchiveSource((str(path),)), cache_folder()) if has_labels else index)
    for number in range(len(images)):
        name = images.index.name(number)
        label = images.classes[images.label(number)] if has_labels else ""
        if not is_class(label or "class") or "/" in label:
            raise ConfigError(f"FOLDER: {path}: got the class {label!r}; expected the name of a folder; fix: rename it")
        if label and not name.startswith(f"{label}/"):
            name = f"{label}/{path.stem}_{name.replace('/', '_')}"
        try:
            data = images.read(number)
        except DataError:
            raise
        except ValueError:  # a damaged member: the check of the images names it
            data = b""
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(data)
