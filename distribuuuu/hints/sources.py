"""Folders and files that are not laid out as a data set: what they are, and the command or option that helps."""

import contextlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distribuuuu.config.errors import did_you_mean, first_few, near_matches
from distribuuuu.files.image_files import (
    EXTENSIONS,
    IMAGENET_FOLDERS,
    IMAGENET_TARS,
    JUNK_FILES,
    SPLIT_NAMES,
    TRAIN_NAMES,
    find_tables,
    is_class,
    is_folder,
    is_image,
    list_classes,
    sort_splits,
)
from distribuuuu.files.image_folders import holds_images

# Names of the validation images of ImageNet.
_VAL_IMAGE = re.compile(r"ILSVRC2012_val_\d{8}\.")
# Files that are given in place of a folder: their endings, what they are, and the way in.
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
_FILES = (
    ((".pth.tar", ".pth", ".pt", ".safetensors", ".ckpt"), "a checkpoint, not data; fix: set MODEL.WEIGHTS to it"),
    ((".zip",), "a ZIP archive; fix: {read}; or unpack it: {unpack}, then use {folder}"),
    ((".tar",), "a tar archive; fix: {read}; or unpack it: {unpack}, then use {folder}"),
    (_COMPRESSED, "a compressed tar archive; fix: unpack it: {unpack}, then use {folder}"),
    ((".7z", ".rar"), "an archive of a kind that is not read; fix: unpack it by 7-Zip or unrar, then use {folder}"),
    ((".xlsx", ".xls", ".ods"), "a spreadsheet; fix: save it as CSV, then DATA.NAME list TRAIN.DATASET {parent}"),
    ((".csv", ".tsv"), "a table; fix for a list: DATA.NAME list TRAIN.DATASET {parent} TRAIN.SPLIT {stem}"),
    ((".parquet", ".arrow"), "a table; fix for image files in it: DATA.NAME parquet TRAIN.DATASET {parent}"),
    ((".npz", ".npy", ".h5", ".hdf5", ".mat", ".pkl", ".json", ".tfrecord", ".lmdb", ".beton"),
     "no folder of images; fix: a data set of your own, see docs/data.md, 'Arrays and tables'"),
    ((".yaml", ".yml"), "a config file; fix: --cfg {path}"),
)  # fmt: skip


def describe_file(path: Path) -> str:
    """Return what a file is that is given in place of a folder of images, and the way in."""
    name = path.name
    for endings, text in _FILES:
        if ending := next((ending for ending in endings if name.lower().endswith(ending)), ""):
            folder = path.with_name(name[: -len(ending)] or "images")
            texts = {"path": path, "folder": folder, "parent": path.parent, "stem": name[: -len(ending)]}
            quoted = {key: shlex.quote(str(value)) for key, value in texts.items()}
            return text.format(**quoted, read=f"set {_archive_options(path)}", unpack=_unpack_command(path, folder))
    return "a file; expected a folder"


def _unpack_command(path: Path, folder: Path) -> str:
    archive, target = shlex.quote(str(path)), shlex.quote(str(folder))
    if path.suffix.lower() == ".zip":
        return f"python -m zipfile -e {archive} {target}"
    return f"mkdir {target} && tar -xf {archive} -C {target}"


def _archive_options(path: Path) -> str:
    """Return the options that train on an archive: on one for each split, or on one with a folder for each."""
    if path.name in IMAGENET_TARS:
        return f"DATA.NAME imagenet TRAIN.DATASET {shlex.quote(str(path.parent))}"
    split = split_of_archive(path.name)
    if split.lower() not in SPLIT_NAMES:
        return f"DATA.NAME archive TRAIN.DATASET {shlex.quote(str(path))}, which reads its folders train/ and val/"
    key = "TRAIN" if split.lower() in TRAIN_NAMES else "TEST"
    return f"DATA.NAME archive {key}.DATASET {shlex.quote(str(path.parent))} {key}.SPLIT {split}"


def split_of_archive(name: str) -> str:
    """Return the split of an archive or a shard, e.g. 'train' of 'train.tar' and of 'train-000.tar'."""
    return re.sub(r"(-\d+)?\.(tar|zip)$", "", name, flags=re.IGNORECASE)


def describe_archives(folder: Path, split: str = "") -> str:
    """Return '; it holds X, a ZIP archive; fix: ...' for the first archive in a folder, of a split if it is given."""
    with contextlib.suppress(OSError), os.scandir(os.fspath(folder)) as entries:
        for name in sorted(entry.name for entry in entries if not is_folder(entry)):
            is_meant = not split or re.match(rf"{re.escape(split)}[-.]", name)
            if is_meant and "archive" in (text := describe_file(folder / name)):
                return f"; it holds {name}, {text}"
    return ""


