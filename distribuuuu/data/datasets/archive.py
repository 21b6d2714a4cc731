"""Images in tar and ZIP archives and in webdataset shards, read without unpacking."""

import glob
import hashlib
import itertools
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import first_few
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.archive_index import scan_archives
from distribuuuu.data.datasets.archive_members import ArchiveSource, read_member
from distribuuuu.data.datasets.base import ImageDataset, image_extensions
from distribuuuu.data.datasets.index import Index, open_index
from distribuuuu.data.datasets.indexed import IndexedImages
from distribuuuu.files.cache_folder import cache_folder

# Archives of a brace pattern.
_MOST = 100_000


@DATASETS.register("archive")
class Archive(IndexedImages):
    """The images of archives, in the order of a folder with the same files."""

    holds_files = True

    @classmethod
    def open_split(cls, cfg, name: str, trained: ImageDataset | None = None) -> ImageDataset:
        """Return the images of cfg.TRAIN or cfg.TEST."""
        section = cfg[name]
        if name == "TEST" and "{" in section.DATASET and section.DATASET == cfg.TRAIN.DATASET:
            message = (
                f"got {section.DATASET}, the archives of the training images; fix: set it to those of the evaluation"
            )
            raise ConfigError(Problem("TEST.DATASET", message))
        source = find_archives(name, section.DATASET, section.SPLIT)._replace(extensions=image_extensions(cfg))
        index = open_archives(source, cache_folder(cfg.DATA.CACHE_DIR))
        return cls(index, trained.index if isinstance(trained, Archive) else None)

    def read(self, index: int) -> Any:
        """Return the bytes of the file of image `index`."""
        return read_member(self.index, self.place(index)) if self.index.is_archive else super().read(index)


def open_archives(source: ArchiveSource, cache: Path) -> Index:
    """Return the index of archives, see `open_index`; raises ArchiveError if one is missing or cannot be used."""
    root = os.path.dirname(source.paths[0])
    names = [os.path.relpath(path, root) for path in source.paths]
    words = "\0".join([*names, source.folder, str(source.is_inside), source.layout])
    name = f"archive-{hashlib.sha256(os.fsencode(words)).hexdigest()[:32]}"
    scan = partial(scan_archives, source, names)
    return open_index(str(source), root, name, cache, scan, source.extensions)


def find_archives(name: str, dataset: str, split: str) -> ArchiveSource:
    """Return the archives of a DATASET and a SPLIT.

    These are a brace pattern; or an archive with a folder for each split; or, in a folder, the file SPLIT, SPLIT.tar,
    SPLIT.zip or SPLIT-*.tar, in upper or lower case; or the only archive of the folder, if it has none of these.

    Args:
        name: TRAIN or TEST.
        dataset, split: of the section.

    Raises:
        ConfigError: there is none, or there are several.
    """
    root, folder = Path(dataset), re.split(r"[-_.{]", os.path.basename(split))[0]
    if "{" in dataset and not root.exists():
        return ArchiveSource(_expand(f"{name}.DATASET", dataset), folder)
    if root.is_file():
        if not re.search(r"(?<!\.pth)\.tar$|\.zip$", root.name.lower()):
            from distribuuuu.hints.sources import describe_file

            raise ConfigError(Problem(f"{name}.DATASET", f"{root} is {describe_file(root)}"))
        return ArchiveSource((dataset,), split, is_inside=True)
    if not root.is_dir():
        from distribuuuu.hints.sources import missing_root

        raise ConfigError(Problem(*missing_root(name, root, f"{split}.tar, {split}.zip or {split}-*.tar")))
    if "{" in split or (root / split).is_file():
        return ArchiveSource(_expand(f"{name}.SPLIT", str(root / split)), folder)
    ending = re.compile(rf"{re.escape(os.path.basename(split))}(-[^/]*\.tar|\.tar|\.zip)", re.IGNORECASE)
    parent, found = (root / split).parent, dict[str, list[str]]()
    for path in sorted(glob.glob(f"{glob.escape(str(parent))}/*")):
        if (match := ending.fullmatch(os.path.basename(path))) and os.path.isfile(path):
            kind = match[1].lower()
            found.setdefault("shards" if kind.startswith("-") else kind, []).append(path)
    if len(found) == 1:
        return ArchiveSource(tuple(*found.values()), folder)
    if found:
        named = first_few([os.path.basename(paths[0]) for paths in found.values()])
        raise ConfigError(Problem(f"{name}.SPLIT", f"{root} has {named} for {split}; fix: set {name}.SPLIT to one"))
    from distribuuuu.hints.sources import explain_archives

    raise ConfigError(Problem(*explain_archives(name, root, split)))


def _expand(key: str, pattern: str) -> tuple[str, ...]:
    """Return the paths of a brace pattern, 'train-{000..009}.tar' or '{a,b}.tar'; raise ConfigError if it is none."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices: list[list[str]] = []
    for number, part in enumerate(parts):
        if ends := re.fullmatch(r"(\d{1,12})\.\.(\d{1,12})", part) if number % 2 else None:
            first, last = int(ends[1]), int(ends[2])
            if not first <= last < first + _MOST:
                raise ConfigError(Problem(key, f"got {{{part}}}; expected first..last, at most {_MOST:,} archives"))
            choices.append([f"{value:0{len(ends[1])}}" for value in range(first, last + 1)])
        else:
            choices.append(part.split(",") if number % 2 else [part])
    paths = tuple("".join(words) for words in itertools.islice(itertools.product(*choices), _MOST + 1))
    if len(paths) > _MOST or any("{" in part or "}" in part for part in parts[::2]):
        expected = f"expected at most {_MOST:,} archives, e.g. train-{{000..009}}.tar"
        raise ConfigError(Problem(key, f"got {pattern}; {expected}"))
    if missing := [path for path in paths if not os.path.isfile(path)]:
        named = first_few([os.path.basename(path) for path in missing])
        raise ConfigError(Problem(key, f"{pattern}: no such files: {named}; fix: check the first and the last number"))
    return paths
