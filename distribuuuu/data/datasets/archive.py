"""Images in tar and ZIP archives and in webdataset shards, read without unpacking."""

import contextlib
import glob
import itertools
import os
import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import counted, first_few
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets import archive_members
from distribuuuu.data.datasets.archive_members import ArchiveError, ArchiveSource, Member, member_error, read_member
from distribuuuu.data.datasets.array_file import Content, find_stamp, pack_names, stamp_of
from distribuuuu.data.datasets.base import ImageDataset, image_extensions
from distribuuuu.data.datasets.index import Index, IndexedImages, open_index
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.image_files import JUNK_FILES, JUNK_FOLDERS, is_class, is_image, sort_splits
from distribuuuu.files.untrusted import open_regular

# Bytes of the largest image, of the largest file with a label, and the most classes that labels may be numbers of.
MAX_IMAGE, MAX_LABEL, MAX_CLASSES = 1 << 30, 1 << 20, 1 << 20
# From a path, its open file and the bytes of it to the members of an archive.
Walk = Callable[[str, IO[bytes], int], Iterator[Member]]
# Seconds until the progress bar of a scan appears.
BAR_DELAY_S = 1.0


@DATASETS.register("archive")
class Archive(IndexedImages):
    """The images of archives, in the order of a folder with the same files."""

    holds_files = True

    @classmethod
    def open_split(cls, cfg, name: str, trained: ImageDataset | None = None) -> ImageDataset:
        """Return the images of cfg.TRAIN or cfg.TEST."""
        section = cfg[name]
        source = find_archives(name, section.DATASET, section.SPLIT)._replace(extensions=image_extensions(cfg))
        index = open_archives(source, cache_folder(cfg.DATA.CACHE_DIR))
        known = trained.index if isinstance(trained, Archive) else None
        if known and section.SPLIT != cfg.TRAIN.SPLIT and index.meta["digest"] == known.meta["digest"]:
            fix = f"set it to the archives of the evaluation, or to one with a folder {section.SPLIT}"
            raise ConfigError(Problem("TEST.DATASET", f"{source} has the training images; fix: {fix}"))
        return cls(index, trained.classes if trained else None)

    def read(self, index: int) -> Any:
        """Return the bytes of the file of image `index`."""
        return read_member(self.index, self.place(index)) if self.index.is_archive else super().read(index)


def open_archives(source: ArchiveSource, cache: Path, walk: Walk = archive_members.walk_archive) -> Index:
    """Return the index of archives, see `open_index`; raises ArchiveError if one is missing or cannot be used."""
    root = os.path.dirname(source.paths[0])
    names = [os.path.relpath(path, root) for path in source.paths]
    scan = partial(scan_archives, source, names, walk)
    return open_index(str(source), root, f"{names} {source._replace(paths=())!r}", cache, scan)


def find_archives(name: str, dataset: str, split: str) -> ArchiveSource:
    """Return the archives of a DATASET and a SPLIT.

    These are a brace pattern; or an archive with a folder for each split; or, in a folder, the file SPLIT, SPLIT.tar,
    SPLIT.zip or SPLIT-*.tar, in upper or lower case; or the only archive of the folder, if it has none of these. If
    there is none, or there are several, a ConfigError is raised. `name` is TRAIN or TEST.
    """
    root, folder = Path(dataset), re.split(r"[-_.{]", os.path.basename(split))[0]
    if "{" in dataset and not root.exists():
        return ArchiveSource(_expand(f"{name}.DATASET", dataset), folder)
    if root.is_file():
        if not re.search(r"(?<!\.pth)\.tar$|\.zip$", root.name.lower()):
            from distribuuuu.hints.sources import describe_file

            raise ConfigError(Problem(f"{name}.DATASET", f"{root} is {describe_file(root)}"))
        return ArchiveSource((dataset,), split, is_inside=True)
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
    from distribuuuu.hints.sources import missing_file

    wanted = f"{split}.tar, {split}.zip or {split}-*.tar"
    raise ConfigError(Problem(*missing_file(name, root, wanted, is_archive=True)))