def explain_archives(name: str, root: Path, split: str) -> tuple[str, str]:
    """Return (key, message) for a folder without the archive of a split."""
    key, expected = f"{name}.SPLIT", f"no {split}.tar, {split}.zip or {split}-*.tar in {root}"
    if hint := describe_archives(root, split):
        return key, f"{expected}{hint}"
    archives = sorted(entry for entry in os.listdir(root) if entry.lower().endswith((".tar", ".zip")))
    splits = [*dict.fromkeys(map(split_of_archive, archives))]
    if len(archives) == 1 and not sort_splits(splits):  # it may hold all splits
        fix = f"fix: set {name}.DATASET {root / archives[0]}, which reads its folder {split}/"
        return key, f"{expected}; it has {archives[0]}; {fix}"
    fitting = similar_splits(name, splits)
    fix = f"; fix: set {key} {fitting[0]}" if fitting else ""
    return key, f"{expected}; it has {first_few(splits) if splits else 'no archive'}{fix}"


def explain_missing_folder(path: Path, split: str, folders: Collection[str]) -> str:
    """Return the message for an archive without the folder of a split; `folders` hold its images."""
    parts = [each.split("/") for each in sorted(folders)]
    problem = f"{path}: has no folder {split}; it has {first_few([*dict.fromkeys(each[0] for each in parts)])}"
    above = ("/".join(each[:end]) for each in parts for end in range(1, len(each)))
    if found := [each for each in above if similar_splits(split, [each.rpartition("/")[2]])]:
        return f"{problem}; fix: set {split_key(split)} {found[0]}"
    folder, tops = path.with_suffix(""), {each[0] for each in parts}
    inner = folder / tops.pop() if len(tops) == 1 and max(map(len, parts)) > 1 else folder
    return f"{problem}; fix: unpack it: {_unpack_command(path, folder)} && {split_command(inner)}"


def split_key(split: str) -> str:
    """Return the option of a split."""
    return "TRAIN.SPLIT" if split.lower() in TRAIN_NAMES else "TEST.SPLIT"


def similar_splits(split: str, names: Iterable[str]) -> list[str]:
    """Return the splits that may take the place of a missing one: those to train on, or the others."""
    is_known = split.lower() in SPLIT_NAMES
    return [each for each in sort_splits(names) if is_known and split_key(each) == split_key(split)]


def describe_parquet(root: Path) -> str:
    """Return '; it holds parquet files; fix: ...' for a folder with such files, as on the Hugging Face Hub."""
    splits = _parquet_splits(root)
    words = ["DATA.NAME", "parquet", "TRAIN.DATASET", str(root)]
    for split in ("train", "val"):
        if split not in splits and (found := similar_splits(split, splits)):
            words += [split_key(split), found[0]]
    return f"; it holds parquet files; fix: {shlex.join(words)}" if splits else ""


def explain_parquet(root: Path, split: str) -> str:
    """Return '; it has A, B; fix: ...' for a folder without the parquet files of a split."""
    splits = _parquet_splits(root)
    fix = next((f"; fix: set {split_key(split)} {found}" for found in similar_splits(split, splits)), "")
    return f"; it has {first_few(splits)}{fix}" if splits else ""


def _parquet_splits(root: Path) -> list[str]:
    found = [path.name for pattern in ("*.parquet", "data/*.parquet") for path in root.glob(pattern)]
    return sorted({name.removesuffix(".parquet").partition("-")[0] for name in found})


def describe_table(root: Path) -> str:
    """Return '; it has X, a table; fix: ...' for a folder with a table of its images and no class folders."""
    folders = list_classes(root)
    is_flat = len(folders) == 1 or len(sort_splits(folders)) == len(folders)
    tables = find_tables(root) if root.is_dir() else []
    if not tables or not is_flat or any(list_classes(root / name) for name in folders):
        return ""
    by_stem = {name.rpartition(".")[0]: name for name in tables}
    splits = sort_splits(by_stem)
    trained = next((name for name in splits if name.lower() in TRAIN_NAMES), "")
    name = by_stem.get(trained, tables[0])
    if trained and (others := [name for name in splits if name.lower() not in TRAIN_NAMES]):
        words = f"TRAIN.SPLIT {trained} TEST.SPLIT {others[0]}"
        return f"; it has {name}, a table; fix: DATA.NAME list TRAIN.DATASET {shlex.quote(str(root))} {words}"
    return f"; it has {name}, a table; fix: {_split_table(root / name)}"


def _split_table(table: Path) -> str:
    """Return the ways to divide a table into training and validation images."""
    words = f"DATA.NAME list DATA.TABLE.file {shlex.quote(table.name)} DATA.TABLE.split COLUMN"
    return f"{split_command(table, table.parent)}; or, if a column has the split of each row: {words}"


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
    key, problem, existing = f"{name}.SPLIT", f"no folder {split!r} in {root}", list_classes(root)
    hint = describe_imagenet(root) or describe_archives(root, split) or describe_table(root) or describe_parquet(root)
    if hint:
        return key, f"{problem}{hint}"
    has = f"it has {first_few(existing)}" if existing else f"it should hold {layout}{describe_archives(root)}"
    if (inner := find_inner_root(root)) and split in list_classes(inner):
        return key, f"{problem}; {has}; fix: set {name}.DATASET {inner}"
    classes = [entry for entry in existing if holds_images(root / entry, depth=1)]
    splits = [entry for entry in sort_splits(existing) if list_classes(root / entry)]
    if fitting := similar_splits(name, splits):
        return key, f"{problem}; {has}; fix: set {key} {fitting[0]}"
    if near := did_you_mean(split, [entry for entry in existing if entry not in classes]):
        return key, f"{problem}; {has}{near}"
    if classes and root.name == split:
        return key, f"{problem}; {root} has class folders itself; set {name}.DATASET {root.parent}"
    if classes:
        named = f"these look like class folders: {first_few(classes)}"
        return key, f"{problem}; {named}; fix: {split_command(root)}"
    return key, f"{problem}; {has}" + (f"; fix: {split_command(root / splits[0])}" if splits else "")


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
        hint = describe_imagenet(root) or describe_archives(folder) or describe_table(root)
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

