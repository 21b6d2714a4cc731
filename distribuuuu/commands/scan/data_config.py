"""Configs and folders of commands that read images and train nothing."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distribuuuu.config import Config, ConfigError, Problem
from distribuuuu.config.config_node import changed
from distribuuuu.config.options import OPTIONS
from distribuuuu.config.reader import CfgFiles, read_cfg
from distribuuuu.config.registry import dataset_class
from distribuuuu.files.image_files import TRAIN_NAMES, holds_images, list_classes, sort_splits

if TYPE_CHECKING:
    from distribuuuu.data.datasets.base import ImageDataset


def read_data_cfg(cfg_file: CfgFiles, overrides: Sequence[str]) -> tuple[Config, list[Problem]]:
    """Return the tree of `read_cfg` and its problems, except those of options that training alone would need.

    These are options that are not set and do not say how images are read, e.g. a loss that suits the labels.
    """
    cfg, problems = read_cfg(cfg_file, overrides)
    return cfg, [problem for problem in problems if not _is_of_training(cfg, problem)]


def open_images(cfg: Config, train: bool) -> "ImageDataset":
    """Return the training or the evaluation images of a config; their classes may be others than those of the model."""
    from distribuuuu.inference.load_run import open_data, untrusted_data

    family, cfg = dataset_class(cfg), untrusted_data(cfg)
    cfg = changed(cfg, {"MODEL.NUM_CLASSES": family.count_classes(cfg) or cfg.MODEL.NUM_CLASSES})
    found = [problem for problem in family.find_problems(cfg, train) if problem[0] != "MODEL.NUM_CLASSES"]
    if found:
        raise ConfigError([Problem(key, text, cfg.origins) for key, text in found])
    return open_data(cfg, train)


def _is_of_training(cfg: Config, problem: Problem) -> bool:
    keys = [problem.key] if isinstance(problem.key, str) else problem.key
    is_of_data = any(key.startswith("DATA.") and key not in ("DATA.MEAN", "DATA.STD") for key in keys)
    given = {*cfg.origins, *problem.origins}  # a value that cannot be read is in the origins of its problem alone
    return not is_of_data and all(key in OPTIONS and key not in given for key in keys)


def find_splits(names: Iterable[str], folder: Path | None = None) -> list[str]:
    """Return the names of a folder that are splits, in the usual order; empty if they are classes.

    A class may be called "test": of other folders beside it, only "train" makes it a split. A class may be called
    "train" too: below `folder`, it holds images and no classes.
    """
    names = list(names)
    known = sort_splits(names)
    if not known or len(known) == len(names):
        return known
    first = known[0]
    is_class = folder and holds_images(folder / first, depth=1) and not list_classes(folder / first)
    return known if first.lower() in TRAIN_NAMES and not is_class else []
