"""Fixtures of all tests: small images, and the config of a small run."""

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.images import draw_folder
from support.runs import small_options

from distribuuuu.config import load_cfg

# Forked processes must not inherit a thread pool, and small tensors are faster without one.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_test_on_the_cluster(request):
    """Let the tests on a Slurm cluster run one at a time: a test of another process may switch off a node."""
    if not request.node.get_closest_marker("slurm"):
        yield
        return
    with open(Path(tempfile.gettempdir()) / f"distribuuuu-tests-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory) -> Path:
    """A folder of 48 training and 37 validation images in three classes; 37 is a prime number."""
    root = tmp_path_factory.mktemp("images")
    draw_folder(root, "train", {"ant": 16, "bee": 16, "cat": 16})
    draw_folder(root, "val", {"ant": 12, "bee": 12, "cat": 13})
    return root


@pytest.fixture
def small_cfg(image_folder, tmp_path) -> Callable:
    """Return small_cfg(KEY, VALUE, ...): the config of a run that takes a second; OUT_DIR is `tmp_path / "out"`."""

    def make(*overrides: Any):
        return load_cfg(None, small_options(image_folder, tmp_path / "out", *overrides))

    return make
