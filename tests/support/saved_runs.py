"""Runs as folders with random weights, without training."""

from pathlib import Path
from typing import Any

import torch

from distribuuuu.config.config_node import iter_options
from distribuuuu.engine.build import make_out_dir, write_config
from distribuuuu.models import build_model


def save_run(cfg, classes: tuple[str, ...] = ("ant", "bee", "cat"), **entries: Any) -> Path:
    """Write config.yaml and best.pth.tar (with entries) of a model with random weights; return the folder."""
    make_out_dir(cfg.OUT_DIR)
    write_config(cfg)
    torch.manual_seed(0)
    model = build_model(cfg)
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 2.0)
        elif tensor.is_floating_point():  # biases and heads of zeros would hide mistakes
            tensor.add_(torch.randn_like(tensor) * (0.2 if tensor.ndim < 2 else 0.02))
    content = {"state_dict": model.state_dict(), "classes": list(classes), "arch": cfg.MODEL.ARCH}
    path = Path(cfg.OUT_DIR) / "best.pth.tar"
    torch.save({**content, "config": dict(iter_options(cfg)), **entries}, path)
    return path.parent
