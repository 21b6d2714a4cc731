"""Stratified splits of a folder or a table of images into lists, which `DATA.NAME list` reads.

A split is a function of the seed and the names of the images. Images that must stay together form a group: equal
files, and files for whose names `--group-by` finds the same text. A group is never divided.
"""

import contextlib
import hashlib
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distribuuuu.commands.scan.data_config import find_splits, read_data_cfg
from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import counted, first_few
from distribuuuu.config.registry import dataset_class
from distribuuuu.data.datasets.table_file import csv_line, read_rows
from distribuuuu.files.atomic_file import replacing
from distribuuuu.files.image_files import list_classes, walk_images
from distribuuuu.files.untrusted import open_regular
from distribuuuu.hints.sources import describe_files, find_inner_root, missing_root

TRAIN, _FOLD = "train", "fold_"


@dataclass
class Images:
    """The images of a folder with one sub-folder per class, or of a table.

    Attributes:
        folder: the folder, of the images or of the table.
        names: paths relative to the folder, sorted, with "/" between the parts; those of a table may be absolute.
        labels: the class of each image, an index into `classes`.
        depth: the number of folders at the beginning of each name that are the split and the class; 0 in a table.
    """

    folder: Path
    names: list[str]
    labels: list[int]
    classes: tuple[str, ...]
    depth: int = 1


def open_source(words: Sequence[str], own: Mapping[str, object]) -> Any:
    """Return the training images of KEY VALUE pairs and further options; raise ConfigError if they cannot be used."""
    cfg, problems = read_data_cfg(None, [*words, *(str(word) for pair in own.items() for word in pair)])
    if problems:
        raise ConfigError(problems)
    try:
        return dataset_class(cfg).open_split(cfg, "TRAIN")
    except ConfigError as error:
        raise ConfigError([Problem(one.key or "FOLDER", one.message) for one in error.problems]) from error


def list_table_images(table: Path, words: Sequence[str]) -> Images:
    """Return the images of a table, whose columns KEY VALUE pairs name; raise ConfigError if it is invalid."""
    found = open_source(words, {"DATA.NAME": "list", "TRAIN.DATASET": table.parent, "DATA.TABLE.file": table.name})
    names = (os.path.normpath(found.index.relative(index)) for index in range(len(found)))
    rows = sorted(zip(names, map(int, found.labels), strict=True))
    return Images(table.parent, [name for name, _ in rows], [label for _, label in rows], found.classes, 0)


def list_table_splits(table: Path, words: Sequence[str]) -> dict[str, Images]:
    """Return the images of a table by the values of its column DATA.TABLE.split; without one, all of them as ""."""
    cfg, _ = read_data_cfg(None, [*words, "DATA.NAME", "list", "DATA.TABLE.file", table.name])
    family = dataset_class(cfg)
    spec, values = family.build_spec(columns := family.read_columns(cfg), ""), list[str]()
    with contextlib.suppress(ConfigError, OSError):  # `list_table_images` reports it
        rows = read_rows(str(table), replace(spec, columns=(columns.split,), split=""), {}) if columns.split else ()
        values = sorted({value for *_, (value,) in rows} - {""})
    found = {value: list_table_images(table, [*words, "TRAIN.SPLIT", value]) for value in values}
    return found or {"": list_table_images(table, words)}


def list_images(folder: Path) -> Images:
    """Return the images of a folder; their classes are its sub-folders.

    A ConfigError is raised if there are no images, or names that a list cannot hold.
    """
    if not folder.is_dir():
        raise ConfigError(Problem(*missing_root("FOLDER", folder, "CLASS/IMAGE")))
    classes = list_classes(folder)
    if splits := find_splits(classes, folder):
        fix = f"fix: train with TRAIN.DATASET {folder}, or split {folder / splits[0]}"
        raise ConfigError(f"FOLDER: got {folder}, which has splits already: {first_few(splits)}; {fix}")
    if inner := find_inner_root(folder):
        raise ConfigError(f"FOLDER: got {folder}, which has one class folder; fix: use {inner}")
    found = sorted(
        (f"{name}/{os.path.relpath(path, os.path.realpath(folder / name))}", label)
        for label, name in enumerate(classes)
        for path in walk_images(folder / name)
    )
    names = [name for name, _ in found]
    if not names:
        hint = describe_files(folder) or "; fix: move the images into a folder for each class"
        raise ConfigError(f"FOLDER: {folder} has no images in class folders; expected CLASS/IMAGE{hint}")
    if bad := [ascii(name) for name in names if name.encode(errors="replace").decode() != name]:
        raise ConfigError(f"{folder}: has names that a CSV in UTF-8 cannot hold: {first_few(bad)}; fix: rename them")
    return Images(folder, names, [label for _, label in found], classes)


# ------------------------------------------------------------------------------------- groups


