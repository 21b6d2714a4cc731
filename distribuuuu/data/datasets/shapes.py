"""The built-in data set `shapes`: ten classes of small JPEGs, drawn once into the cache folder."""

import os
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.locate import shipped_file
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset, SplitDataset
from distribuuuu.data.datasets.index import IndexedImages, open_folder
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.locks import take_turn

CLASSES = ("arrow", "circle", "crescent", "cross", "heart", "hourglass", "ring", "square", "star", "triangle")
# The side of an image in pixels, and the seed of all.
SIZE, SEED = 72, 0


@DATASETS.register("shapes")
class Shapes(IndexedImages):
    """The drawn images, read like any other folder of images."""

    has_files = True
    num_classes, num_images = len(CLASSES), 2000
    has_splits = False
    mean, std = (0.489, 0.495, 0.491), (0.233, 0.256, 0.229)

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield a wrong number of classes; an incomplete folder is drawn again and needs no check."""
        return super(SplitDataset, cls).find_problems(cfg, train)

    @classmethod
    def open_split(cls, cfg, name: str, trained: ImageDataset | None = None) -> "Shapes":
        """Return the set; draw it if it does not exist yet."""
        cache = cache_folder(cfg.DATA.CACHE_DIR)
        try:
            root = draw_shapes(cache / "shapes")
        except OSError as error:
            problem = f"{cache / 'shapes'} cannot be drawn: {error.strerror or error}; fix: set it to another folder"
            raise ConfigError(Problem("DATA.CACHE_DIR", problem)) from error
        return cls(open_folder(root, "train" if name == "TRAIN" else "val", cache))


def draw_shapes(root: str | os.PathLike, num_train: int = 2000, num_val: int = 500) -> Path:
    """Draw root/train/<class>/<nnnn>.jpg and root/val/<class>/<nnnn>.jpg, unless the folder exists; return root.

    Any number of processes may call this at the same time and may be killed: `root` is complete or does not exist. The
    numbers of images are those of a split over all classes.
    """
    root = Path(root).expanduser().resolve()
    if not root.exists():
        part = root.with_name(f".{root.name}.part")
        with take_turn(root):
            shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
            if not root.exists():
                part.mkdir()
                draw_all = runpy.run_path(str(shipped_file("configs/shapes/drawing.py")))["draw_all"]
                draw_all(part, {"train": num_train, "val": num_val}, SIZE, SEED)
                os.replace(part, root)
    return root
