"""Every source of images: the batches, the killed run and the predictions of class folders with the same images."""

from pathlib import Path

import numpy as np
import pytest
from support.batches import WAYS, assert_same_batches, batches_of
from support.runs import assert_same_run, small_options
from support.sources import SOURCES, write_source
from support.tables import slow

from distribuuuu.config import load_cfg
from distribuuuu.data.loader import build_images
from distribuuuu.engine.preflight import find_run_problems
from distribuuuu.testing import stop_in_step
from distribuuuu.trainer import train_model

# Each source with two of the ways, one of them in the slow tier.
CASES = [(source, WAYS[place]) if (place == 0) == (number % 3 == 0) else slow(source, WAYS[place])
         for number, source in enumerate(SOURCES) for place in (0, 1 + number % 4)]  # fmt: skip
FAMILIES = ("archive shards", "archive deflated", "imagenet tars", "list csv", "torchvision")
EVERY_STEP = ("CHECKPOINT.EVERY_STEPS", 1)


@pytest.mark.parametrize("source, way", CASES)
def test_batches_are_those_of_class_folders(image_folder, small_cfg, tmp_path, source, way):
    words, plain = write_source(source, image_folder, tmp_path / "data")
    own, folders = small_cfg(*words), small_cfg(*plain)
    assert not list(find_run_problems(own, train=True))
    for train in (True, False):
        assert_same_batches(batches_of(small_cfg(*words, *way), train), batches_of(folders, train))
        images, expected = build_images(own, train), build_images(folders, train)
        assert len(images) == len(expected) and len(images.classes) == len(expected.classes)
        assert all(images.read(i) == expected.read(i) for i in range(0, len(images), 7))


def train_on(root: Path, out: Path, *words: object) -> None:
    train_model(load_cfg(None, small_options(root, out, *words)))


def assert_same_predictions(one: Path, other: Path) -> None:
    own, expected = (np.load(out / "predictions.npz") for out in (one, other))
    for name in ("label", "loss", "logits"):
        np.testing.assert_array_equal(own[name], expected[name])
    assert len(own["path"]) == len(set(own["path"])) == len(expected["path"])


@pytest.mark.parametrize("source", [*map(slow, FAMILIES)])
def test_a_killed_run_resumes_bitwise(image_folder, tmp_path, source):
    words, plain = write_source(source, image_folder, tmp_path / "data")
    own, folders = tmp_path / "own", tmp_path / "folders"
    stop_in_step(6, train_on, image_folder, own, *words, *EVERY_STEP)
    train_on(image_folder, own, *words, *EVERY_STEP, "TRAIN.WORKERS", 3, "DATA.WORKER_KIND", "thread")
    assert "resumed" in (own / "train.log").read_text()
    train_on(image_folder, folders, *plain)
    assert_same_run(own, folders)
    assert_same_predictions(own, folders)
