"""Backbones by name: their options, their licenses, and the default of this machine."""

from typing import Any

import torch

from distribuuuu.checkpoint.published_files import DEFAULT
from distribuuuu.models.pretrained import resolve_backbone


def backbone_options(name: str) -> dict[str, Any]:
    """Return MODEL.ARCH, MODEL.KWARGS and FINETUNE.WEIGHTS of a backbone, see models/pretrained.py."""
    backbone = resolve_backbone(name)
    own = {key: value for key, value in backbone.options.items() if key.startswith("MODEL.KWARGS.")}
    arch = {"MODEL.ARCH": backbone.arch} if backbone.arch else {}
    return {**own, **arch, "FINETUNE.WEIGHTS": name}


def default_backbone() -> str:
    """Return the default backbone: a larger one with a GPU."""
    return "timm/convnext_tiny" if torch.cuda.is_available() else DEFAULT


def license_of(name: str) -> str:
    """Return the license of a backbone; empty if it is not known."""
    return resolve_backbone(name).license
