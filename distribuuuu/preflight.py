"""What can be known to fail before torch is imported or a process group is joined: the check before the start."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from distribuuuu.batching import plan_batches
from distribuuuu.config import ConfigError, with_origin
from distribuuuu.launch import detect_launch
from distribuuuu.ports import find_port_problem
from distribuuuu.registry import DATASETS


def find_run_problems(cfg, train: bool, nproc: int | None = None, set_keys_only: bool = False) -> list[str]:
    """Return what is wrong with the paths, the data folders and the arithmetic of the batch; takes milliseconds.

    Args:
        cfg: a loaded config.
        train: check what training needs; else what an evaluation needs.
        nproc: the processes that are to be started; None: as the launcher says.
        set_keys_only: speak only of keys that were set: the config has problems already, and a default that does not
            fit may follow from them.
    """
    problems = []
    for key, message in _path_problems(cfg, train):
        if key in cfg.origins or not set_keys_only:
            problems.append(f"{with_origin(cfg, key)}: {message}")
    try:
        launch = detect_launch()
        if launch.rank == 0 and launch.address and (problem := find_port_problem(launch.address, launch.port)):
            problems.append(problem)
        world_size = nproc or launch.world_size
        if train and cfg.TRAIN.BATCH_SIZE > 0 and cfg.TRAIN.GLOBAL_BATCH_SIZE >= 0:
            plan_batches(cfg.TRAIN.BATCH_SIZE, cfg.TRAIN.GLOBAL_BATCH_SIZE, world_size)
    except ConfigError as error:
        problems += error.problems
    return problems


def _path_problems(cfg, train: bool) -> Iterator[tuple[str, str]]:
    name = "dummy" if cfg.MODEL.DUMMY_INPUT else cfg.DATA.NAME
    family = DATASETS.get(name if name in DATASETS else "dummy")
    found = list(family.find_problems(cfg, train=True)) if train else []
    yield from dict.fromkeys([*found, *family.find_problems(cfg, train=False)])
    if cfg.DATA.DECODER == "simplejpeg" and not find_spec("simplejpeg"):
        yield "DATA.DECODER", "the package simplejpeg is not installed: pip install simplejpeg"
    teacher = "" if cfg.DISTILL.WEIGHTS == "pretrained" else cfg.DISTILL.WEIGHTS
    for key, path in (("MODEL.WEIGHTS", cfg.MODEL.WEIGHTS), ("DISTILL.WEIGHTS", teacher)):
        if path and not Path(path).is_file():
            yield key, f"no such file: {path}"
    yield from _out_dir_problems(Path(cfg.OUT_DIR))


def _out_dir_problems(out_dir: Path) -> Iterator[tuple[str, str]]:
    existing = next(folder for folder in (out_dir, *out_dir.absolute().parents) if folder.exists())
    if not existing.is_dir():
        yield "OUT_DIR", f"{existing} is a file, not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield "OUT_DIR", f"{existing} cannot be written to"
