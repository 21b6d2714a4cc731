"""Stratified splits of a folder or a table of images into lists, which `DATA.NAME list` reads.

A split is a function of the seed and the names of the images. Images that must stay together form a group: equal
files, and files for whose names `--group-by` finds the same text. A group is never divided.
"""

import errno
import hashlib
import math
import os
import re
import shlex
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distribuuuu.commands.scan.data_config import find_splits, read_data_cfg
from distribuuuu.commands.scan.disjoint_sets import DisjointSets
from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import counted, first_few
from distribuuuu.data.datasets.image_list import ImageList
from distribuuuu.data.datasets.table_file import csv_line
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.image_files import find_tables, list_classes, walk_images
from distribuuuu.files.new_folder import new_folder
from distribuuuu.files.untrusted import open_regular
from distribuuuu.hints.sources import (
    describe_archives,
    describe_arrays,
    describe_file,
    describe_table,
    find_inner_root,
    missing_root,
)

TRAIN, _FOLD = "train", "fold_"
_CHUNK = 2**20


@dataclass
class Images:
    """The images of a folder with one sub-folder per class, or of a table.

    Attributes:
        folder: the folder, of the images or of the table.
        names: paths relative to the folder, sorted, with "/" between the parts; those of a table may be absolute.
        labels: the class of each image, an index into `classes`.
        classes: the sorted names of the classes.
        in_class_folders: whether the names begin with the class.
    """

    folder: Path
    names: list[str]
    labels: list[int]
    classes: tuple[str, ...]
    in_class_folders: bool = True


def list_table_images(table: Path, words: Sequence[str]) -> Images:
    """Return the images of a table.

    Args:
        table: the file.
        words: KEY VALUE pairs, e.g. DATA.TABLE.label breed.

    Raises:
        ConfigError: an option, the table or an image in it is invalid.
    """
    own = ["DATA.NAME", "list", "TRAIN.DATASET", str(table.parent), "DATA.TABLE.file", table.name]
    cfg, problems = read_data_cfg(None, [*words, *own])
    if problems := problems or [Problem(*found) for found in ImageList.find_problems(cfg, train=True)
                                if found[0] != "MODEL.NUM_CLASSES"]:  # fmt: skip
        raise ConfigError(problems)
    found: Any = ImageList.open_split(cfg, "TRAIN")
    names = (os.path.normpath(found.index.relative(index)) for index in range(len(found)))
    rows = sorted(zip(names, map(int, found.labels), strict=True))
    return Images(table.parent, [name for name, _ in rows], [label for _, label in rows], found.classes, False)


def list_class_images(folder: Path) -> Images:
    """Return the images of a folder.

    Raises:
        ConfigError: there are no images, no classes to tell apart, or names that a list cannot hold.
    """
    if list_classes(folder) and (hint := describe_table(folder)):
        command = f"distribuuuu split {shlex.quote(str(folder / find_tables(folder)[0]))}"
        raise ConfigError(f"FOLDER: {folder} has no class folders; expected CLASS/IMAGE{hint}; or split it: {command}")
    if table := _find_table(folder):
        fix = "add a column with the split of each row, and set DATA.TABLE.split to its name"
        fix = f"use {table}" if table.suffix != ".parquet" else f"use {table} if it has paths of images, or {fix}"
        raise ConfigError(f"FOLDER: {table} is a table; expected a folder CLASS/IMAGE; fix: {fix}")
    if folder.is_file() and " archive; " in (text := describe_file(folder)):
        unpack = text.rpartition("; or ")[2]
        raise ConfigError(f"FOLDER: {folder} is an archive; a list cannot name its images; fix: {unpack}")
    if not folder.is_dir():
        raise ConfigError(": ".join(missing_root("FOLDER", folder, "CLASS/IMAGE")))
    classes, found = list_classes(folder), []
    if splits := find_splits(classes, folder):
        fix = f"fix: train with TRAIN.DATASET {folder}, or split {folder / splits[0]}"
        raise ConfigError(f"FOLDER: got {folder}, which has splits already: {first_few(splits)}; {fix}")
    if inner := find_inner_root(folder):
        held = first_few(list_classes(inner))
        raise ConfigError(f"FOLDER: got {folder}, whose only class folder holds {held}; fix: use {inner}")
    for label, name in enumerate(classes):
        real = os.path.realpath(folder / name)
        found += [(f"{name}/{os.path.relpath(path, real)}", label) for path in walk_images(folder / name)]
    if not found:
        hint = describe_archives(folder) or describe_arrays(folder)
        raise ConfigError(f"{folder}: has no images in class folders; expected CLASS/IMAGE{hint}")
    found.sort()
    names = [name.replace(os.sep, "/") for name, _ in found]
    if unsuitable := [name for name in names if not _fits_in_list(name)]:
        named = first_few([ascii(name) for name in unsuitable])
        raise ConfigError(f"{folder}: has names that a CSV in UTF-8 cannot hold: {named}; fix: rename them")
    return Images(folder, names, [label for _, label in found], classes)


