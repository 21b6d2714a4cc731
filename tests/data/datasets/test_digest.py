"""The digest of a data set: equal for equal images, compared over the processes of a run."""

import os
import shutil
from functools import partial

import pytest
from support.processes import on_processes
from support.runs import small_options
from support.sources import SOURCES, write_source
from support.tables import pairwise

from distribuuuu.config import load_cfg
from distribuuuu.data.loader import build_images
from distribuuuu.trainer import evaluate_weights, train_model


@pytest.mark.parametrize("source", SOURCES)
def test_it_does_not_depend_on_the_folder_and_changes_with_an_image(image_folder, small_cfg, tmp_path, source):
    words, _ = write_source(source, image_folder, tmp_path / "one")
    digests = [build_images(small_cfg(*words), train).digest for train in (True, True, False)]
    assert digests[0] == digests[1] != digests[2] and len(digests[0]) == 32
    if not source.startswith("list"):  # their tables have absolute paths
        shutil.copytree(tmp_path / "one", tmp_path / "other")
        moved = [str(word).replace(str(tmp_path / "one"), str(tmp_path / "other")) for word in words]
        assert build_images(small_cfg(*moved), True).digest == digests[0]


def start(action, roots, out):
    words = small_options(roots[int(os.environ["RANK"])], out, "OPTIM.MAX_EPOCH", 1, "TRAIN.BATCH_SIZE", 4)
    action(load_cfg(None, words))


@pytest.mark.parametrize("change, action", pairwise(["more", "label"], [train_model, evaluate_weights]))
def test_processes_that_see_other_images_stop(image_folder, tmp_path, change, action):
    for root in ("one", "other"):
        shutil.copytree(image_folder, tmp_path / root)
    for split in ("train", "val"):
        image = next((tmp_path / "other" / split / "ant").iterdir())
        (shutil.copy if change == "more" else shutil.move)(image, tmp_path / "other" / split / "bee" / "moved.jpg")
    roots = [tmp_path / "one", tmp_path / "other"]
    if action is evaluate_weights:
        train_model(load_cfg(None, small_options(image_folder, tmp_path / "out", "OPTIM.MAX_EPOCH", 1)))
    with pytest.raises(AssertionError) as caught:
        on_processes(2, partial(start, action, roots, tmp_path / "out"))
    section = "TRAIN" if action is train_model else "TEST"
    num = str(caught.value).count(f"ConfigError: {section}.DATASET: the processes do not see")
    assert num == 2, "one of each process"
    text = (tmp_path / "out" / ("test.log" if action is evaluate_weights else "train.log")).read_text()
    assert "the processes do not see the same images" in text
    assert ("names or labels differ" in text) == (change == "label")
