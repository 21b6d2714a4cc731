"""Archives of images: unpacked once, into the folder of the run."""

import hashlib
from pathlib import Path

from distribuuuu.commands.finetune.finetune import ENDINGS
from distribuuuu.config.errors import DataError
from distribuuuu.data.datasets.archive import Archive, ArchiveSource, open_archives
from distribuuuu.files.atomic_file import new_folder
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.image_files import find_tables, list_classes
from distribuuuu.hints.sources import find_inner_root, split_of_archive


def unpack(source: Path, out: Path) -> Path:
    """Return the folder with the images of a source: itself, or below `out` the one that archives are unpacked into.

    A source is an archive, or a folder with an archive for each split or class; else it is returned.

    Raises:
        ConfigError: an archive is damaged.
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
    """Write the images of an archive under their names."""
    images = Archive(open_archives(ArchiveSource((str(path),), layout="flat"), cache_folder()))
    for number in range(len(images)):
        try:
            data = images.read(number)
        except DataError:
            raise
        except ValueError:  # a damaged member: the check of the images names it
            data = b""
        file = target / images.index.name(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
