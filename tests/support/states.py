"""A small training state, and a checkpoint in the format of the 2021 distribuuuu."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from distribuuuu.checkpoint.io import read_checkpoint
from distribuuuu.checkpoint.manager import CheckpointManager
from distribuuuu.checkpoint.weights_files import Best
from distribuuuu.config.reader import load_cfg
from distribuuuu.engine.resume import restore_state, restore_task
from distribuuuu.engine.state import TrainState
from distribuuuu.optim.optimizer import build_optimizer
from distribuuuu.tasks.metrics import Meter


def make_state(num_classes: int = 3, best: tuple[float, int] = (0.0, -1), **position) -> TrainState:
    """Return the state of a small model after one step of its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, num_classes))
    optimizer = build_optimizer(load_cfg(), model)
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()
    classes = tuple("abcdefgh"[:num_classes])
    bests, meter = {"raw": Best(*best), "ema": Best()}, Meter({}, num_classes, torch.device("cpu"))
    given = {"classes": classes, "meter": meter, "bests": bests, **position}
    return TrainState(model, optimizer, seed=1, arch="net", global_batch=8, **given)


def original_checkpoint(path: Path, state: TrainState, **options: bool) -> None:
    """Write a checkpoint of the 2021 distribuuuu: numpy scalars in the optimizer's settings, no step, no classes."""
    optimizer = state.optimizer.state_dict()
    for group in optimizer["param_groups"]:
        group["lr"] = np.float64(0.05) * np.float64(1)
        for name in ("maximize", "foreach", "differentiable", "fused"):
            group.pop(name, None)
    content = {"epoch": 4, "state_dict": state.model.state_dict(), "optimizer": optimizer, "best_acc1": 33.5}
    torch.save(content, path, **options)


def save(folder: CheckpointManager, state: TrainState, is_best: bool = False, entries=(), **options) -> Path:
    """Save a state, as after an evaluation that was the best one if it `is_best`, and wait until it is on disk."""
    content = {**state.to_dict(), **dict(entries)}
    if is_best:
        content |= {"evaluations": {"raw": {"top1": 1.0}}, "best_epoch": content["epoch"]}
    path = folder.save(content, **options)
    folder.finish()
    return path


def load(state: TrainState, path: Path) -> None:
    """Restore a state, without a task, from a file."""
    restore_state(state, content := read_checkpoint(path), path)
    restore_task(SimpleNamespace(state_dict=dict, rank_state_dict=dict), content.get("task"), path)
