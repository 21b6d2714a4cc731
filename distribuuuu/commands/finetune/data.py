"""Images of a fine-tuning: existing splits, or new ones; broken images and copies are left out by name."""

import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from distribuuuu.commands.scan import splitting
from distribuuuu.commands.scan.data_config import find_splits
from distribuuuu.commands.scan.duplicates import find_groups
from distribuuuu.commands.scan.scan import INTACT, scan_images
from distribuuuu.commands.scan.splitting import TRAIN, Images, assign, describe_copies, list_images, merge_groups
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted, first_few
from distribuuuu.data.datasets.table_file import sort_labels, without_fractions
from distribuuuu.data.decode import DEFAULTS, DecodeOptions
from distribuuuu.files import image_files
from distribuuuu.files.image_files import SPLIT_NAMES, TRAIN_NAMES, find_tables, holds_images, list_classes
from distribuuuu.inference.forward_chunks import UnlabeledImages

PARTS = (TRAIN, "val", "test")
# Share of the images of a new split, and the fewest images of a class that can be divided.
SHARE, MIN_IMAGES = 0.15, 5
_TEST_NAMES = ("eval", "test", "testing")


def list_sources(source: Path, words: Sequence[str]) -> tuple[Images, dict[str, list[int]]]:
    """Return the images of a folder or a table, and the indices of each split that it has; {} without splits.

    A folder has classes, splits with classes, tables with the names of splits, or one table. `words` name the columns
    of a table, of which one may tell the splits. The classes are in the order in which lists of the images are read.

    Raises:
        ConfigError: there are no images or fewer than two classes, or a split has other classes than the training.
    """
    if source.is_file():
        found, given = splitting.list_table_splits(source, words), source.parent
    else:
        given, names = source, find_splits(list_classes(source), source)
        every, num_folders = find_tables(source), sum(holds_images(source / name) for name in list_classes(source))
        tables = [name for name in every if Path(name).stem.lower() in SPLIT_NAMES]
        if names and (list_classes(source / names[0]) or not tables and len(every) != 1):
            found = {name: list_images(source / name) for name in names}
        elif tables:
            endings = [*image_files.TABLE_ENDINGS]  # of two tables of a split, the first of these counts
            tables.sort(key=lambda name: -endings.index(Path(name).suffix.lower()))
            chosen = {Path(name).stem: name for name in tables}
            found = {split: splitting.list_table_images(source / name, words) for split, name in chosen.items()}
        elif len(every) == 1 and (words or names or num_folders < 2):
            found = splitting.list_table_splits(source / every[0], words)
        else:
            found = {"": list_images(source)}
    images, parts = _merge(given, found)
    if parts and TRAIN not in parts:
        raise ConfigError(f"FOLDER: {source} has the splits {first_few(list(found))}, but none to train on")
    if len(images.classes) < 2:
        fix = "fix: name a folder with one sub-folder of images for each class, or a table of several classes"
        raise ConfigError(f"FOLDER: {source} has one class, {images.classes[0]}; expected two or more; {fix}")
    return images, parts


def _merge(folder: Path, found: dict[str, Images]) -> tuple[Images, dict[str, list[int]]]:
    """Return the images of all splits as one, and the indices of each part; with one other split, it is the test."""
    names, rows, parts = list[str](), list[list[str]](), dict[str, list[int]]()
    for split, own in found.items():
        low = split.lower()
        part = TRAIN if low in TRAIN_NAMES else "test" if low in _TEST_NAMES else "val"
        if split:
            parts.setdefault(part, []).extend(range(len(names), len(names) + len(own.names)))
        names += [name if os.path.isabs(name) else os.path.relpath(own.folder / name, folder) for name in own.names]
        rows += [[unicodedata.normalize("NFC", own.classes[label].rstrip())] for label in own.labels]
    without_fractions(rows)
    labels = [row[0] for row in rows]
    classes = tuple(sort_labels({labels[index] for index in parts.get(TRAIN, range(len(labels)))}))
    if unknown := sorted({*labels} - {*classes}):
        raise ConfigError(f"FOLDER: classes without a training image: {first_few(unknown)}; fix: remove or rename them")
    if "test" not in parts and "val" in parts:  # the last number has to be of images that nothing was chosen by
        parts["test"] = parts.pop("val")
    numbers = {name: number for number, name in enumerate(classes)}
    depth = max(own.depth + bool(own.depth and split) for split, own in found.items())
    return Images(folder, names, [numbers[label] for label in labels], classes, depth), parts


def hash_images(images: Images) -> str:
    """Return a hash of the names, classes and sizes of images."""
    digest = hashlib.blake2b(digest_size=16)
    for name, label in zip(images.names, images.labels, strict=True):
        size = os.stat(images.folder / name).st_size if os.path.exists(images.folder / name) else -1
        digest.update(repr((name, images.classes[label], size)).encode(errors="surrogateescape"))
    return digest.hexdigest()


