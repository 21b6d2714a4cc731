"""Files and folders of images by their names: what is an image, a class, a split, a table; imports no numpy."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

# Folders that operating systems and tools create, in lower case; they hold no images of the data at any depth.
JUNK_FOLDERS = (
    "__macosx", "@eadir", "$recycle.bin", "lost+found", "system volume information", ".ipynb_checkpoints",
)  # fmt: skip
# Levels of folders that are searched for images.
MAX_DEPTH = 1000
# Files that operating systems create, in lower case; like hidden files they are not counted as left out.
JUNK_FILES = ("thumbs.db", "desktop.ini")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".jfif",
              ".avif", ".heic", ".heif")  # fmt: skip
ALL_EXTENSIONS = (*EXTENSIONS, ".npy")
# Names of folders and CSVs that are splits, in lower case and in the usual order.
TRAIN_NAMES = ("train", "training")
SPLIT_NAMES = (*TRAIN_NAMES, "val", "valid", "validation", "dev", "eval", "test", "testing")
# ImageNet as it is distributed: the archives, and the folder of Kaggle's archive.
IMAGENET_TARS = ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar")
IMAGENET_FOLDERS = ("ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")
# Endings of tables in the order in which they are looked for, and their delimiters.
TABLE_ENDINGS = {".csv": ",", ".tsv": "\t", ".txt": ","}


def is_class(name: str) -> bool:
    """Return whether a folder name is a class name: not hidden and not a system folder."""
    return not name.startswith(".") and name.lower() not in JUNK_FOLDERS


def is_image(name: str, extensions: tuple[str, ...] = EXTENSIONS) -> bool:
    """Return whether a file name has an image extension and is not hidden."""
    return name.lower().endswith(extensions) and not name.startswith(".")


def is_folder(entry: "os.DirEntry[str]") -> bool:
    """Return whether a directory entry is a folder; False for a circular link."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def list_classes(folder: str | os.PathLike) -> tuple[str, ...]:
    """Return the sorted names of the class folders in a folder; empty if it cannot be listed."""
    with contextlib.suppress(OSError), os.scandir(os.fspath(folder)) as entries:
        return tuple(sorted(entry.name for entry in entries if is_folder(entry) and is_class(entry.name)))
    return ()


def find_tables(folder: Path) -> list[str]:
    """Return the names of the tables in a folder, sorted; of the .txt files those that have the name of a split."""
    tables = [path for path in folder.glob("*") if path.suffix.lower() in TABLE_ENDINGS and path.name[0] != "."]
    return sorted(path.name for path in tables if path.suffix.lower() != ".txt" or path.stem.lower() in SPLIT_NAMES)


def sort_splits(names: Iterable[str]) -> list[str]:
    """Return the names of splits among `names`, in the usual order."""
    known = (name for name in names if name.lower() in SPLIT_NAMES)
    return sorted(known, key=lambda name: (SPLIT_NAMES.index(name.lower()), name))


def holds_images(folder: str | os.PathLike, depth: int = MAX_DEPTH, extensions: tuple[str, ...] = EXTENSIONS) -> bool:
    """Return whether a folder has an image in itself or, up to `depth` levels below, in its sub-folders."""
    return any(True for _ in walk_images(folder, depth, extensions))


def walk_images(
    folder: str | os.PathLike, depth: int = MAX_DEPTH, extensions: tuple[str, ...] = EXTENSIONS
) -> Iterator[str]:
    """Yield the images in a folder and in its sub-folders, `depth` levels in all, each folder once."""
    waiting, seen = [(os.fspath(folder), 1)], set()
    while waiting:
        path, level = waiting.pop()
        real = os.path.realpath(path)
        if real in seen:  # a circular link
            continue
        seen.add(real)
        with contextlib.suppress(OSError), os.scandir(real) as entries:
            for entry in entries:
                if is_image(entry.name, extensions) and not is_folder(entry):
                    yield entry.path
                elif level < depth and entry.name.lower() not in JUNK_FOLDERS and is_folder(entry):
                    waiting.append((entry.path, level + 1))
