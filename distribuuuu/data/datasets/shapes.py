"""The built-in data set `shapes`: ten classes of small JPEGs, drawn once into the cache folder."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset, SplitDataset
from distribuuuu.data.datasets.index import IndexedImages, open_folder
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.locks import take_turn

# To be increased with any change of a pixel: a folder of another version is drawn again.
VERSION = 1
MARKER = "README.txt"
HEADING = "shapes: a data set drawn by distribuuuu"
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
    """Draw root/train/<class>/<nnnn>.jpg and root/val/<class>/<nnnn>.jpg once, and return root.

    A complete folder with as many images is returned at once; any other drawing is replaced. Any number of processes
    may call this at the same time and may be killed: `root` is complete or does not exist. The numbers of images are
    those of a split over all classes. If the folder holds other files, an OSError is raised.
    """
    root = Path(root).expanduser().resolve()
    marker = (
        f"{HEADING}\n\nversion {VERSION}\nseed {SEED}\nsize {SIZE} px\n"
        f"train {num_train} images\nval {num_val} images\nclasses {', '.join(CLASSES)}\n\n"
        "This file was written last: the folder is whole. Delete the folder and it will be drawn again.\n"
    )
    if _read_marker(root) != marker:
        with take_turn(root):
            _draw_and_install(root, {"train": num_train, "val": num_val}, marker)
    return root


def _read_marker(root: Path) -> str:
    try:
        return (root / MARKER).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _draw_and_install(root: Path, counts: dict[str, int], marker: str) -> None:
    """Draw into a sibling of `root` and rename it, unless another process has done so."""
    from distribuuuu.data.datasets.shapes_drawing import draw_all

    if (existing := _read_marker(root)) == marker:
        return
    if root.exists() and os.listdir(root) and not existing.startswith(HEADING):
        raise FileExistsError(errno.EEXIST, "the folder holds other files, which are not changed", str(root))
    for left in root.parent.glob(f".{root.name}.*.part"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    part = root.parent / f".{root.name}.{os.urandom(8).hex()}.part"
    try:
        part.mkdir()
        draw_all(part, counts, SIZE, SEED)
        (part / MARKER).write_text(marker, encoding="utf-8")
        shutil.rmtree(root, ignore_errors=True)
        os.replace(part, root)
    finally:
        shutil.rmtree(part, ignore_errors=True)
