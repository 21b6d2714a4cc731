"""Folders of images, one sub-folder per class: ROOT/SPLIT/CLASS/IMAGE, at any depth below CLASS."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from distribuuuu.config.options import OF_WEIGHTS, TEST_SETS
from distribuuuu.config.reader import COMMAND_LINE
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset, image_extensions
from distribuuuu.data.datasets.index import Index, IndexedImages, open_folder
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.image_files import EXTENSIONS, SPLIT_NAMES, holds_images, list_classes


@DATASETS.register("imagefolder")
class ImageFolder(IndexedImages):
    """The images below root/split; labels follow the sorted class names, or `classes`, of which it may lack some."""

    has_files = True

    def __init__(
        self,
        root: str | os.PathLike,
        split: str,
        classes: Sequence[str] | None = None,
        cache_dir: str = "",
        extensions: tuple[str, ...] = EXTENSIONS,
    ):
        self.use_index(open_folder(root, split, cache_folder(cache_dir), extensions), classes)

    def use_index(self, index: Index, classes: Sequence[str] | None = None) -> None:
        """Read the images of an index, in the order of the labels."""
        import numpy as np

        IndexedImages.__init__(self, index, classes)
        if len(self.labels) and (np.diff(self.labels) < 0).any():
            self._order = np.argsort(self.labels, kind="stable")
            self.labels = np.asarray(self.labels)[self._order]

    @classmethod
    def open_split(cls, cfg, name: str, trained: ImageDataset | None = None) -> ImageDataset:
        """Return the images of cfg.TRAIN or cfg.TEST; the training folder is not scanned to label the other."""
        if name == "TEST" and cfg.TEST.LABELS in TEST_SETS:
            from distribuuuu.data.datasets.imagenet_labels import open_preset

            return open_preset(cls, cfg)
        classes = (cls.trained_classes(cfg) or None) if name == "TEST" else None
        section, folder = cfg[name], cls.split_path(cfg, name)
        is_split = folder.name == section.SPLIT and os.path.realpath(folder) != os.path.realpath(section.DATASET)
        root, split = (section.DATASET, section.SPLIT) if is_split else os.path.split(folder)
        return cls(root, split, classes, cfg.DATA.CACHE_DIR, image_extensions(cfg))

    @classmethod
    def open_training(cls, cfg) -> None:
        """Return None: see `open_split`."""
        return

    @classmethod
    def trained_classes(cls, cfg) -> tuple[str, ...]:
        """Return the names of the training folders or, with TEST.LABELS weights, of the classes of the weights."""
        if cfg.TEST.LABELS == OF_WEIGHTS:
            from distribuuuu.checkpoint.weights_files import read_class_names

            return read_class_names(cfg.MODEL.WEIGHTS or cfg.OUT_DIR)
        return list_classes(cls.split_path(cfg, "TRAIN"))

    @classmethod
    def split_path(cls, cfg, name: str) -> Path:
        """Return the folder of the classes of cfg.TRAIN or cfg.TEST.

        It is TEST.DATASET itself if that has no TEST.SPLIT, but folders of trained classes.
        """
        root = Path(cfg[name].DATASET)
        root = root if root.name not in ("", "..") else root.resolve()
        folder = root / cfg[name].SPLIT
        is_chosen = cfg.TEST.DATASET == cfg.TRAIN.DATASET or cfg.origins.get("TEST.SPLIT") == COMMAND_LINE
        if name == "TRAIN" or is_chosen or folder.exists() or not root.name:
            return folder
        found, trained = {*list_classes(root)}, {*cls.trained_classes(cfg)}
        is_set = found & trained if trained else len(found) == cfg.MODEL.NUM_CLASSES and not found & {*SPLIT_NAMES}
        return root if found and is_set else folder

    @classmethod
    def find_problems(cls, cfg, train: bool) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for problems with the folders and the classes."""
        name = "TRAIN" if train else "TEST"
        folder = cls.split_path(cfg, name)
        classes, extensions = list_classes(folder), image_extensions(cfg)
        if train and cfg.TEST.LABELS:
            message = f"got {cfg.TEST.LABELS} in training; fix: leave it empty, and set it for `distribuuuu test`"
            yield "TEST.LABELS", message
        elif not classes or not all(holds_images(folder / one, extensions=extensions) for one in classes):
            from distribuuuu.hints.sources import explain_folder

            found = [*explain_folder(name, Path(cfg[name].DATASET), cfg[name].SPLIT, extensions)]
            yield from found or super().find_problems(cfg, train)
        else:
            yield from super().find_problems(cfg, train)

    @classmethod
    def count_classes(cls, cfg) -> int:
        """Return the number of training classes; without training data, of evaluation classes."""
        return len(cls.trained_classes(cfg) or list_classes(cls.split_path(cfg, "TEST")))
