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
    is_image,
    list_classes,
    sort_splits,
)

# Names of the validation images of ImageNet.
_VAL_IMAGE = re.compile(r"ILSVRC2012_val_\d{8}\.")
# Files that are given in place of a folder: their endings, what they are, and the way in.
_FILES = (
    ((".pth.tar", ".pth", ".pt", ".safetensors", ".ckpt"), "a checkpoint, not data; fix: set MODEL.WEIGHTS to it"),
    ((".zip", ".tar"), "an archive; fix: set {archive}"),
    ((".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".7z", ".rar"),
     "an archive of a kind that is not read; fix: unpack it, e.g. by tar -xf or 7-Zip, and use the folder"),
    ((".csv", ".tsv"), "a table; fix: set DATA.NAME list TRAIN.DATASET {parent}; or, to divide it: {split}"),
    ((".parquet", ".arrow"), "a table; fix: set DATA.NAME parquet TRAIN.DATASET {parent}, for image files in it"),
    ((".xlsx", ".xls", ".ods"), "a table; fix: save it as CSV, then DATA.NAME list TRAIN.DATASET {parent}"),
    ((".npz", ".npy", ".h5", ".hdf5", ".mat", ".pkl", ".json", ".tfrecord", ".lmdb", ".beton"),
     "no folder of images; fix: a data set of your own, see docs/data.md, 'Arrays and tables'"),
    ((".yaml", ".yml"), "a config file; fix: --cfg {path}"),
)  # fmt: skip


def describe_file(path: Path) -> str:
    """Return what a file is that is given in place of a folder of images, and the way in."""
    for endings, text in _FILES:
        if path.name.lower().endswith(endings):
            parent, shown = shlex.quote(str(path.parent)), shlex.quote(str(path))
            archive = f"archive TRAIN.DATASET {shown}, which reads its folders train/ and val/"
            if split_of_archive(path.name).lower() in SPLIT_NAMES:
                archive = f"archive TRAIN.DATASET {parent}"
            archive = f"imagenet TRAIN.DATASET {parent}" if path.name in IMAGENET_TARS else archive
            split = split_command(path, path.parent)
            return text.format(path=shown, parent=parent, archive=f"DATA.NAME {archive}", split=split)
    return "a file; expected a folder"


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
        names = sorted(entry.name for entry in entries if not is_folder(entry))
        texts = {name: describe_file(folder / name) for name in names}
        found = [name for kind in ("an archive", "a table") for name in names if texts[name].startswith(kind)]
        return f"; it holds {found[0]}, {texts[found[0]]}" if found else ""
    return ""


def explain_archives(name: str, root: Path, split: str) -> tuple[str, str]:
    """Return (key, message) for a folder without the archive of a split."""
    archives = sorted(entry for entry in os.listdir(root) if entry.lower().endswith((".tar", ".zip")))
    stems, fix = [*dict.fromkeys(map(split_of_archive, archives))], ""
    if fitting := similar_splits(name, stems):
        fix = f"; fix: set {name}.SPLIT {fitting[0]}"
    elif len(archives) == 1 and not sort_splits(stems):  # it may hold all splits
        fix = f"; fix: set {name}.DATASET {root / archives[0]}, which reads its folder {split}/"
    expected = f"no {split}.tar, {split}.zip or {split}-*.tar in {root}; it has {first_few(archives) or 'no archive'}"
    return f"{name}.SPLIT", f"{expected}{fix or ('' if archives else describe_files(root))}"


def explain_missing_folder(path: Path, split: str, folders: Iterable[str]) -> str:
    """Return the message for an archive without the folder of a split; `folders` hold its images."""
    tops = sorted({folder.partition("/")[0] for folder in folders})
    above = sorted({folder.rpartition("/")[0] for folder in folders} - {""})
    problem = f"{path}: has no folder {split}; it has {first_few(tops)}"
    if found := similar_option(split, above):
        return f"{problem}; fix: set {found}"
    archive, target = shlex.quote(str(path)), path.with_suffix("")
    command = f"mkdir {shlex.quote(str(target))} && tar -xf {archive} -C {shlex.quote(str(target))}"
    if path.suffix.lower() == ".zip":
        command = f"python -m zipfile -e {archive} {shlex.quote(str(target))}"
    return f"{problem}; fix: unpack it: {command} && {split_command(target / tops[0] if above == tops[:1] else target)}"


def similar_option(split: str, names: Iterable[str]) -> str:
    """Return 'TRAIN.SPLIT NAME' or TEST's for the first of the names that may replace a split; empty if none may."""
    section = "TRAIN" if split.lower() in TRAIN_NAMES else "TEST"
    fitting = [name for name in names if similar_splits(section, [name.rpartition("/")[2]])]
    return f"{section}.SPLIT {fitting[0]}" if fitting else ""


def similar_splits(name: str, names: Iterable[str]) -> list[str]:
    """Return the splits that may take the place of that of TRAIN or TEST: those to train on, or the others."""
    return [each for each in sort_splits(names) if (each.lower() in TRAIN_NAMES) == (name == "TRAIN")]


def describe_imagenet(root: Path) -> str:
    """Return '; it holds ...; fix: ...' for a folder with ImageNet as it is distributed, or an empty string."""
    if table := next(root.glob("*/val_annotations.txt"), None):
        move = "while read -r f c x; do mkdir -p $c && mv images/$f $c/; done < val_annotations.txt && rmdir images"
        return f"; {table} has the classes, as in Tiny ImageNet; fix: (cd {shlex.quote(str(table.parent))} && {move})"
    found = next((name for name in IMAGENET_TARS if (root / name).is_file()), "")
    found = "" if all(list_classes(root / name) for name in ("train", "val")) else found
    found = next((name for name in IMAGENET_FOLDERS if (root / name).is_dir()), found)
    if not list_classes(root / "val"):
        with contextlib.suppress(OSError), os.scandir(root / "val") as entries:
            found = "val/ without class folders" if any(_VAL_IMAGE.match(entry.name) for entry in entries) else found
    return f"; {root} has {found}, as ImageNet is distributed; fix: set DATA.NAME imagenet" if found else ""


def missing_root(name: str, root: Path, layout: str) -> tuple[str, str]:
    """Return (key, message) for a DATASET that is no folder; `name` is TRAIN, TEST or FOLDER."""
    key = name if name == "FOLDER" else f"{name}.DATASET"
    if os.path.isfile(root):
        return key, f"{root} is {describe_file(root)}"
    siblings = list_classes(root.absolute().parent)
    hint = "; for a URL set DATA.NAME packed" if ":/" in str(root) else did_you_mean(root.name, siblings)
    where = "" if root.is_absolute() else f" in {os.getcwd()}"
    return key, f"no such folder: {root}{where}; it should hold {layout}{hint}"


def missing_split(name: str, root: Path, split: str, layout: str) -> tuple[str, str]:
    """Return (key, message) for a missing SPLIT folder: its other name, or the command that makes a split."""
    key, existing = f"{name}.SPLIT", list_classes(root)
    has = f"it has {first_few(existing)}" if existing else f"it should hold {layout}"
    problem = f"no folder {split!r} in {root}; {has}"
    # The Hugging Face Hub has files of tables in the folder data.
    if hint := describe_imagenet(root) or describe_files(root) or describe_files(root / "data"):
        return key, f"{problem}{hint}"
    if (inner := find_inner_root(root)) and split in list_classes(inner):
        return key, f"{problem}; fix: set {name}.DATASET {inner}"
    if fitting := similar_splits(name, existing):
        return key, f"{problem}; fix: set {key} {fitting[0]}"
    classes = [entry for entry in existing if holds_images(root / entry, depth=1)]
    if near := did_you_mean(split, [entry for entry in existing if entry not in classes]):
        return key, f"{problem}{near}"
    if classes and root.name == split:
        return key, f"{problem}, which are classes; fix: set {name}.DATASET {root.parent}"
    splits = [entry for entry in sort_splits(existing) if list_classes(root / entry)]
    source = root if classes else root / splits[0] if splits else None
    return key, f"{problem}; fix: {split_command(source)}" if source else problem


def split_command(source: Path, folder: Path | None = None) -> str:
    """Return the command that splits a folder of classes, or a table in `folder`, into lists in the current folder."""
    out = f"{Path(os.path.abspath(folder or source)).name}_lists"
    return shlex.join(["distribuuuu", "split", str(source), "--val", "0.2", "--out", out])


# --------------------------------------------------------------------------- folders in class folders


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
    if reason := access_problem(root):
        yield f"{name}.DATASET", f"{root} cannot be listed: {reason}"
    elif not root.is_dir():
        yield missing_root(name, root, layout)
    elif reason := access_problem(folder):
        yield key, f"{folder} cannot be listed: {reason}"
    elif not folder.is_dir():
        yield missing_split(name, root, split, layout)
    elif not (classes := list_classes(folder)) or (classes == ("images",) and "Tiny" in describe_imagenet(root)):
        hint = describe_imagenet(root) or describe_files(folder) or describe_files(root)
        yield key, f"{folder} has no class folders; it should hold CLASS/IMAGE{hint}"
    else:
        empty = [each for each in classes if not holds_images(folder / each, extensions=extensions)]
        closed = {each: reason for each in empty if (reason := access_problem(folder / each))}
        if closed:
            named = first_few([f"{each} ({reason})" for each, reason in closed.items()])
            yield key, f"{folder} has class folders that cannot be listed: {named}"
        if empty := [each for each in empty if each not in closed]:
            yield key, f"{folder} has class folders without an image: {first_few(empty)}{count_others(folder, empty)}"


def count_others(folder: Path, names: Iterable[str]) -> str:
    """Return what class folders without an image hold, and what to do about it."""
    files = (file for name in names for _, _, found in os.walk(folder / name) for file in found)
    kept = (file for file in files if file[0] != "." and file.lower() not in JUNK_FILES)
    counts = Counter(os.path.splitext(file)[1].lower() or "no ending" for file in kept)
    if not counts:
        return "; fix: remove them"
    held = first_few([f"{ending} ({count})" for ending, count in counts.most_common()])
    arrays = "set DATA.CHANNELS and DATA.PIXELS to those of the arrays" if ".npy" in counts else ""
    return f"; they hold other files: {held}; fix: {arrays or 'convert them to JPEG or PNG, or rename those that are'}"


# --------------------------------------------------------------------------------------------- tables


def missing_table(name: str, path: Path) -> tuple[str, str]:
    """Return (key, message) for a table that does not exist; `name` is TRAIN or TEST."""
    existing = find_tables(path.parent)
    stems = [other.rpartition(".")[0] for other in existing]
    problem = f"no file {path.name} in {path.parent}; it has {first_few(stems) or 'no .csv file'}"
    if splits := similar_splits(name, stems):
        return f"{name}.SPLIT", f"{problem}; fix: {name}.SPLIT {splits[0]}"
    fix = f"; fix: {split_command(path.parent / existing[0], path.parent)}" if existing else ""
    return f"{name}.SPLIT", f"{problem}{fix}"


def explain_columns(spec: Any, header: Sequence[str]) -> str:
    """Return the problem with the columns of a table, and the words that name the right ones; see `TableSpec`."""
    missing = [name for name in dict.fromkeys(spec.needed) if name not in header]
    words = [f"DATA.TABLE.{key} COLUMN" for key, names in (("path", [spec.path]), (spec.key, spec.columns),
             ("split", [spec.split])) if {*names} & {*missing}]  # fmt: skip
    if not spec.header and any(map(is_image, re.split(r"[\t;|, ]", header[0]) if len(header) == 1 else header)):
        words = [f"DATA.TABLE.columns '[{', '.join(spec.needed)}]', as it has no header"]
    if not header:
        return f"has no column {' and no column '.join(missing)}; it has no columns: it is empty"
    known = f"its columns are {first_few(header, num=20)}{did_you_mean(missing[0], header)}"
    other = "; or set DATA.TABLE.delimiter, if it is no comma" if len(header) == 1 else ""
    return f"has no column {' and no column '.join(missing)}; {known}; fix: {' '.join(words)}{other}"
