"""Folders and files that are not laid out as a data set: what they are, and the command or option that helps."""

import contextlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distribuuuu.config.errors import did_you_mean, first_few
from distribuuuu.files.image_files import (
    IMAGENET_FOLDERS,
    IMAGENET_TARS,
    JUNK_FILES,
    SPLIT_NAMES,
    TRAIN_NAMES,
    find_tables,
    holds_images,
    is_folder,
    list_classes,
    sort_splits,
)
from distribuuuu.hints.words import CLOTHES

# Files that are given in place of a folder: their endings, what they are, and the way in.
_FILES = (
    ((".pth.tar", ".pth", ".pt", ".safetensors", ".ckpt"), "a checkpoint, not data; fix: set MODEL.WEIGHTS to it"),
    ((".zip", ".tar"), "an archive; fix: set DATA.NAME {archive}"),
    ((".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".7z", ".rar"),
     "an archive of a kind that is not read; fix: unpack it, e.g. by tar -xf or 7-Zip, and use the folder"),
    ((".csv", ".tsv"), "a table; fix: set DATA.NAME list TRAIN.DATASET {parent}; or, to divide it: {split}"),
    ((".parquet", ".arrow"), "a table; fix: set DATA.NAME parquet TRAIN.DATASET {parent}, for image files in it"),
    ((".xlsx", ".xls", ".ods"), "a table; fix: save it as CSV, then DATA.NAME list TRAIN.DATASET {parent}"),
    (("",), "a file; expected a folder; fix: see docs/data.md, which lists what is read"),
)  # fmt: skip


def describe_file(path: Path) -> str:
    """Return what a file is that is given in place of a folder of images, and the way in."""
    parent, shown = shlex.quote(str(path.parent)), shlex.quote(str(path))
    archive = f"archive TRAIN.DATASET {shown}, which reads its folders train/ and val/"
    if split_of_archive(path.name).lower() in SPLIT_NAMES:
        archive = f"archive TRAIN.DATASET {parent}"
    archive = f"imagenet TRAIN.DATASET {parent}" if path.name in IMAGENET_TARS else archive
    text = next(text for endings, text in _FILES if path.name.lower().endswith(endings))
    return text.format(parent=parent, archive=archive, split=split_command(path, path.parent))


def split_of_archive(name: str) -> str:
    """Return the split of an archive or a shard, e.g. 'train' of 'train.tar' and of 'train-000.tar'."""
    return re.sub(r"(-\d+)?\.(tar|zip)$", "", name, flags=re.IGNORECASE)


def describe_files(folder: Path) -> str:
    """Return '; it holds X, an archive; fix: ...' for a folder without class folders and its archives, else tables."""
    folders = list_classes(folder)
    is_flat = len(folders) < 2 or len(sort_splits(folders)) == len(folders)
    if not is_flat or any(list_classes(folder / name) for name in folders):
        return ""
    with contextlib.suppress(OSError), os.scandir(os.fspath(folder)) as entries:
        names = [entry.name for entry in entries if entry.name[0] != "." and not is_folder(entry)]
        texts = {name: describe_file(folder / name) for name in names}
        found = [name for kind in ("an archive", "a table") for name in sorted(texts) if texts[name].startswith(kind)]
        return f"; it holds {found[0]}, {texts[found[0]]}" if found else ""
    return ""


def missing_file(name: str, root: Path, wanted: str, is_archive: bool) -> tuple[str, str]:
    """Return (key, message) for a missing archive or table of a split; `name` is TRAIN or TEST."""
    if not root.is_dir():
        return missing_root(name, root, wanted)
    existing = find_tables(root)
    if is_archive:
        existing = sorted(entry for entry in os.listdir(root) if entry.lower().endswith((".tar", ".zip")))
    splits = sort_splits(dict.fromkeys(re.sub(r"(-\d+)?\.\w+$", "", other) for other in existing))
    fix = "" if splits else describe_files(root)
    if fitting := similar_splits(name, splits):
        fix = f"; fix: set {name}.SPLIT {fitting[0]}"
    return f"{name}.SPLIT", f"no file {wanted} in {root}; it has {first_few(existing) or 'none of another name'}{fix}"


def explain_missing_folder(path: Path, split: str, folders: Iterable[str]) -> str:
    """Return the message for an archive without the folder of a split; `folders` hold its images."""
    tops = sorted({folder.partition("/")[0] for folder in folders})
    found = similar_option(split, sorted({folder.rpartition("/")[0] for folder in folders} - {""}))
    fix = f"set {found}" if found else f"unpack it, then {split_command(path.with_suffix(''))}"
    return f"{path}: has no folder {split}; it has {first_few(tops)}; fix: {fix}"


def similar_option(split: str, names: Iterable[str]) -> str:
    """Return 'TRAIN.SPLIT NAME' or TEST's for the first of the names that may replace a split; empty if none may."""
    section = "TRAIN" if split.lower() in TRAIN_NAMES else "TEST"
    fitting = [name for name in names if similar_splits(section, [name.rpartition("/")[2]])]
    return f"{section}.SPLIT {fitting[0]}" if fitting else ""


def similar_splits(name: str, names: Iterable[str]) -> list[str]:
    """Return the splits that may take the place of that of TRAIN or TEST: those to train on, or the others."""
    return [each for each in sort_splits(names) if (each.lower() in TRAIN_NAMES) == (name == "TRAIN")]


def describe_imagenet(root: Path) -> str:
    """Return '; it has ...; fix: ...' for a folder with ImageNet as it is distributed, or an empty string."""
    is_prepared = all(list_classes(root / name) for name in ("train", "val"))
    names = IMAGENET_FOLDERS if is_prepared else (*IMAGENET_FOLDERS, *IMAGENET_TARS, "val/ILSVRC2012_val_00000001.JPEG")
    found = next((name for name in names if (root / name).exists()), "")
    return f"; {root} has {found}, as ImageNet is distributed; fix: set DATA.NAME imagenet" if found else ""


def missing_root(name: str, root: Path, layout: str) -> tuple[str, str]:
    """Return (key, message) for a DATASET that is no folder; `name` is TRAIN, TEST or FOLDER."""
    key = name if name == "FOLDER" else f"{name}.DATASET"
    if os.path.isfile(root):
        return key, f"{root} is {describe_file(root)}"
    siblings = list_classes(root.absolute().parent)
    hint = "; for a URL set DATA.NAME packed" if ":/" in str(root) else did_you_mean(root.name, siblings)
    hint = CLOTHES if str(root) == "clothes" else hint
    where = "" if root.is_absolute() else f" in {os.getcwd()}"
    return key, f"no such folder: {root}{where}; it should hold {layout}{hint}"


def missing_split(name: str, root: Path, split: str, layout: str) -> tuple[str, str]:
    """Return (key, message) for a missing DATASET or SPLIT: its other name, or the command that makes a split."""
    if not root.is_dir():
        return missing_root(name, root, layout)
    key, existing = f"{name}.SPLIT", list_classes(root)
    has = f"it has {first_few(existing)}" if existing else f"it should hold {layout}"
    # The Hugging Face Hub has files of tables in the folder data.
    hint = describe_imagenet(root) or describe_files(root) or describe_files(root / "data")
    inner, fitting = find_inner_root(root), similar_splits(name, existing)
    if not hint and inner and split in list_classes(inner):
        hint = f"; fix: set {name}.DATASET {inner}"
    elif not hint and fitting:
        hint = f"; fix: set {key} {fitting[0]}"
    elif not hint and any(holds_images(root / entry, depth=1) for entry in existing):
        above = f", which are classes; fix: set {name}.DATASET {root.parent}"
        hint = above if root.name == split else f"; fix: {split_command(root)}"
    elif not hint:
        splits = [root / entry for entry in sort_splits(existing) if list_classes(root / entry)]
        hint = did_you_mean(split, existing) or (f"; fix: {split_command(splits[0])}" if splits else "")
    return key, f"no folder {split!r} in {root}; {has}{hint}"


def split_command(source: Path, folder: Path | None = None) -> str:
    """Return the command that splits a folder of classes, or a table in `folder`, into lists in the current folder."""
    out = f"{Path(os.path.abspath(folder or source)).name}_lists"
    return shlex.join(["distribuuuu", "split", str(source), "--val", "0.2", "--out", out])


def find_inner_root(root: Path) -> Path | None:
    """Return the first folder below the only class folder of `root` that has several sub-folders with images.

    These are its classes or splits, and `root` is one folder, or more, above the data set. None: there is none.
    """
    folder = root
    for _ in range(8):
        holding = [name for name in list_classes(folder) if holds_images(folder / name)]
        if len(holding) != 1 or holds_images(folder, depth=1):
            return folder if holding and folder != root else None
        folder = folder / holding[0]
    return None


def access_problem(folder: Path) -> str:
    """Return why an existing folder cannot be listed; empty if it can or does not exist."""
    try:
        os.scandir(folder).close()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def explain_folder(name: str, root: Path, split: str, extensions: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for missing and closed folders, and classes without an image; `name` is TRAIN or TEST."""
    folder, layout, key = root / split, f"{split}/CLASS/IMAGE", f"{name}.SPLIT"
    if closed := next(filter(access_problem, (root, folder)), None):
        yield f"{name}.DATASET" if closed == root else key, f"{closed} cannot be listed: {access_problem(closed)}"
    elif not folder.is_dir():
        yield missing_split(name, root, split, layout)
    elif not (classes := list_classes(folder)):
        hint = describe_imagenet(root) or describe_files(folder) or describe_files(root)
        yield key, f"{folder} has no class folders; it should hold CLASS/IMAGE{hint}"
    elif empty := [each for each in classes if not holds_images(folder / each, extensions=extensions)]:
        reasons = {each: access_problem(folder / each) for each in empty}
        shown = [f"{each} (cannot be listed: {reason})" if reason else each for each, reason in reasons.items()]
        yield key, f"{folder} has class folders without an image: {first_few(shown)}{count_others(folder, empty)}"


def count_others(folder: Path, names: Iterable[str]) -> str:
    """Return what class folders without an image hold, and what to do about it."""
    files = (file for name in names for _, _, found in os.walk(folder / name) for file in found)
    kept = (file for file in files if file[0] != "." and file.lower() not in JUNK_FILES)
    counts = Counter(os.path.splitext(file)[1].lower() or "no ending" for file in kept)
    held = first_few([f"{ending} ({count})" for ending, count in counts.most_common()])
    fix = "convert them to JPEG or PNG, or rename those that are"
    fix = "set DATA.CHANNELS and DATA.PIXELS to those of the arrays" if ".npy" in counts else fix
    return f"; they hold other files: {held}; fix: {fix}" if counts else "; fix: remove them"


def explain_columns(spec: Any, header: Sequence[str]) -> str:
    """Return the problem with the columns of a table, and the words that name the right ones; see `TableSpec`."""
    missing = [name for name in dict.fromkeys(spec.needed) if name not in header]
    keys = {"path": [spec.path], spec.key: spec.columns, "split": [spec.split]}
    words = [f"DATA.TABLE.{key} COLUMN" for key, names in keys.items() if {*names} & {*missing}]
    known = f"its columns are {first_few(header, num=20)}{did_you_mean(missing[0], header)}"
    fix = f"{' '.join(words)}; or DATA.TABLE.columns of a text without a header, or DATA.TABLE.delimiter"
    return f"has no column {' and no column '.join(missing)}; {known}; fix: {fix}"