def find_duplicates(images: Images) -> list[list[int]]:
    """Return groups of two or more images with equal bytes; only files of equal sizes are read."""
    by_size: dict[int, list[int]] = defaultdict(list)
    for index, name in enumerate(images.names):
        by_size[os.path.getsize(images.folder / name)].append(index)
    by_content: dict[bytes, list[int]] = defaultdict(list)
    for indices in by_size.values():
        for index in indices if len(indices) > 1 else ():
            digest = hashlib.blake2b()
            with open_regular(images.folder / images.names[index]) as file:
                while chunk := file.read(2**20):
                    digest.update(chunk)
            by_content[digest.digest()].append(index)
    return [indices for indices in by_content.values() if len(indices) > 1]


def find_named_groups(images: Images, pattern: str) -> list[list[int]]:
    """Return groups of images by the first capture group of a pattern in their names, or without one by the match.

    The name is relative to the folder of the class, so a group may have images of several classes; of a table it is the
    path in the table. If the pattern matches none of these, the names of the files are searched.
    """
    names = [name.split("/", images.depth)[-1] for name in images.names]
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise ConfigError(f"--group-by: got {pattern!r}; expected a regular expression: {error}") from None
    for searched in (names, map(os.path.basename, names)):
        by_text: dict[str, list[int]] = defaultdict(list)
        for index, name in enumerate(searched):
            if (match := search(name)) and (text := match[match.re.groups > 0]) is not None:
                by_text[text].append(index)
        if by_text:
            return list(by_text.values())
    raise ConfigError(f"--group-by: {pattern!r} matches no name; the first is {names[0]!r}")