def list_named_images(folder: Path, pattern: str) -> Images:
    """Return the images below a folder, whose classes a regular expression finds in the names of their files.

    Raises:
        ConfigError: there are no images, or a name without a class.
    """
    if not folder.is_dir():
        raise ConfigError(": ".join(missing_root("FOLDER", folder, "images")))
    paths = sorted(os.path.relpath(path, os.path.realpath(folder)) for path in walk_images(folder))
    if not paths:
        raise ConfigError(f"FOLDER: {folder}: holds no image")
    labels = match_names("--label-by", pattern, [os.path.basename(path) for path in paths])
    if missing := [path for path, label in zip(paths, labels, strict=True) if not label]:
        raise ConfigError(f"--label-by: {pattern!r} finds no class in {counted(len(missing), 'name')}: "
                          f"{first_few(missing)}")  # fmt: skip
    classes = tuple(sorted({str(label) for label in labels}))
    numbers = {name: number for number, name in enumerate(classes)}
    return Images(folder, [path.replace(os.sep, "/") for path in paths], [numbers[str(label)] for label in labels],
                  classes, False)  # fmt: skip


def _find_table(folder: Path) -> Path | None:
    """Return the first table in a folder without class folders of images; None: there is none."""
    tables = [folder / name for name in find_tables(folder)] or sorted(folder.glob("*/*.parquet"))
    is_listed = not tables or any(True for name in list_classes(folder) for _ in walk_images(folder / name))
    return None if is_listed else tables[0]


def _fits_in_list(name: str) -> bool:
    """Return whether a name is UTF-8, and is below the folder."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return not name.startswith("../")


# ------------------------------------------------------------------------------------- groups


def find_duplicates(images: Images) -> list[list[int]]:
    """Return groups of two or more images with equal bytes; only files of equal sizes are read."""
    by_size: dict[int, list[int]] = defaultdict(list)
    for index, name in enumerate(images.names):
        status = os.stat(images.folder / name)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(images.folder / name))
        by_size[status.st_size].append(index)
    by_content: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for size, indices in by_size.items():
        for index in indices if len(indices) > 1 else ():
            by_content[size, _hash_file(images.folder / images.names[index])].append(index)
    return [indices for indices in by_content.values() if len(indices) > 1]


def _hash_file(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.digest()


def find_named_groups(images: Images, pattern: str) -> list[list[int]]:
    """Return groups of two or more images for whose names a regular expression finds the same text, see `match_names`.

    The name is relative to the folder of the class, so a group may have images of several classes; of a table it is the
    path in the table.
    """
    names = [name.partition("/")[2] if images.in_class_folders else name for name in images.names]
    by_text: dict[str, list[int]] = defaultdict(list)
    for index, text in enumerate(match_names("--group-by", pattern, names)):
        if text is not None:
            by_text[text].append(index)
    return [indices for indices in by_text.values() if len(indices) > 1]


def match_names(flag: str, pattern: str, names: Sequence[str]) -> list[str | None]:
    """Return the first capture group of a regular expression in each name, or without groups the whole match.

    Raises:
        ConfigError: the expression is invalid, or matches no name.
    """
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise ConfigError(f"{flag}: got {pattern!r}; expected a regular expression: {error}") from None
    found = [(match[1] if match.re.groups else match[0]) if (match := search(name)) else None for name in names]
    if not any(text is not None for text in found):
        raise ConfigError(f"{flag}: {pattern!r} matches no name; the first is {names[0]!r}")
    return found


def merge_groups(groups: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return disjoint groups, each ascending: groups that share an image are one."""
    sets = DisjointSets()
    for group in groups:
        for index in group[1:]:
            sets.join(group[0], index)
    return sets.groups()


