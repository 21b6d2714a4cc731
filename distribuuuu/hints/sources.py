"""Folders and files that are not laid out as a data set: what they are, and the command or option that helps."""

import contextlib
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from distribuuuu.config.errors import did_you_mean, first_few
from distribuuuu.files.image_files import (
    ALL_EXTENSIONS,
    EXTENSIONS,
    MAX_DEPTH,
    SPLIT_NAMES,
    TRAIN_NAMES,
    find_tables,
    is_folder,
    is_image,
    list_classes,
    sort_splits,
    walk_images,
)

# ImageNet as it is distributed: the archives, the folder of Kaggle's archive, and the names of validation images.
IMAGENET_TARS = ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar")
IMAGENET_FOLDERS = ("ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")
_VAL_IMAGE = re.compile(r"ILSVRC2012_val_\d{8}\.")
# Files that are given in place of a folder: their endings, what they are, and the way in.
_ARRAYS = "images in a file of arrays or a table; fix: a data set of your own, see docs/data.md, 'Arrays and tables'"
_UNPACK = "or unpack it: mkdir {folder} && tar -xf {path} -C {folder}, then use {folder}"
_TOOLS = {
    "gzip": (".tar.gz", ".tgz"), "bzip2": (".tar.bz2", ".tbz2"), "xz": (".tar.xz", ".txz"), "zstd": (".tar.zst",),
}  # fmt: skip
# Endings of tables, and of archives.
TABLES = (".csv", ".tsv", ".parquet", ".arrow")
ARCHIVES = (".zip", ".tar", *(ending for endings in _TOOLS.values() for ending in endings))
_FILES = (
    ((".pth.tar", ".pth", ".pt", ".safetensors", ".ckpt"), "a checkpoint, not data; fix: set MODEL.WEIGHTS to it"),
    ((".zip",), "a ZIP archive; fix: {read}; or unpack it: python -m zipfile -e {path} {folder}, then use {folder}"),
    ((".tar",), f"a tar archive; fix: {{read}}; {_UNPACK}"),
    *((endings, f"a compressed tar archive; {{{tool}}}, then {{read}}; {_UNPACK}") for tool, endings in _TOOLS.items()),
    ((".7z", ".rar", ".gz", ".xz", ".bz2", ".zst"), "a compressed file; fix: unpack it, and use the folder of images"),
    (
        (".csv", ".tsv"),
        "a table; fix for a list: DATA.NAME list TRAIN.DATASET {parent} TRAIN.SPLIT {stem}; for pixel values: "
        "a data set of your own, see docs/data.md, 'Arrays and tables'",
    ),
    (
        (".parquet", ".arrow"),
        "a table; fix for image files in it: DATA.NAME parquet TRAIN.DATASET {parent} TRAIN.SPLIT {stem}; for a list: "
        "DATA.NAME list",
    ),
    ((".feather", ".npz", ".npy", ".h5", ".hdf5", ".mat", ".pkl", ".pickle"), _ARRAYS),
    ((".json", ".jsonl", ".tfrecord", ".lmdb", ".mdb", ".beton", ".idx", ".bin", ".xlsx"), _ARRAYS),
    ((".yaml", ".yml"), "a config file; fix: --cfg {path}"),
)


def describe_file(path: Path) -> str:
    """Return what a file is that is given in place of a folder of images, and the way in."""
    name = path.name
    if is_image(name):
        return "an image; expected the folder that holds the class folders"
    for endings, text in _FILES:
        if ending := next((ending for ending in endings if name.lower().endswith(ending)), ""):
            stem = name[: -len(ending)]
            texts = {"path": path, "folder": path.with_name(stem or "images"), "parent": path.parent, "stem": stem}
            quoted = {key: shlex.quote(str(value)) for key, value in texts.items()}
            tar = path.with_name(f"{stem}.tar") if ending not in (".tar", ".zip") else path
            commands = {tool: repack(str(path), tool) for tool in _TOOLS}
            return text.format(**quoted, **commands, read=f"set {_archive_options(tar)}")
    return "a file; expected a folder"


def repack(path: str, tool: str) -> str:
    """Return the advice that decompresses a tar with a tool."""
    target = re.sub(r"(\.tar)?\.\w+$", "", path) + (".tar" if not path.endswith(".tar") else ".plain.tar")
    return f"fix: {tool} -dc {shlex.quote(path)} > {shlex.quote(target)}"


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


def list_archives(names: Iterable[str]) -> list[str]:
    """Return those of some file names, sorted, that are archives which can be read without unpacking; no weights."""
    return sorted(name for name in names if re.search(r"(?<!\.pth)\.tar$|\.zip$", name.lower()))


