"""Fixtures shared by all tests: small real images and a small config."""

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

# Forked processes must not inherit a pool of threads, and small tensors are faster without one.
torch.set_num_threads(1)


# Files are handed to two processes in this order: long ones early, and those that share a cluster far from each other.
FIRST, LAST = ("test_elastic", "test_lessons", "test_sbatch"), "test_srun"


def pytest_collection_modifyitems(items):
    """Put the tests in order, and skip those on real data where there is none."""
    place = {name: number for number, name in enumerate(FIRST)} | {LAST: len(FIRST) + 1}
    items.sort(key=lambda item: place.get(item.path.stem, len(FIRST)))
    for item in items:
        if item.get_closest_marker("real_data") and not os.environ.get("DATA_ROOT"):
            item.add_marker(pytest.mark.skip(reason="DATA_ROOT is not set to a folder with FashionMNIST/"))


@pytest.fixture(autouse=True)
def one_at_a_time_on_the_cluster(request):
    """Let tests on a Slurm cluster wait for each other: those of other processes may switch its nodes off."""
    if "slurm" not in request.node.nodeid.lower():
        yield
        return
    with open(Path(tempfile.gettempdir()) / f"distribuuuu-tests-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory) -> Path:
    """A folder of 48 training and 37 evaluation images in three classes: 37 divides by nothing."""
    root = tmp_path_factory.mktemp("images")
    draw_folder(root, "train", {"ant": 16, "bee": 16, "cat": 16})
    draw_folder(root, "val", {"ant": 12, "bee": 12, "cat": 13})
    return root


@pytest.fixture
def small_cfg(image_folder, tmp_path) -> Callable:
    """Return small_cfg(KEY, VALUE, ...): the config of a run that takes a second, in this test's folder."""

    def make(*words: Any):
        return load_cfg(None, small_options(image_folder, tmp_path / "out", *words))

    return make