# --------------------------------------------------------------------------------- assignment


def assign(images: Images, shares: Mapping[str, float], groups: Sequence[Sequence[int]], seed: int) -> list[str]:
    """Return the part of each image.

    The number of images of each class in each part is its share, rounded up or down, as far as groups allow. Which
    images these are is decided by a hash of the seed and the name.

    Args:
        images: the images.
        shares: the share of each part; they add up to 1.
        groups: disjoint groups of images that must be in the same part.
        seed: another seed gives another split.
    """
    quotas = _class_quotas(Counter(images.labels), shares)
    start = hashlib.blake2b(f"{seed}/".encode(), digest_size=8)
    keys = [_extend_hash(start, name) for name in images.names]
    parts: list[str] = [""] * len(images.names)
    # The largest groups first: small ones and single images even out what they leave.
    for group in sorted(groups, key=lambda group: (-len(group), keys[group[0]], group[0])):
        counts = Counter(images.labels[index] for index in group)
        part = max(shares, key=lambda name: _fit(name, counts, quotas, shares))
        for index in group:
            parts[index] = part
        for label, count in counts.items():
            quotas[label][part] -= count
    singles: dict[int, list[int]] = defaultdict(list)
    labels = images.labels
    for index in sorted(range(len(parts)), key=keys.__getitem__):  # stable: equal hashes are in the order of the names
        if not parts[index]:
            singles[labels[index]].append(index)
    for label, indices in singles.items():
        _fill(parts, indices, quotas[label])
    return parts


def _extend_hash(start: "hashlib.blake2b", text: str) -> bytes:
    digest = start.copy()
    digest.update(text.encode())
    return digest.digest()


def keep_classes_in_training(images: Images, parts: list[str], groups: Sequence[Sequence[int]]) -> None:
    """Move images to the part "train", which no validation list contains, until each class is in every training list.

    With folds, a training list contains the other folds, so a class must be in two of them.
    """
    group_of = {index: group for group in groups for index in group}
    counts: dict[int, Counter] = defaultdict(Counter)
    for (label, part), count in Counter(zip(images.labels, parts, strict=True)).items():
        counts[label][part] = count
    for label, by_part in counts.items():
        folds = [part for part in by_part if part.startswith(_FOLD)]
        if TRAIN in by_part or len(folds) > 1:
            continue
        moved = folds[0] if folds else max(by_part, key=lambda part: by_part[part])
        # All of a fold; otherwise one image, with its group.
        indices = [index for index, own in enumerate(images.labels) if own == label]
        chosen = [index for index in indices if parts[index] == moved]
        for index in chosen if folds else chosen[:1]:
            for other in group_of.get(index, [index]):
                parts[other] = TRAIN