# Usual names of columns, in lower case.
_USUAL = {
    "path": ("path", "image", "file", "filename", "file_name", "filepath", "image_path", "image_name", "image_id",
             "img", "id"),
    "label": ("label", "labels", "class", "classes", "category", "target", "tags", "breed", "species"),
}  # fmt: skip


def missing_table(name: str, path: Path) -> tuple[str, str]:
    """Return (key, message) for a table that does not exist; `name` is TRAIN or TEST."""
    existing = find_tables(path.parent)
    stems = [other.rpartition(".")[0] for other in existing]
    problem = f"no file {path.name} in {path.parent}; it has {first_few(stems) or 'no .csv file'}"
    hint = did_you_mean(path.stem, [stem for stem in stems if name == "TRAIN" or stem.lower() not in TRAIN_NAMES])
    if hint or not existing:
        return f"{name}.SPLIT", f"{problem}{hint}"
    if splits := similar_splits(name, stems):
        return f"{name}.SPLIT", f"{problem}; fix: {name}.SPLIT {splits[0]}"
    trained = (each for each in existing if each.rpartition(".")[0].lower() in TRAIN_NAMES)
    return f"{name}.SPLIT", f"{problem}; fix: {_split_table(path.parent / next(trained, existing[0]))}"


def explain_columns(spec: Any, header: Sequence[str]) -> str:
    """Return the problem with the columns of a table, and the words that name the right ones; see `TableSpec`."""
    missing = [name for name in dict.fromkeys(spec.needed) if name not in header]
    other = next((mark for mark in ("\t", ";", "|", ",", " ") if len(header) == 1 and mark in header[0]), "")
    fields = [field.strip() for field in header[0].split(other)] if other else header
    words = [f"DATA.TABLE.delimiter {other!r}"] if other else []
    if not spec.header and any(map(is_image, fields)):
        names = [f"column_{number}" for number in range(1, len(fields) + 1)]
        path = next(place for place, field in enumerate(fields) if is_image(field))
        names[path] = spec.path
        if len(fields) > 1 and spec.columns:
            names[1 if path == 0 else 0] = spec.columns[0]
        words.append(f"DATA.TABLE.columns '[{', '.join(names)}]', as it has no header")
    elif header and not other:
        words += _suggest_words(spec, header)
    known = f"its columns are {first_few(header, num=20)}" if header else "it has no columns"
    fix = f"; fix: add {' '.join(words)}" if words else ""
    return f"has no column {' and no column '.join(missing)}; {known}{fix}"


def _suggest_words(spec: Any, header: Sequence[str]) -> Iterator[str]:
    """Yield the KEY VALUE pairs that name columns of the header in the place of missing ones."""
    rest = [name for name in header if name and name not in spec.needed]
    wanted = {"path": (spec.path,), spec.key: spec.columns, "split": (spec.split,)}
    for key, names in wanted.items():
        if len(names) != 1 or not names[0] or names[0] in header:
            continue
        usual_names = _USUAL.get(key.rstrip("s"), ())
        usual = [name for name in rest if name.lower() in usual_names]
        similar = near_matches(names[0], rest)
        # A name that was given comes close to the right one, a default one may not.
        near = [*usual, *similar] if names[0] in usual_names else [*similar, *usual]
        near += rest if len(rest) == 1 else ()
        yield f"DATA.TABLE.{key} {near[0] if near else 'COLUMN'}"
        rest = [name for name in rest if name not in near[:1]]


def explain_missing_images(folder: str, places: Sequence[str], has_found: bool, template: str) -> str:
    """Return ' (fix: ...)' for images of a table that do not exist: a template of their paths, if there is one.

    `places` of the missing images are like "line 3, 'a'"; `has_found`: other images of the table exist.
    """
    name = re.sub(r"^line \d+, ", "", places[0])[1:-1]
    if has_found or template != "{}" or "/" in name or not is_class(name):
        return ""
    root, parts = Path(folder), ["", *(f"{part}/" for part in list_classes(folder or ".")[:50])]
    endings = ("", *EXTENSIONS, *(ending.upper() for ending in EXTENSIONS))
    found = (f"{part}{{}}{ending}" for part in parts for ending in endings)
    fix = next((text for text in found if os.path.isfile(root / text.replace("{}", name))), "")
    return f" (fix: DATA.TABLE.template {fix!r})" if fix else ""
