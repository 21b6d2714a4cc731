"""Labels of ImageNet-A, -R, -V2 and -Sketch for models of the 1000 ImageNet classes (TEST.LABELS)."""

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.errors import first_few
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.files.image_files import list_classes


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
        return "; the images are of some of its classes; fix: set TEST.LABELS weights"
    if not known and {*classes} <= {*read_classes()}:
        return "; fix: set TEST.LABELS imagenet, for weights of the 1000 ImageNet classes, whose synsets these are"
    return ""


def open_preset(family: Any, cfg) -> ImageDataset:
    """Return the evaluation images of a folder with the labels of TEST.LABELS; `family` is the class of the folder."""
    root, split, cache, labels = cfg.TEST.DATASET, cfg.TEST.SPLIT, cfg.DATA.CACHE_DIR, cfg.TEST.LABELS
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
