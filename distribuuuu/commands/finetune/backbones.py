"""Backbones of a fine-tuning: found before any image is read, their options, and the default of this machine."""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from distribuuuu.checkpoint.foreign_files import OrderError, match_in_order
from distribuuuu.checkpoint.published_files import DEFAULT
from distribuuuu.config import ConfigError, Problem
from distribuuuu.config.model_names import is_published
from distribuuuu.models.find_architecture import ModelSpec, find_architecture
from distribuuuu.models.head import find_head_of
from distribuuuu.models.pretrained import Backbone, read_backbone, resolve_backbone

# The default with a GPU; Apache-2.0.
LARGE, IMAGENET_CLASSES = "timm/convnext_tiny", 1000
_OF_TENSORS = "MODEL.ARCH timm/NAME, the model that its tensors fit, e.g. MODEL.ARCH timm/resnet50"


def open_backbones(names: Sequence[str], arch: str = "") -> dict[str, Backbone]:
    """Return the backbones of names, whose weights are here or have been downloaded.

    Raises:
        ConfigError: with each name that has no weights, or no architecture without `arch`, MODEL.ARCH.
    """
    found, problems = dict[str, Backbone](), list[Problem]()
    for name in names:
        try:
            if not (is_published(name) or os.path.exists(os.path.expanduser(name))):  # as FINETUNE.WEIGHTS, a path
                name = f"{find_architecture(name).source}/{name}"
            found[name] = resolve_backbone(name)
            if not found[name].path:
                read_backbone(found[name], IMAGENET_CLASSES)
            if not (found[name].arch or arch):
                content = read_backbone(found[name], IMAGENET_CLASSES)
                fitting = " or ".join(f"MODEL.ARCH {one}" for one in find_fitting(found[name].source, content))
                fix = f"{fitting}, whose tensors have these shapes" if fitting else _OF_TENSORS
                raise ConfigError(f"{name} does not name its architecture; fix: add {fix}")
        except ConfigError as error:
            problems.append(Problem("--backbone", str(error).removeprefix("MODEL.ARCH: ")))
    if arch and not problems and all(one.arch not in ("", arch) for one in found.values()):
        names = ", ".join(f"{name} is {one.arch}" for name, one in found.items())
        problems.append(Problem("MODEL.ARCH", f"got {arch}, but {names}; fix: leave it out"))
    if problems:
        raise ConfigError(problems)
    return found


def find_fitting(path: str, content: Mapping[str, Any]) -> list[str]:
    """Return at most two models of timm of a name similar to that of a file, whose tensors fit in their order."""
    import timm

    stem = re.sub("[-.][0-9a-f]{8}$", "", Path(path).stem).lower().replace("-", "_")  # without the beginning of a hash
    found = list[str]()
    for name in (one for one in get_close_matches(stem, timm.list_models(), 12, 0.0) if len(found) < 2):
        spec = ModelSpec(find_architecture(f"timm/{name}"), IMAGENET_CLASSES, {}, {})
        if model := spec.build_on_meta():
            with contextlib.suppress(OrderError):
                match_in_order(model, content["state_dict"], find_head_of(spec, model))
                found.append(f"timm/{name}")
    return found


def backbone_options(backbone: Backbone) -> dict[str, Any]:
    """Return the options of a training that starts with a backbone."""
    images = {"DATA.CHANNELS": 3, "DATA.PIXELS": "uint8"}
    is_other = any(backbone.options.get(key, value) != value for key, value in images.items())
    own = {key: value for key, value in backbone.options.items()
           if key.startswith("MODEL.KWARGS.") or images.get(key, value) != value
           or (is_other and value and key in ("DATA.MEAN", "DATA.STD"))}  # fmt: skip
    return {**own, **({"MODEL.ARCH": backbone.arch} if backbone.arch else {}), "FINETUNE.WEIGHTS": backbone.name}


def default_backbone() -> tuple[str, str]:
    """Return the default backbone, and why it is the default: with a GPU a larger one, if its weights can be had."""
    if not torch.cuda.is_available():
        return DEFAULT, "without a GPU"
    try:
        open_backbones([LARGE])
    except ConfigError:
        return DEFAULT, f"as {LARGE} cannot be downloaded"
    return LARGE, "with a GPU"
