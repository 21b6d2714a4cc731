"""Folders of images, one sub-folder a class: ROOT/SPLIT/CLASS/IMAGE, at any depth below CLASS."""

import os
from collections.abc import Iterator
from pathlib import Path

from distribuuuu.datasets.image_set import ImageSet, contradiction
from distribuuuu.registry import DATASETS, did_you_mean

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


@DATASETS.register("imagefolder")
class ImageFolder(ImageSet):
    """The images below root/split; labels follow the sorted class names.

    Args:
        root: the folder of the data.
        split: its sub-folder with the classes.
        classes: the class names to label by, when the split may hold only some of them; None: its own.
    """

    def __init__(self, root: str | os.PathLike, split: str, classes: tuple[str, ...] | None = None):
        self.folder = Path(root) / split
        self.classes = classes or list_classes(self.folder)
        self._samples = [
            (path, label) for label, name in enumerate(self.classes) for path in list_images(self.folder / name)
        ]

    @classmethod
    def from_cfg(cls, cfg, train: bool) -> "ImageFolder":
        """Return the set; evaluation labels by the training classes, so a class without evaluation images is right."""
        if train:
            return cls(cfg.TRAIN.DATASET, cfg.TRAIN.SPLIT)
        return cls(cfg.TEST.DATASET, cfg.TEST.SPLIT, list_classes(Path(cfg.TRAIN.DATASET) / cfg.TRAIN.SPLIT) or None)

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for missing folders, empty classes and wrong numbers of classes."""
        section = "TRAIN" if train else "TEST"
        root, split = cfg[section].DATASET, cfg[section].SPLIT
        found = list(_folder_problems(section, Path(root), split))
        yield from found
        classes = list_classes(Path(root) / split)
        if found or not classes:
            return
        trained = () if train else list_classes(Path(cfg.TRAIN.DATASET) / cfg.TRAIN.SPLIT)
        extra = sorted(set(classes) - set(trained))
        if trained and extra:
            yield f"{section}.SPLIT", f"{Path(root) / split} has classes that the training data lacks: {_some(extra)}"
        elif not trained and len(classes) != cfg.MODEL.NUM_CLASSES:
            yield "MODEL.NUM_CLASSES", contradiction(cfg.MODEL.NUM_CLASSES, len(classes), str(Path(root) / split))

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, index: int):
        """Return image `index` as an RGB PIL image."""
        from PIL import Image

        with open(self._samples[index][0], "rb") as file, Image.open(file) as image:
            return image.convert("RGB")

    def label(self, index: int) -> int:
        """Return the class of image `index`, from 0."""
        return self._samples[index][1]

    def where(self, index: int) -> str:
        """Return the file of image `index`."""
        return self._samples[index][0]


def list_classes(folder: str | os.PathLike) -> tuple[str, ...]:
    """Return the sorted names of the sub-folders, without hidden ones; empty when there is no such folder."""
    if not os.path.isdir(folder):
        return ()
    with os.scandir(folder) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")))


def list_images(folder: str | os.PathLike) -> Iterator[str]:
    """Yield the image files below a folder in sorted order, following links, by their extension."""
    if not os.path.isdir(folder):
        return
    for parent, _, names in sorted(os.walk(folder, followlinks=True)):
        for name in sorted(names):
            if name.lower().endswith(EXTENSIONS) and not name.startswith("."):
                yield os.path.join(parent, name)


def _has_image(folder: Path) -> bool:
    """Tell whether a folder holds an image; stops at the first, so a large folder costs nothing."""
    for _, _, names in os.walk(folder, followlinks=True):
        if any(name.lower().endswith(EXTENSIONS) and not name.startswith(".") for name in names):
            return True
    return False


def _folder_problems(section: str, root: Path, split: str) -> Iterator[tuple[str, str]]:
    folder = root / split
    layout = f"{split}/CLASS/IMAGE"
    if not root.is_dir():
        beside = list_classes(root.parent)
        yield f"{section}.DATASET", f"no such folder: {root}; it should hold {layout}{did_you_mean(root.name, beside)}"
    elif not folder.is_dir():
        beside = list_classes(root)
        has = f"it has {_some(beside)}" if beside else f"it should hold {layout}"
        yield f"{section}.SPLIT", f"no folder {split!r} in {root}; {has}{did_you_mean(split, beside)}"
    elif not list_classes(folder):
        yield f"{section}.SPLIT", f"{folder} has no class folders; it should hold CLASS/IMAGE"
    else:
        empty = [name for name in list_classes(folder) if not _has_image(folder / name)]
        if empty:
            yield f"{section}.SPLIT", f"{folder} has class folders without an image: {_some(empty)}; remove them"


def _some(names: list[str] | tuple[str, ...], num: int = 5) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - num} more" if len(names) > num else ""
    return ", ".join(names[:num]) + more
