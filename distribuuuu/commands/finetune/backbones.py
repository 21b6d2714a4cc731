"""Backbones by name: their options, their licenses, and the default of this machine."""

import os
from typing import Any

import torch

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.checkpoint.weights_files import find_weights_file


def backbone_options(name: str) -> dict[str, Any]:
    """Return MODEL.ARCH and FINETUNE.WEIGHTS of a backbone: timm/NAME, a run or a file."""
    if name.startswith("timm/") and not os.path.exists(name):
        return {"MODEL.ARCH": name, "FINETUNE.WEIGHTS": "pretrained"}
    content = read_checkpoint(find_weights_file(name))
    config = content.get("config")
    config = config if isinstance(config, dict) else {}
    own = {key: value for key, value in config.items() if key == "MODEL.ARCH" or key.startswith("MODEL.KWARGS.")}
    return {**own, "FINETUNE.WEIGHTS": name}


def default_backbone() -> str:
    """Return the default backbone: a larger one with a GPU."""
    return "timm/convnext_tiny" if torch.cuda.is_available() else "timm/tf_efficientnet_lite0"


def license_of(name: str) -> str:
    """Return the license of a backbone; empty if it is not known."""
    if not name.startswith("timm/"):
        return ""
    import timm

    published = timm.get_pretrained_cfg(name.removeprefix("timm/"))
    return str((published and published.license) or "")
