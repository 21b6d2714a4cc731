"""Labels of ImageNet-A, -R, -V2, -Sketch and ReaL for models of the 1000 ImageNet classes (TEST.LABELS)."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import first_few
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.files.image_files import list_classes

if TYPE_CHECKING:
    import numpy as np


def read_timm_file(name: str) -> str:
    """Return the text of a file about ImageNet that timm contains; imports neither timm nor torch."""
    spec = find_spec("timm")
    path = Path(spec.origin if spec and spec.origin else "timm").with_name("data") / "_info" / name
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        message = f"the installed timm lacks {path}; fix: pip install --upgrade timm"
        raise ConfigError(Problem("TEST.LABELS", message)) from None


def read_classes(labels: str = "") -> dict[str, int]:
    """Map the synsets of a preset to outputs of a model, ascending: 200 of ImageNet-A and -R, else all 1000."""
    synsets = read_timm_file("imagenet_synsets.txt").split()
    is_subset = labels in ("imagenet_a", "imagenet_r")
    numbers = map(int, read_timm_file(f"{labels}_indices.txt").split()) if is_subset else range(len(synsets))
    return {synsets[number]: number for number in sorted(numbers)}


def folder_names(labels: str, found: Iterable[str]) -> tuple[str, ...]:
    """Return the class folder of each class: its synset, or for ImageNet-V2 its index if all `found` are numbers."""
    classes = read_classes(labels)
    has_numbers = labels == "imagenet_v2" and all(re.fullmatch("[0-9]+", name) for name in found)
    return tuple(map(str, classes.values())) if has_numbers else tuple(classes)


def explain_more_classes(content: Mapping[str, Any], classes: Sequence[str]) -> str:
    """Return '; fix: ...' for an evaluation of weights on some of their classes, which `content` may name; else ''."""
    known = content.get("classes") or ()
    if {*classes} <= {*known} and len(classes) < len(known):
        fix = "TRAIN.DATASET and TRAIN.SPLIT to the training data, which defines all classes, and TEST.DATASET to these"
        return f"; the images are of some of its classes; fix: set {fix}"
    if not known and {*classes} <= {*read_classes()}:
        return "; fix: set TEST.LABELS imagenet, for weights of the 1000 ImageNet classes, whose synsets these are"
    return ""


def open_preset(family: Any, cfg) -> ImageDataset:
    """Return the evaluation images of a folder with the labels of TEST.LABELS; `family` is the class of the folder."""
    root, split, cache, labels = cfg.TEST.DATASET, cfg.TEST.SPLIT, cfg.DATA.CACHE_DIR, cfg.TEST.LABELS
    if labels == "imagenet_real":
        return RealLabels(family(root, split, cache_dir=cache))
    folder = Path(root) / split
    found = list_classes(folder)
    known = folder_names(labels, found)
    if unknown := sorted({*found} - {*known}):
        names = f"synsets of {labels}, e.g. {next(iter(read_classes(labels)))}"
        names += ", or 0 to 999" if labels == "imagenet_v2" else ""
        message = f"{folder} has class folders {first_few(unknown)}; expected {names}"
        raise ConfigError(Problem("TEST.SPLIT", message))
    images = family(root, split, known, cache)
    images.classes = tuple(read_classes(labels))
    return images


class RealLabels(ImageDataset):
    """The ImageNet validation images with their ReaL labels (Beyer et al., arXiv 2006.07159), one or several each.

    The number in a file name selects the labels. Images without a label are left out. A target is uint8 (1000,).
    """

    has_files = True
    targets = "labels"

    def __init__(self, images: ImageDataset):
        self.classes = tuple(read_classes())
        table = json.loads(read_timm_file("imagenet_real_labels.json"))
        self._files: list[tuple[str, list[int]]] = []
        for path in map(images.describe, range(len(images))):
            match = re.match("ILSVRC2012_val_([0-9]{8})(?![0-9])", Path(path).name)
            if match is None or not 1 <= int(match[1]) <= len(table):
                expected = f"expected ILSVRC2012_val_00000001.JPEG to {len(table):08d}"
                raise ConfigError(Problem("TEST.LABELS", f"{path} is no ImageNet validation image; {expected}"))
            if right := table[int(match[1]) - 1]:
                self._files.append((path, right))

    def __len__(self) -> int:
        return len(self._files)

    def describe(self, index: int) -> str:
        """Return the file of image `index`."""
        return self._files[index][0]

    def label(self, index: int) -> "np.ndarray":
        """Return which classes are right for image `index`."""
        import numpy as np

        return np.isin(np.arange(len(self.classes)), self._files[index][1]).astype(np.uint8)