def merge_groups(groups: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return disjoint groups of two or more images, each ascending: groups that share an image are one."""
    group_of: dict[int, list[int]] = {}
    for group in groups:
        joined = sorted({*group, *(other for index in group for other in group_of.get(index, ()))})
        group_of |= dict.fromkeys(joined, joined)
    return [group for index, group in sorted(group_of.items()) if index == group[0] and len(group) > 1]


# --------------------------------------------------------------------------------- assignment


def assign(
    images: Images, own: Sequence[int], shares: Mapping[str, float], groups: Sequence[Sequence[int]], seed: int,
    in_all: bool = False,
) -> dict[int, str]:  # fmt: skip
    """Return the part of each of some images, `own`, by its index.

    The number of images of each class in each part is its share, rounded up or down, as far as the disjoint groups
    allow, which are not divided. Which images these are is decided by a hash of the seed and the name. With `in_all`,
    each class has an image in each part, as far as groups allow; else in the part "train".
    """
    labels, parts = images.labels, dict[int, str]()
    quotas = _class_quotas(Counter(labels[index] for index in own), shares, shares if in_all else [TRAIN])
    keys = {index: hashlib.blake2b(f"{seed}/{images.names[index]}".encode(), digest_size=8).digest() for index in own}
    inner = ([index for index in group if index in keys] for group in groups)
    kept = [group for group in inner if len(group) > 1]

    def fit(part: str, counts: Counter) -> tuple[int, float]:
        """Return the images of a group that still fit into a part, and its free places."""
        fitting = sum(min(count, max(0, quotas[label][part])) for label, count in counts.items())
        return fitting, sum(quotas[label][part] for label in counts) / max(shares[part], 1e-9)

    # The largest groups first: small ones and single images even out what they leave.
    for group in sorted(kept, key=lambda group: (-len(group), keys[group[0]], group[0])):
        counts = Counter(labels[index] for index in group)
        chosen = max(shares, key=lambda part: fit(part, counts))
        for index in group:
            parts[index] = chosen
            quotas[labels[index]][chosen] -= 1
    for index in sorted(own, key=keys.__getitem__):  # stable: equal hashes are in the order of the names
        if index not in parts:
            quota = quotas[labels[index]]
            # A group may have taken more than the places of its part: then the last parts get fewer images.
            parts[index] = chosen = next(part for part in shares if quota[part] > 0)
            quota[chosen] -= 1
    return parts


def _class_quotas(
    counts: Mapping[int, int], shares: Mapping[str, float], filled: Iterable[str]
) -> dict[int, dict[str, int]]:
    """Return the number of images of each class for each part, by the largest remainders.

    What is rounded off is carried over to the next class, so that the sums over the classes fit too. A class has at
    least one image in the parts `filled`.
    """
    carried, quotas = dict.fromkeys(shares, 0.0), {}
    for label in sorted(counts):
        exact = {part: share * counts[label] for part, share in shares.items()}
        quota = {part: math.floor(value + 1e-9) for part, value in exact.items()}
        remainders = {part: exact[part] + carried[part] - quota[part] for part in shares}
        for part in sorted(shares, key=lambda part: -remainders[part])[: counts[label] - sum(quota.values())]:
            quota[part] += 1
        for part in filled:
            if not quota.get(part, 1):
                quota[max(quota, key=quota.__getitem__)] -= 1
                quota[part] = 1
        carried = {part: carried[part] + (exact[part] - quota[part]) for part in shares}
        quotas[label] = quota
    return quotas


def keep_classes_in_training(images: Images, parts: dict[int, str], groups: Sequence[Sequence[int]]) -> None:
    """Move images to the part "train", which no validation list contains, until each class is in every training list.

    With folds, a training list contains the other folds, so a class must be in two of them.
    """
    group_of, by_label = {index: group for group in groups for index in group}, defaultdict(list)
    for index, label in enumerate(images.labels):
        by_label[label].append(index)
    for _, own in sorted(by_label.items()):
        counts = Counter(parts[index] for index in own)
        folds = [part for part in counts if part.startswith(_FOLD)]
        if TRAIN in counts or len(folds) > 1:
            continue
        moved = folds[0] if folds else counts.most_common(1)[0][0]
        # All of a fold; otherwise one image, with its group.
        chosen = [index for index in own if parts[index] == moved]
        for index in chosen if folds else chosen[:1]:
            for other in group_of.get(index, [index]):
                parts[other] = TRAIN


# -------------------------------------------------------------------------------------- files


def plan_split(
    images: Images, val: float, test: float = 0.0, folds: int = 0, pattern: str = "", seed: int = 0
) -> tuple[dict[str, list[int]], list[str]]:
    """Return the lists of a split by their names, e.g. "train.csv" or "fold_1/val.csv", as indices; and notes to print.

    `val` and `test` are the shares of the validation and the test images, `folds` the number of folds of a
    cross-validation in place of `val`, and `pattern` the regular expression of `find_named_groups`.
    """
    duplicates = find_duplicates(images)
    groups = merge_groups([*duplicates, *(find_named_groups(images, pattern) if pattern else [])])
    names = [f"{_FOLD}{number}" for number in range(1, folds + 1)]
    shares = dict.fromkeys(names, (1 - test) / max(1, folds)) or {TRAIN: 1 - test - val, "val": val}
    shares |= {"test": test} if test else {}
    parts = assign(images, range(len(images.names)), shares, groups, seed)
    keep_classes_in_training(images, parts, groups)
    by_part: dict[str, list[int]] = defaultdict(list)
    for index in sorted(parts):
        by_part[parts[index]].append(index)
    files = {} if folds else {f"{part}.csv": by_part[part] for part in (TRAIN, "val")}
    for fold in names:
        others = [index for index in sorted(parts) if parts[index] not in (fold, "test")]
        files |= {f"{fold}/{TRAIN}.csv": others, f"{fold}/val.csv": by_part[fold]}
    if empty := [part for part in shares if part != TRAIN and not by_part[part]]:
        what = f"none of {counted(len(images.names), 'image')} is left for {empty[0]}"
        raise ConfigError(f"{what}; fix: other --val, --test, --folds or --group-by: equal files stay together")
    if test:
        files["test.csv"] = by_part["test"]
    return files, list(describe_copies(images, duplicates))


def describe_copies(images: Images, copies: Sequence[Sequence[int]], what: str = "equal files") -> Iterator[str]:
    """Yield notes about groups of copies, and a warning of those in several classes."""
    if copies:
        example = " = ".join(images.names[index] for index in copies[0][:2])
        num = sum(map(len, copies))
        yield f"{counted(num, 'image')} in {counted(len(copies), 'group')} of {what}, kept together: {example}"
    if mixed := [group for group in copies if len({images.labels[index] for index in group}) > 1]:
        named = first_few([" = ".join(images.names[index] for index in group[:2]) for group in mixed], "; ", 3)
        yield f"WARNING: {counted(len(mixed), 'group')} of {what} in several classes: {named}"


def write_split(images: Images, out: Path, files: Mapping[str, Sequence[int]]) -> None:
    """Write the lists of `plan_split` into a folder, which may have some of them.

    Raises:
        ConfigError: another list has the name of one of them, or one cannot be written.
    """
    lists = {out / name: _format_list(images, out / name, files[name]) for name in files}
    try:
        for path in filter(os.path.lexists, lists):
            with open_regular(path) as file:
                if file.read(len(lists[path]) + 1) != lists[path]:
                    raise ConfigError(f"--out: {path} exists already and is another list; fix: use another folder")
        for path, content in lists.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(content)
    except OSError as error:
        raise ConfigError(f"--out: {error.filename or out} cannot be written: {error.strerror}") from error


def _format_list(images: Images, path: Path, indices: Sequence[int]) -> bytes:
    """Return a list; its paths are relative if it is in or beside the folder of the images, else absolute."""
    folder = os.path.realpath(images.folder)
    prefix = os.path.relpath(folder, os.path.realpath(path.parent))
    prefix = folder if prefix.count("..") > 1 else prefix
    prefix = "" if prefix == "." else prefix.replace(os.sep, "/") + "/"
    lines = [csv_line(("path", "label"))]
    for index in indices:
        name = images.names[index]
        lines.append(csv_line((name if os.path.isabs(name) else prefix + name, images.classes[images.labels[index]])))
    return "".join(lines).encode()