def divide(
    images: Images, parts: dict[str, list[int]], pattern: str, seed: int, workers: int, progress: Callable[[int], Any],
    options: DecodeOptions = DEFAULTS,
) -> tuple[dict[str, list[int]], list[str], list[str], int]:  # fmt: skip
    """Return the indices of the parts, notes about the images, the broken ones, `path: cause`, and the median of
    the shorter sides of the training images, in pixels.

    Every image is decoded once. Of existing parts, the test is kept; what has a copy there, with one label or several,
    or is of one group of `pattern` (`find_named_groups`), is left out of the validation and of the training, and then
    likewise what the validation has of the training. Without a validation part, the training images are divided;
    without any part, all are. Copies and groups stay together.

    Raises:
        ConfigError: a class has too few images, or an image is intact, but cannot be read.
    """
    dataset = UnlabeledImages([images.folder / name for name in images.names])
    dataset.has_files = True
    scan = scan_images({"": dataset}, options, workers, progress)
    if intact := [index for index in scan.reasons if scan.records["flags"][index] & INTACT]:
        first = f"{images.names[intact[0]]}: {scan.reasons[intact[0]]}"
        raise ConfigError(f"FOLDER: cannot read {counted(len(intact), 'image')}, e.g. {first}")
    copies = find_groups(scan, options)
    named = splitting.find_named_groups(images, pattern) if pattern else []
    groups = merge_groups([*copies, *named])
    usable = [index for index in range(len(images.names)) if index not in scan.reasons]
    broken = [f"{images.names[index]}: {reason}" for index, reason in scan.reasons.items()]
    notes = [note.replace(", kept together" if parts else "", "") for note in describe_copies(images, copies, "copies")]
    filled = {name.partition("/")[0] for name in images.names}
    if empty := sorted({*list_classes(images.folder)} - filled) if images.depth == 1 and not parts else ():
        notes.append(f"folders without an image are no classes: {first_few(empty)}")
    if named:
        notes.append(f"--group-by: {len({*chain(*named)})} of the images match, in {counted(len(named), 'group')}")
    if parts:
        parts = {part: [index for index in own if index not in scan.reasons] for part, own in parts.items()}
        notes += _leave_out_leaks(parts, groups, "a copy or one of the same group" if pattern else "a copy")
    if not parts.get("val"):
        own, test = parts.get(TRAIN, usable), parts.get("test")
        shares = {TRAIN: 1 - SHARE, "val": SHARE} if test else {TRAIN: 1 - 2 * SHARE, "val": SHARE, "test": SHARE}
        _check_counts(images, own, MIN_IMAGES, "usable images, to divide them", [*broken, *notes])
        part_of = assign(images, own, shares, groups, seed, in_all=True)
        divided = {part: [index for index in own if part_of[index] == part] for part in shares}
        parts = {**divided, **({"test": test} if test else {})}
        notes.append("divided by class")
    _check_counts(images, parts[TRAIN], 2, "usable training images", [*broken, *notes])
    if missing := [part for part in PARTS if not parts[part]]:
        fix = "fix: add images or splits, as copies and groups stay together"
        raise ConfigError(f"FOLDER: no image is left for {missing[0]}; {first_few([fix, *broken, *notes], '; ')}")
    side = int(np.median(np.minimum(scan.records["width"], scan.records["height"])[parts[TRAIN]]))
    return parts, notes, broken, side


def _leave_out_leaks(parts: dict[str, list[int]], groups: Sequence[Sequence[int]], what: str) -> Iterator[str]:
    """Remove images of a group that a later part has, too; yield a note for each part that loses some."""
    kept = set[int]()
    for part in (part for part in reversed(PARTS) if part in parts):
        if leaked := {index for group in groups if kept & {*group} for index in group} & {*parts[part]}:
            found = counted(len(leaked), "training image" if part == TRAIN else "validation image")
            yield f"{found} with {what} in another split: left out"
        parts[part] = [index for index in parts[part] if index not in leaked]
        kept |= {*parts[part]}


def _check_counts(images: Images, own: Sequence[int], fewest: int, kind: str, causes: Sequence[str]) -> None:
    """Raise ConfigError if a class has fewer images than needed, with what has left some out."""
    counts = Counter(images.labels[index] for index in own)
    if few := [f"{name} ({counts[label]})" for label, name in enumerate(images.classes) if counts[label] < fewest]:
        need = f"expected {fewest} or more {kind}; fix: add images or splits"
        raise ConfigError(f"FOLDER: classes with too few images: {first_few(few)}; {first_few([need, *causes], '; ')}")
