"""The splits of a folder or of a config as data sets; nothing is written."""

import os
import shlex
import time
from pathlib import Path

from distribuuuu.commands.scan.data_config import find_splits
from distribuuuu.config import ConfigError, Problem
from distribuuuu.data.datasets.archive import Archive
from distribuuuu.data.datasets.array_file import packed_name
from distribuuuu.data.datasets.base import ImageDataset, SplitDataset, get_dataset
from distribuuuu.data.datasets.folder_index import FolderIndex, scan_folder
from distribuuuu.data.datasets.image_list import ImageList, Multilabel
from distribuuuu.data.datasets.imagefolder import ImageFolder, access_problem
from distribuuuu.data.packed.dataset import Packed
from distribuuuu.files.image_files import is_image, list_classes, sort_splits
from distribuuuu.files.untrusted import open_regular
from distribuuuu.hints.sources import describe_archives, describe_imagenet, missing_root, missing_split

Splits = dict[str, ImageDataset]

# Name of the only split of a folder without split sub-folders.
WHOLE = "all"


class ScannedFolder(ImageFolder):
    """The images of CLASS/IMAGE below a folder, scanned anew; the index of the folder stays in memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.index = FolderIndex(str(folder), *scan_folder(str(folder), time.time_ns()))
        self.use_index(self.index, None)

    def list_unreadable(self) -> dict[str, str]:
        """Return the folders that cannot be listed, with the reason."""
        reasons = {folder: access_problem(Path(folder)) for folder in self.list_folders()}
        return {folder: reason for folder, reason in reasons.items() if reason}

    def list_ignored(self) -> tuple[list[str], list[str]]:
        """Return the files in class folders that are not images by name, and the images outside of class folders."""
        ignored: list[str] = []
        if self.index.meta["ignored"]:
            known = {*self.index.meta["ignored"]}
            for folder in self.list_folders()[1:]:
                names = sorted(os.listdir(folder)) if os.access(folder, os.R_OK | os.X_OK) else []
                odd = [name for name in names if name[0] != "." and not is_image(name)]
                paths = [os.path.join(folder, name) for name in odd if os.path.splitext(name)[1].lower() in known]
                ignored += [path for path in paths if not os.path.isdir(path)]
        outside = self.index.meta["num_beside"] and sorted(filter(is_image, os.listdir(self.folder)))
        return ignored, [str(self.folder / name) for name in outside or () if not (self.folder / name).is_dir()]

    def list_folders(self) -> list[str]:
        """Return the folder itself and all that are below it in the index."""
        arrays = self.index.arrays
        numbers = range(len(arrays["paths_offsets"]) - 1)
        return [os.path.join(self.folder, packed_name(arrays, "paths", number)) for number in numbers]


def open_folder(root: Path) -> Splits:
    """Return the data sets of a folder by split, the training split first.

    Layouts: SPLIT/CLASS/IMAGE, CLASS/IMAGE, SPLIT.csv (see `ImageList`), and SPLIT/index.bin (see `Packed`). Folders
    are splits if their names are those of `find_splits`.

    Raises:
        ConfigError: the folder does not exist, cannot be listed, or has another layout.
    """
    if not root.is_dir():
        raise ConfigError(Problem(*missing_root("FOLDER", root, "SPLIT/CLASS/IMAGE or CLASS/IMAGE")))
    if reason := access_problem(root):
        raise ConfigError(Problem("FOLDER", f"{root} cannot be listed: {reason}"))
    if hint := describe_imagenet(root):
        command = f"distribuuuu doctor DATA.NAME imagenet TRAIN.DATASET {shlex.quote(str(root))}"
        raise ConfigError(Problem("FOLDER", f"got {root}{hint}, as in: {command}"))
    folders = list_classes(root)
    if names := find_splits(folders, root):
        packs = [name for name in names if (root / name / "index.bin").is_file()]
        return {name: Packed(root, name) if name in packs else ScannedFolder(root / name) for name in names}
    tables = [root / f"{name}.csv" for name in sort_splits(path.stem for path in root.glob("*.csv"))]
    lists: Splits = {path.stem: dataset(path) for path in tables if (dataset := _kind_of_list(path))}
    if lists:
        return lists
    if (root / "index.bin").is_file():
        return {root.name: Packed(root.parent, root.name)}
    if folders:
        return {WHOLE: ScannedFolder(root)}
    has = "images, but no class folders" if any(map(is_image, os.listdir(root))) else "no sub-folder"
    expected = f"expected SPLIT/CLASS/IMAGE, CLASS/IMAGE or SPLIT.csv{describe_archives(root)}"
    raise ConfigError(Problem("FOLDER", f"{root} has {has}; {expected}"))


def _kind_of_list(path: Path) -> type[ImageList] | None:
    """Return the kind of data set that a CSV describes, by its header; None if it is another table."""
    try:
        with open_regular(path, encoding="utf-8-sig") as file:
            header = {column.strip() for column in file.readline(10_000).split(",")}
    except (OSError, UnicodeError):
        return None
    kinds = {"path,label": ImageList, "image,labels": Multilabel}
    return next((kind for columns, kind in kinds.items() if header.issuperset(columns.split(","))), None)


def open_cfg(cfg) -> Splits:
    """Return the training and the evaluation set of a config by split; any registered data set is supported.

    Raises:
        ConfigError: a set cannot be opened.
    """
    dataset, problems = get_dataset(cfg.DATA.NAME), []
    if issubclass(dataset, Archive):
        dataset = type(dataset.__name__, (dataset,), {"index_in_root": False})
    splits: Splits = {}
    for key, train in (("TRAIN", True), ("TEST", False)):
        section = cfg[key]
        has_split = dataset.has_splits and issubclass(dataset, (SplitDataset, Archive, ImageList))
        name = section.SPLIT if has_split else key.lower()
        if name in splits:
            if os.path.realpath(cfg.TRAIN.DATASET) == os.path.realpath(section.DATASET):
                continue  # one split for both
            name = f"{name} ({key})"
        if issubclass(dataset, ImageFolder):
            root, split = Path(section.DATASET), section.SPLIT
            if not (root / split).is_dir():
                missing = missing_split(key, root, split, f"{split}/CLASS/IMAGE")
                missing = missing if root.is_dir() else missing_root(key, root, f"{split}/CLASS/IMAGE")
                problems.append(Problem(*missing, cfg.origins))
                continue
            splits[name] = ScannedFolder(root / split)
            continue
        if issubclass(dataset, ImageList) and not dataset.read_table(cfg, key).problems:  # unknown classes are findings
            splits[name] = dataset.open_split(cfg, key)
            continue
        found = [problem for problem in dataset.find_problems(cfg, train) if problem[0] != "MODEL.NUM_CLASSES"]
        problems += [Problem(*problem, cfg.origins) for problem in found]
        if not found:
            splits[name] = dataset.from_cfg(cfg, train)
    if problems:
        raise ConfigError(problems)
    return splits
