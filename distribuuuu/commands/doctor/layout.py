"""The splits of a folder or of a config as data sets; nothing is written."""

import os
import shlex
from pathlib import Path

from distribuuuu.commands.scan.data_config import find_splits, open_images
from distribuuuu.config import ConfigError, Problem
from distribuuuu.data.datasets.base import ImageDataset, SplitDataset, get_dataset
from distribuuuu.data.datasets.folder_scan import scan_folder
from distribuuuu.data.datasets.imagefolder import ImageFolder
from distribuuuu.data.datasets.index import Index
from distribuuuu.files.image_files import is_image, list_classes
from distribuuuu.hints.sources import access_problem, describe_archives, describe_imagenet, missing_root, missing_split

Splits = dict[str, ImageDataset]

# Name of the only split of a folder without split sub-folders.
WHOLE = "all"


class ScannedFolder(ImageFolder):
    """The images of CLASS/IMAGE below a folder, scanned anew; the index of the folder stays in memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.use_index(Index(str(folder), str(folder), *scan_folder(str(folder))))

    def list_outside(self) -> list[str]:
        """Return the images outside of the class folders."""
        names = sorted(filter(is_image, os.listdir(self.folder))) if self.index.meta["num_beside"] else ()
        return [str(self.folder / name) for name in names if not (self.folder / name).is_dir()]


def open_folder(root: Path) -> Splits:
    """Return the data sets of a folder by split, the training split first.

    Layouts: SPLIT/CLASS/IMAGE and CLASS/IMAGE. Folders are splits if their names are those of `find_splits`.

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
        return {name: ScannedFolder(root / name) for name in names}
    if folders:
        return {WHOLE: ScannedFolder(root)}
    command = f"distribuuuu doctor DATA.NAME list (or packed) TRAIN.DATASET {shlex.quote(str(root))}"
    expected = f"has no class folders; expected SPLIT/CLASS/IMAGE or CLASS/IMAGE{describe_archives(root)}"
    raise ConfigError(Problem("FOLDER", f"{root} {expected}; fix: for a list (or a pack): {command}"))


def open_cfg(cfg) -> Splits:
    """Return the training and the evaluation set of a config by split; any registered data set is supported.

    Raises:
        ConfigError: a set cannot be opened.
    """
    dataset, problems = get_dataset(cfg.DATA.NAME), []
    splits: Splits = {}
    for key, train in (("TRAIN", True), ("TEST", False)):
        section = cfg[key]
        name = section.SPLIT if dataset.has_splits and issubclass(dataset, SplitDataset) else key.lower()
        if name in splits:
            if os.path.realpath(cfg.TRAIN.DATASET) == os.path.realpath(section.DATASET):
                continue  # one split for both
            name = f"{name} ({key})"
        try:
            if cfg.DATA.NAME == "imagefolder":
                root, layout = Path(section.DATASET), f"{section.SPLIT}/CLASS/IMAGE"
                if not (root / section.SPLIT).is_dir():
                    is_root = root.is_dir()
                    missing = (
                        missing_split(key, root, section.SPLIT, layout) if is_root else missing_root(key, root, layout)
                    )
                    raise ConfigError(Problem(*missing))
                splits[name] = ScannedFolder(root / section.SPLIT)
            elif issubclass(dataset, SplitDataset):  # unknown classes are findings
                splits[name] = dataset.open_split(cfg, key)
            else:
                splits[name] = open_images(cfg, train)
        except ConfigError as error:
            problems += [Problem(one.key or f"{key}.SPLIT", one.message, cfg.origins) for one in error.problems]
    if problems:
        raise ConfigError(problems)
    return splits
