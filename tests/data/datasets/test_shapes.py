"""The drawn data set: the same bytes every time, a whole folder or none, and no work for a linear model."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from support.archives import files_of
from support.runs import ROOT

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.datasets import shapes
from distribuuuu.data.datasets.shapes import CLASSES, draw_shapes
from distribuuuu.data.loader import build_images


def start_drawing(root: Path, num_train: int) -> subprocess.Popen:
    code = f"from distribuuuu.data.datasets.shapes import draw_shapes; draw_shapes({str(root)!r}, {num_train}, 10)"
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return draw_shapes(tmp_path_factory.mktemp("small") / "shapes", num_train=20, num_val=10)


def test_layout_and_counts(small, monkeypatch):
    classes = {f"{split}/{name}/0000.jpg" for split in ("train", "val") for name in CLASSES}
    assert set(files_of(small)) == classes | {f"train/{name}/0001.jpg" for name in CLASSES}
    with Image.open(small / "train/heart/0001.jpg") as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (72, 72))
    monkeypatch.setattr(shapes, "shipped_file", None)  # a whole folder is returned at once
    assert draw_shapes(small, num_train=20, num_val=10) == small


def test_the_bytes_depend_on_split_class_and_index_alone(small, tmp_path):
    more = files_of(draw_shapes(tmp_path / "more", num_train=30, num_val=20))
    images = files_of(small)
    assert images.items() <= more.items() and len(set(images.values())) == 30


def test_a_killed_process_leaves_no_folder_and_of_others_at_the_same_time_one_draws(small, tmp_path):
    root = tmp_path / "shapes"
    process = start_drawing(root, num_train=20_000)
    while not list(tmp_path.glob(".shapes.part/train/arrow/0009.jpg")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not root.exists()
    drawing = [start_drawing(root, num_train=20) for _ in range(2)]
    assert [process.wait() for process in drawing] == [0, 0] and files_of(root) == files_of(small)
    assert sorted(os.listdir(tmp_path)) == ["shapes", "shapes.lock"]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    words = ["DATA.NAME", "shapes", "DATA.CACHE_DIR", str(tmp_path / "file"), "MODEL.ARCH", "resnet14"]
    with pytest.raises(ConfigError, match=r"DATA.CACHE_DIR: .* cannot be drawn: .*another folder"):
        build_images(load_cfg(None, [*words, "MODEL.NUM_CLASSES", "10"]), train=True)