def _expand(key: str, pattern: str) -> tuple[str, ...]:
    """Return the paths of a brace pattern, 'train-{000..009}.tar' or '{a,b}.tar'; raise ConfigError if it is none."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices: list[list[str]] = []
    for number, part in enumerate(parts):
        if ends := re.fullmatch(r"(\d+)\.\.(\d+)", part) if number % 2 else None:
            choices.append([f"{value:0{len(ends[1])}}" for value in range(int(ends[1]), int(ends[2]) + 1)])
        else:
            choices.append(part.split(",") if number % 2 else [part])
    paths = tuple(map("".join, itertools.product(*choices)))
    if not paths or any("{" in part or "}" in part for part in parts[::2]):
        raise ConfigError(Problem(key, f"got {pattern}; expected the first and the last, e.g. train-{{000..009}}.tar"))
    if missing := [path for path in paths if not os.path.isfile(path)]:
        named = first_few([os.path.basename(path) for path in missing])
        raise ConfigError(Problem(key, f"{pattern}: no such files: {named}; fix: check the first and the last number"))
    return paths


# -------------------------------------------------------------------------------------------- content


def scan_archives(source: ArchiveSource, names: Sequence[str], walk: Walk = archive_members.walk_archive) -> Content:
    """Return the content of an index; each archive is read once, in the order of its bytes.

    Images in class folders are ordered by class, then path of the folder, then name, as those of a folder; those of
    shards by archive and place. Hidden files and files of operating systems are ignored. The names are the paths of the
    archives relative to the folder of the first.
    """
    from tqdm import tqdm

    found, done = _Found(source), 0
    stamps = [find_stamp(path) for path in source.paths]
    is_hidden = sys.stderr is None or not sys.stderr.isatty()
    with tqdm(total=sum(max(0, size) for size, *_ in stamps), desc=f"index of {source}", unit="B", unit_scale=True,
              leave=False, disable=is_hidden, delay=BAR_DELAY_S) as bar:  # fmt: skip
        for number, path in enumerate(source.paths):
            try:
                with open_regular(path) as file:
                    stamps[number] = stamp_of(os.fstat(file.fileno()))
                    for member in walk(path, file, stamps[number][0]):
                        found.add(number, member, file)
                        bar.update(done + member.offset - bar.n)
                    done += stamps[number][0]
            except OSError as error:
                raise ArchiveError(f"{path}: cannot be read: {error.strerror}") from error
    arrays, classes = found.to_arrays()
    arrays |= {**pack_names("files", [os.fsencode(name) for name in names]), "stamps": np.array(stamps, np.int64)}
    ignored = {"ignored": dict(found.ignored), "num_beside": found.num_beside}
    return {"classes": classes, "notes": [], **ignored}, arrays


class _Found:
    """The images and the labels that a scan has found."""

    def __init__(self, source: ArchiveSource):
        self.source, self.num_beside = source, 0
        self.ignored: Counter[str] = Counter()
        self._cleaned: dict[str, str | None] = {}
        self._names: list[str] = []
        self._columns = {"file": array("i"), "offset": array("q"), "size": array("I"), "packed": array("I"),
                         "crc32": array("I")}  # fmt: skip
        # The folder of each image; and the label of each (archive, name without its extensions), None: it has none.
        self._folders: list[str] = []
        self._labels: dict[tuple[int, str], int | str | None] = {}

    def add(self, number: int, member: Member, file: IO[bytes]) -> None:
        """Add a member of archive `number`, unless it is hidden; raise ArchiveError if it cannot be used."""
        path = self.source.paths[number]
        raw, _, name = member.name.rpartition("/")
        if raw not in self._cleaned or "\0" in member.name or member.name[:1] == "/":
            self._cleaned[raw] = _clean_folder(raw, member, path)
        folder = self._cleaned[raw]
        if folder is None or name[:1] == ".":
            return
        if is_image(name, self.source.extensions):
            if member.fault or max(member.size, member.packed) > MAX_IMAGE:
                too_large = f"has {member.size:,} bytes; expected at most {MAX_IMAGE:,}"
                raise member_error(path, member.name, member.fault or too_large)
            self._folders.append(folder)
            self._names.append(name)
            for column, value in zip(self._columns.values(), (number, *member[1:5]), strict=True):
                column.append(value)
        elif name.lower() not in JUNK_FILES:
            self.ignored[os.path.splitext(name)[1].lower()] += 1
            if name.endswith(".cls"):
                self._add_label((number, f"{folder}/{os.path.splitext(name)[0]}"), member, file)

    def _add_label(self, key: tuple[int, str], member: Member, file: IO[bytes]) -> None:
        label = None
        with contextlib.suppress(ValueError):  # an image without a label is an error, another file is not
            if not member.fault and max(member.size, member.packed) <= MAX_LABEL:
                data = os.pread(file.fileno(), member.packed or member.size, member.offset)
                label = _read_label(archive_members.inflate(data, member.size) if member.packed else data)
        self._labels[key] = label

    def to_arrays(self) -> tuple[dict[str, np.ndarray], list[str]]:
        """Return the arrays of the images and the classes; raise ArchiveError if there is no image, or no label."""
        is_shards = self.source.layout == "classes" and bool(self._labels)
        order, labels, classes = self._order_shards() if is_shards else self._order_folders()
        if not len(order):
            beside = f"; {counted(self.num_beside, 'image')} at the top have no class" if self.num_beside else ""
            expected = "expected CLASS/IMAGE, or IMAGE with its label in .cls"
            endings = first_few([f"{end} ({num})" for end, num in self.ignored.most_common()])
            held = f"; it holds {endings}" if endings else ""
            raise ArchiveError(f"{self.source}: has no images in class folders{beside}{held}; {expected}")
        columns = {name: np.array(column)[[*order]] for name, column in self._columns.items()}
        arrays = {**pack_names("names", [os.fsencode(self._name_of(image)) for image in order]), **columns}
        return {**arrays, "label": np.array(labels, np.int32)}, classes

    def _name_of(self, image: int) -> str:
        return f"{self._folders[image]}/{self._names[image]}".lstrip("/")

    def _error(self, image: int, problem: str) -> ArchiveError:
        return member_error(self.source.paths[self._columns["file"][image]], self._name_of(image), problem)

    def _order_folders(self) -> tuple[list[int], list[int], list[str]]:
        """Return the images in the order of a folder index, with their labels and the classes."""
        start, is_flat = self._find_start(), self.source.layout == "flat"
        inner = {folder: folder[len(start) :] for folder in set(self._folders) if f"{folder}/".startswith(start)}
        top_of = {folder: path.partition("/")[0] for folder, path in inner.items()}
        kept = {folder: top for folder, top in top_of.items() if is_flat or (top and is_class(top))}
        self.num_beside = 0 if is_flat else sum(top_of.get(folder) == "" for folder in self._folders)
        keys = [(kept.get(folder, ""), folder, name) for folder, name in zip(self._folders, self._names, strict=True)]
        order = sorted((image for image, key in enumerate(keys) if key[1] in kept), key=keys.__getitem__)
        for one, other in itertools.pairwise(order):
            if keys[one] == keys[other]:
                raise self._error(other, "has two members of this name; fix: pack the files again, each once")
        classes = sorted(set(kept.values()))
        if not (is_flat or self.source.is_inside) and len(classes) == len(sort_splits(classes)) > 1:
            path = self.source.paths[0]
            raise ArchiveError(f"{path}: has the splits {', '.join(classes)}, no classes; fix: set DATASET {path}")
        numbers = {name: number for number, name in enumerate(classes)}
        return order, [numbers[keys[image][0]] for image in order], classes

    def _find_start(self) -> str:
        """Return the folder that holds the class folders, with a slash, or nothing."""
        folders = set(self._folders)
        chosen, tops = self.source.folder, {folder.partition("/")[0] for folder in folders}
        if not self.source.is_inside and tops != {chosen}:
            return ""
        start = f"{chosen}/"
        if any(f"{folder}/".startswith(start) for folder in folders):
            return start
        from distribuuuu.hints.sources import explain_missing_folder

        raise ArchiveError(explain_missing_folder(Path(self.source.paths[0]), chosen, folders))

    def _order_shards(self) -> tuple[list[int], list[int], list[str]]:
        """Return the images in the order of the shards, with their labels and the classes; only the split, if any."""
        seen: set[tuple[int, str]] = set()
        found: list[int | str] = []
        start = f"{self.source.folder}/" if self.source.is_inside else ""
        order = [image for image, folder in enumerate(self._folders) if f"{folder}/".startswith(start)]
        order = order or [*range(len(self._folders))]
        for image in order:
            folder, name = self._folders[image], self._names[image]
            # A key is the name up to its first dot; names with dots of their own have labels up to the last.
            number = self._columns["file"][image]
            key = number, f"{folder}/{os.path.splitext(name)[0]}"
            key = key if key in self._labels else (number, f"{folder}/{name.partition('.')[0]}")
            if key in seen:
                raise self._error(image, "is a second image of its sample")
            if (label := self._labels.get(key)) is None:
                raise self._error(image, "has no label; expected a .cls with a class")
            seen.add(key)
            found.append(label)
        for ending in (".cls", ".json"):
            del self.ignored[ending]
        values = [label for label in found if isinstance(label, int)]
        if len(values) == len(found) and (highest := max(values, default=0)) < MAX_CLASSES:
            return order, values, [*map(str, range(highest + 1))]
        classes = sorted({*map(str, found)})
        numbers = {name: number for number, name in enumerate(classes)}
        return order, [numbers[str(label)] for label in found], classes


def _clean_folder(raw: str, member: Member, path: str) -> str | None:
    """Return a folder of an archive without empty parts; None: it is one of an operating system."""
    parts = [part for part in raw.split("/") if part not in ("", ".")]
    if member.name[:1] == "/" or ".." in parts or "\0" in member.name:
        raise member_error(path, member.name, "leads out of the archive; fix: pack it again with relative names")
    return None if any(part.lower() in JUNK_FOLDERS for part in parts) else "/".join(parts)


def _read_label(data: bytes) -> int | str | None:
    """Return the class in a .cls of a shard, a number or a name; None: it has none."""
    text = data.decode("utf-8").strip()
    if text.isdecimal() and len(text) < 10:
        return int(text)
    return text if 0 < len(text) < 300 and text.isprintable() else None
