"""Backbones by name: their options, and the default of this machine."""

from typing import Any

import torch

from distribuuuu.checkpoint.published_files import DEFAULT
from distribuuuu.config import ConfigError
from distribuuuu.models.pretrained import Backbone, read_backbone, resolve_backbone

# The default with a GPU; Apache-2.0.
LARGE, IMAGENET_CLASSES = "timm/convnext_tiny", 1000


def backbone_options(backbone: Backbone) -> dict[str, Any]:
    """Return the options of a training that starts with a backbone."""
    own = {key: value for key, value in backbone.options.items() if key.startswith("MODEL.KWARGS.")}
    return {**own, **({"MODEL.ARCH": backbone.arch} if backbone.arch else {}), "FINETUNE.WEIGHTS": backbone.name}


def default_backbone() -> tuple[str, str]:
    """Return the default backbone, and why it is the default: with a GPU a larger one, if its weights can be had."""
    if not torch.cuda.is_available():
        return DEFAULT, "without a GPU"
    try:
        read_backbone(resolve_backbone(LARGE), IMAGENET_CLASSES)
    except ConfigError:
        return DEFAULT, f"as {LARGE} cannot be downloaded"
    return LARGE, "with a GPU"