def _class_quotas(counts: Mapping[int, int], shares: Mapping[str, float]) -> dict[int, dict[str, int]]:
    """Return the number of images of each class for each part.

    Each is the exact share rounded up or down; what is rounded off is carried over to the next class, so that the sums
    over the classes fit too. A class has at least one image in the part "train", if there is one.
    """
    carried, quotas = dict.fromkeys(shares, 0.0), {}
    for label in sorted(counts):
        exact = {part: share * counts[label] for part, share in shares.items()}
        quota = {part: math.floor(value + 1e-9) for part, value in exact.items()}
        wanted = {part: exact[part] + carried[part] - quota[part] for part in shares}
        for part in sorted(shares, key=lambda part: -wanted[part])[: counts[label] - sum(quota.values())]:
            quota[part] += 1
        if not quota.get(TRAIN, 1):
            quota[max(quota, key=lambda part: quota[part])] -= 1
            quota[TRAIN] = 1
        for part in shares:
            carried[part] += exact[part] - quota[part]
        quotas[label] = quota
    return quotas


def _fit(part: str, counts: Counter, quotas: Mapping[int, Mapping[str, int]], shares: Mapping[str, float]) -> tuple:
    """Return how well a group fits into a part: the images that still fit, then the free places."""
    fitting = sum(min(count, max(0, quotas[label][part])) for label, count in counts.items())
    free = sum(quotas[label][part] for label in counts)
    return fitting, free / max(shares[part], 1e-9)


