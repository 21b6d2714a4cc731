"""Reading the batches of a loader, and comparing them."""

import torch
from torch.utils._pytree import tree_leaves

from distribuuuu.config.registry import TASKS, Registry
from distribuuuu.data.batch import Batch
from distribuuuu.data.loader import build_loader
from distribuuuu.launch.detect import Launch
from distribuuuu.tasks.base import Task

CPU = torch.device("cpu")
ALONE = Launch("alone")


def batches_of(cfg, train: bool = True) -> list[Batch]:
    """Return the batches of one epoch."""
    loader = build_loader(cfg, ALONE, CPU, train)
    return list(loader.batches_from(seed=5, epoch=1, first_step=1) if train else loader)


def assert_same_batches(one, other):
    """Compare two lists of batches bit by bit; they must not be empty."""
    assert len(one) == len(other) > 0
    for batch, expected in zip(one, other, strict=True):
        found, wanted = ([leaf for leaf in tree_leaves(part) if leaf is not None] for part in (batch, expected))
        assert len(found) == len(wanted) >= 3 and all(map(torch.equal, found, wanted))  # images, targets and index


# Ways of making batches; those of a data set on the device are made together, or image by image.
WAYS = [(), ("TRAIN.WORKERS", 1), ("TRAIN.WORKERS", 3), ("TRAIN.WORKERS", 3, "DATA.WORKER_KIND", "thread"),
        ("DATA.LOADER", "device")]  # fmt: skip


def register(monkeypatch, registry: Registry, name: str, entry: type) -> None:
    """Register a class for the length of a test."""
    registry.names()
    monkeypatch.setitem(registry._table, name, entry)


def own_task(monkeypatch, views=None, extra=None, base: type[Task] = Task, stages=None) -> tuple[str, str]:
    """Register a task with views(cfg, loader), extra(cfg) and stages(cfg); return the words that select it."""
    methods = {
        "views": views and (lambda cls, cfg, loader="train": views(cfg, loader)),
        "extra_loaders": extra and (lambda cls, cfg: extra(cfg)),
        "augmentation_stages": stages and (lambda cls, cfg: stages(cfg)),
    }
    body = {name: classmethod(method) for name, method in methods.items() if method}
    register(monkeypatch, TASKS, "own", type("Own", (base,), body))
    return "TASK.NAME", "own"