def describe_archives(folder: Path, split: str = "") -> str:
    """Return '; it holds X, a ZIP archive; fix: ...' for the first archive in a folder, of a split if it is given."""
    with contextlib.suppress(OSError), os.scandir(os.fspath(folder)) as entries:
        for name in sorted(entry.name for entry in entries if not is_folder(entry)):
            is_meant = not split or re.match(rf"{re.escape(split)}[-.]", name)
            if is_meant and "archive" in (text := describe_file(folder / name)):
                return f"; it holds {name}, {text}"
    return ""


def describe_table(root: Path) -> str:
    """Return '; it has X, a table; fix: ...' for a folder with a table of its images and no class folders."""
    folders = list_classes(root)
    is_flat = len(folders) == 1 or len(sort_splits(folders)) == len(folders)
    tables = [name for name in find_tables(root) if not name.endswith(".parquet")] if root.is_dir() else []
    if not tables or not is_flat or any(list_classes(root / name) for name in folders):
        return ""
    by_stem = {name.rpartition(".")[0]: name for name in tables}
    splits = sort_splits(by_stem)
    trained = next((name for name in splits if name.lower() in TRAIN_NAMES), "")
    if trained and (others := [name for name in splits if name.lower() not in TRAIN_NAMES]):
        words = f"TRAIN.SPLIT {trained} TEST.SPLIT {others[0]}"
    else:
        words = f"DATA.TABLE.file {by_stem.get(trained, tables[0])} DATA.TABLE.split COLUMN, a column of train and val"
    name = by_stem.get(trained, tables[0])
    return f"; it has {name}, a table; fix: DATA.NAME list TRAIN.DATASET {shlex.quote(str(root))} {words}"


def describe_arrays(folder: Path) -> str:
    """Return '; it has arrays ...' for class folders, or folders of a split, whose only images are .npy files."""
    names = list_classes(folder)
    if any(holds_images(folder / name) for name in names):
        return ""
    found = (path for name in names for path in walk_images(folder / name, extensions=ALL_EXTENSIONS))
    path = next(found, "")
    return path and f"; it has arrays, e.g. {path}; fix: set DATA.CHANNELS and DATA.PIXELS to those of the arrays"


def describe_imagenet(root: Path) -> str:
    """Return '; it holds ...; fix: ...' for a folder with ImageNet as it is distributed, or an empty string."""
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
    return key, f"no such folder: {root}; it should hold {layout}{hint}"


def missing_split(name: str, root: Path, split: str, layout: str) -> tuple[str, str]:
    """Return (key, message) for a missing SPLIT folder: its other name, or the command that makes a split."""
    key, problem, existing = f"{name}.SPLIT", f"no folder {split!r} in {root}", list_classes(root)
    if hint := describe_imagenet(root) or describe_archives(root, split) or describe_table(root):
        return key, f"{problem}{hint}"
    has = f"it has {first_few(existing)}" if existing else f"it should hold {layout}{describe_archives(root)}"
    if (inner := find_inner_root(root)) and split in list_classes(inner):
        return key, f"{problem}; {has}; fix: set {name}.DATASET {inner}"
    classes = [entry for entry in existing if holds_images(root / entry, depth=1)]
    if near := did_you_mean(split, [entry for entry in existing if entry not in classes]):
        return key, f"{problem}; {has}{near}"
    if classes and root.name == split:
        return key, f"{problem}; {root} has class folders itself; set {name}.DATASET {root.parent}"
    if classes:
        named = f"these look like class folders: {first_few(classes)}"
        return key, f"{problem}; {named}; fix: {split_command(root)}"
    splits = [entry for entry in existing if entry.lower() in SPLIT_NAMES and list_classes(root / entry)]
    fitting = [entry for entry in splits if (entry.lower() in TRAIN_NAMES) == (name == "TRAIN")]
    if fitting:
        return key, f"{problem}; {has}; fix: set {key} {fitting[0]}"
    return key, f"{problem}; {has}" + (f"; fix: {split_command(root / splits[0])}" if splits else "")


def split_command(folder: Path) -> str:
    """Return the command that splits a folder of classes into lists in the current folder."""
    out = f"{Path(os.path.abspath(folder)).name}_lists"
    return shlex.join(["distribuuuu", "split", str(folder), "--val", "0.2", "--out", out])


# --------------------------------------------------------------------------- folders in class folders


def holds_images(folder: Path, depth: int = MAX_DEPTH, extensions: tuple[str, ...] = EXTENSIONS) -> bool:
    """Return whether a folder has an image in itself or, up to `depth` levels below, in its sub-folders."""
    return any(True for _ in walk_images(folder, depth, extensions))


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
