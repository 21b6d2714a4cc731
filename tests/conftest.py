"""Fixtures of all tests. They import what needs torch themselves: a process that hands tests to others needs none."""

import fcntl
import gc
import logging
import os
import random
import runpy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distribuuuu.config import load_cfg
from distribuuuu.config.locate import shipped_file
from distribuuuu.launch.signals import SignalState


def pytest_collectstart():
    """Prepare a process that runs tests: forked ones must not inherit a thread pool, and small tensors need none."""
    import torch

    torch.set_num_threads(1)
    # If the first backward pass of a process comes after an export of torch, it starts threads for devices that the
    # export has registered, and no process that is forked later could compute gradients.
    torch.zeros((), requires_grad=True).backward()


def pytest_collection_finish():
    """Exempt what the imports have left from garbage collection, which takes 0.5 s of a test that requests it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def isolated_state():
    """Start each test with the same random state; restore the environment and the settings that a run changes."""
    import numpy as np
    import torch

    for seed in (random.seed, np.random.seed, torch.default_generator.manual_seed):
        seed(9876)  # not a seed that a test sets itself
    environment, cudnn = dict(os.environ), torch.backends.cudnn
    flags, precision = (cudnn.benchmark, cudnn.deterministic), torch.get_float32_matmul_precision()
    loggers = [logging.getLogger(name) for name in ("distribuuuu", "torch.distributed")]
    log_settings = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    SignalState.current = SignalState()
    yield
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    cudnn.benchmark, cudnn.deterministic = flags
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    for logger, handlers, level, propagate in log_settings:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture(autouse=True)
def one_test_on_the_cluster(request):
    """Let the tests on a Slurm cluster run one at a time: a test of another process may switch off a node."""
    if not request.node.get_closest_marker("slurm"):
        yield
        return
    with open(Path(tempfile.gettempdir()) / f"distribuuuu-tests-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def draw_splits(root: Path, train: list[int], val: list[int]) -> Path:
    from support.images import draw_folder

    for split, numbers in (("train", train), ("val", val)):
        draw_folder(root, split, dict(zip(("ant", "bee", "cat"), numbers, strict=True)))
    return root


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory) -> Path:
    """A folder of 48 training and 37 validation images in three classes; 37 is a prime number."""
    return draw_splits(tmp_path_factory.mktemp("images"), [16, 16, 16], [12, 12, 13])


@pytest.fixture(scope="session")
def sixty_images(tmp_path_factory) -> Path:
    """A folder of 60 training and 20 validation images in three classes."""
    return draw_splits(tmp_path_factory.mktemp("sixty_images"), [20, 20, 20], [6, 7, 7])


@pytest.fixture(scope="module")
def object_server() -> Iterator:
    """A server of the S3 protocol; the test is skipped if a package is missing."""
    from support.object_store import object_store

    with object_store() as server:
        yield server


@pytest.fixture
def small_cfg(image_folder, tmp_path) -> Callable:
    """Return small_cfg(KEY, VALUE, ...): the config of a run that takes a second; OUT_DIR is `tmp_path / "out"`."""
    from support.runs import small_options

    def make(*overrides: Any):
        return load_cfg(None, small_options(image_folder, tmp_path / "out", *overrides))

    return make


@pytest.fixture(scope="session")
def finished_run(image_folder, tmp_path_factory) -> Path:
    """OUT_DIR of a finished run of the config of `small_cfg`; tests do not change it."""
    from support.runs import small_options, train_model

    out_dir = tmp_path_factory.mktemp("finished")
    train_model(load_cfg(None, small_options(image_folder, out_dir)))
    return out_dir


@pytest.fixture
def copied_run(finished_run, tmp_path) -> Path:
    """A copy of `finished_run` in the OUT_DIR of `small_cfg`."""
    return Path(shutil.copytree(finished_run, tmp_path / "out"))


@pytest.fixture(scope="session")
def shapes_folder(tmp_path_factory) -> Path:
    """A folder of 200 training and 70 evaluation images of ten shapes."""
    draw_all = runpy.run_path(str(shipped_file("configs/shapes/drawing.py")))["draw_all"]
    root = tmp_path_factory.mktemp("shapes")
    draw_all(root, {"train": 200, "val": 70}, 40, 0)
    return root


@pytest.fixture(scope="session")
def shapes_run(shapes_folder, tmp_path_factory) -> Path:
    """OUT_DIR of a run on the shapes that is right on some images and wrong on others."""
    from support.runs import train_and_evaluate

    return train_and_evaluate(shapes_folder, tmp_path_factory.mktemp("run") / "out", "OPTIM.MAX_EPOCH", 3)


@pytest.fixture(scope="session")
def labels_run(shapes_folder, tmp_path_factory) -> Path:
    """OUT_DIR of a run with several labels per image."""
    from support.runs import train_and_evaluate

    root = tmp_path_factory.mktemp("labels")
    for split in ("train", "val"):
        (root / split).symlink_to(shapes_folder / split)
        images = sorted((shapes_folder / split).rglob("*.jpg"))
        lines = [f"{image.relative_to(shapes_folder)},{image.parent.name};{'ab'[number % 2]}" for number, image in
                 enumerate(images)]  # fmt: skip
        (root / f"{split}.csv").write_text("\n".join(["image,labels", *lines, ""]))
    data = ("DATA.NAME", "multilabel", "MODEL.NUM_CLASSES", 12, "LOSS.NAME", "bce", "TEST.BATCH_SIZE", 70)
    return train_and_evaluate(root, tmp_path_factory.mktemp("run") / "out", *data)