def _fill(parts: list[str], indices: Sequence[int], quota: dict[str, int]) -> None:
    """Assign single images of a class to the free places of each part."""
    waiting = iter(indices)
    free = {part: max(0, places) for part, places in quota.items()}
    while (surplus := sum(free.values()) - len(indices)) > 0:  # a group took more than its part's places
        largest = max(free, key=lambda part: free[part])
        free[largest] -= min(surplus, max(1, free[largest] // 2))
    for part, places in free.items():
        for _ in range(places):
            parts[next(waiting)] = part


# -------------------------------------------------------------------------------------- files


@dataclass
class SplitPlan:
    """A split and where it is written.

    Attributes:
        images: the images.
        out: the output folder.
        files: lists by path below `out`, e.g. "train.csv" or "fold_1/val.csv"; each names its images by index.
        groups: the groups that were kept together.
        notes: findings to print.
    """

    images: Images
    out: Path
    files: dict[str, list[int]]
    groups: list[list[int]]
    notes: list[str] = field(default_factory=list)


def plan_split(
    images: Images, out: Path, val: float, test: float = 0.0, folds: int = 0, pattern: str = "", seed: int = 0
) -> SplitPlan:
    """Return the split of some images.

    Args:
        images: of `list_class_images` or `list_table_images`.
        out: the output folder.
        val: share of the validation images; without effect with folds.
        test: share of the test images; 0: none.
        folds: number of folds for cross-validation; 0: one split.
        pattern: regular expression of `find_named_groups`; empty: none.
        seed: seed of the split.

    Raises:
        ConfigError: the images cannot be split.
    """
    duplicates = find_duplicates(images)
    named = find_named_groups(images, pattern) if pattern else []
    groups = merge_groups([*duplicates, *named])
    shares = {f"{_FOLD}{number}": (1 - test) / folds for number in range(1, folds + 1)}
    shares = shares or {TRAIN: 1 - test - val, "val": val}
    parts = assign(images, {**shares, **({"test": test} if test else {})}, groups, seed)
    keep_classes_in_training(images, parts, groups)
    plan = SplitPlan(images, out, _list_files(parts, folds), groups)
    plan.notes = [*_notes_on_duplicates(images, duplicates), *_notes_on_classes(plan)]
    return plan


def _list_files(parts: Sequence[str], folds: int) -> dict[str, list[int]]:
    """Return the images of each list."""
    by_part: dict[str, list[int]] = defaultdict(list)
    for index, part in enumerate(parts):
        by_part[part].append(index)
    if not folds:
        return {f"{part}.csv": by_part[part] for part in (TRAIN, "val", "test") if by_part[part]}
    files: dict[str, list[int]] = {}
    for number in range(1, folds + 1):
        fold = f"{_FOLD}{number}"
        others = [index for index, part in enumerate(parts) if part not in (fold, "test")]
        files |= {f"{fold}/{TRAIN}.csv": others, f"{fold}/val.csv": by_part[fold]}
    return {**files, "test.csv": by_part["test"]} if by_part["test"] else files


def _notes_on_duplicates(images: Images, duplicates: Sequence[Sequence[int]]) -> Iterator[str]:
    if duplicates:
        example = " = ".join(images.names[index] for index in duplicates[0][:2])
        num = sum(map(len, duplicates))
        yield f"{counted(num, 'image')} in {counted(len(duplicates), 'group')} of equal files, kept together: {example}"
    if mixed := [group for group in duplicates if len({images.labels[index] for index in group}) > 1]:
        named = first_few([" = ".join(images.names[index] for index in group[:2]) for group in mixed], "; ", 3)
        yield f"WARNING: {counted(len(mixed), 'group')} of equal files in several classes: {named}"


def _notes_on_classes(plan: SplitPlan) -> Iterator[str]:
    """Yield a note for the classes that a validation or test list lacks."""
    present = set(plan.images.labels)
    for name, indices in plan.files.items():
        missing = present - {plan.images.labels[index] for index in indices}
        if missing:
            classes = first_few([plan.images.classes[label] for label in sorted(missing)])
            yield f"{name} has no image of {counted(len(missing), 'class')}: {classes}"


def write_split(plan: SplitPlan) -> bool:
    """Write the lists, all or none of them if the folder is new; return False if all of them exist already.

    Of the lists in a folder that holds other files, those that a killed process has written are kept.

    Raises:
        ConfigError: another list has the name of one of them, or one cannot be written.
    """
    try:
        other, missing = [], []
        for name in plan.files:
            if not os.path.lexists(plan.out / name):
                missing.append(name)
            elif not _is_same(plan.out / name, _list_lines(plan, name)):
                other.append(str(plan.out / name))
        if other:
            what = f"{first_few(other)} exists already and is another list"
            raise ConfigError(f"--out: {what}; fix: remove it, or use another folder")
        if os.path.lexists(plan.out) and (not plan.out.is_dir() or os.listdir(plan.out)):
            _write_lists(plan, missing, plan.out)
        else:
            with new_folder(plan.out) as folder:
                _write_lists(plan, missing, folder)
    except OSError as error:
        raise ConfigError(f"--out: {error.filename or plan.out} cannot be written: {error.strerror}") from error
    return bool(missing)


def _write_lists(plan: SplitPlan, names: Sequence[str], folder: Path) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(folder / name) as file:
            file.writelines(_list_lines(plan, name))


def _is_same(path: Path, lines: Iterator[bytes]) -> bool:
    """Return whether a file has these lines and no others."""
    with open_regular(path) as file:
        return all(file.read(len(line)) == line for line in lines) and not file.read(1)


def _list_lines(plan: SplitPlan, name: str) -> Iterator[bytes]:
    """Yield the lines of a list."""
    images, folder = plan.images, _folder_in_list(plan.images.folder, (plan.out / name).parent)
    yield csv_line(("path", "label")).encode()
    for index in plan.files[name]:
        name = images.names[index]
        path = name if os.path.isabs(name) else f"{folder}{name}"
        yield csv_line((path, images.classes[images.labels[index]])).encode()


def _folder_in_list(folder: Path, list_folder: Path) -> str:
    """Return the prefix of the names in a list: relative if the list is in or beside the folder, else absolute."""
    image_folder, target = os.path.realpath(folder), os.path.realpath(list_folder)
    prefix = os.path.relpath(image_folder, target)
    if prefix.count("..") > 1:
        prefix = image_folder
    return "" if prefix == "." else prefix.replace(os.sep, "/") + "/"
