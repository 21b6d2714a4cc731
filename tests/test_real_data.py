"""Normalization of the real images in the folder DATA_ROOT."""

import os
from pathlib import Path

import pytest
import torch

from distribuuuu.config import load_cfg
from distribuuuu.data.loader import build_loader
from distribuuuu.launch.detect import Launch


@pytest.mark.real_data
def test_normalized_fashion_mnist_has_mean_0_and_std_1():
    root = os.environ.get("DATA_ROOT")
    if not root or not (Path(root) / "FashionMNIST").exists():
        pytest.skip("DATA_ROOT is not set to a folder that contains FashionMNIST")
    overrides = ["DATA.NAME", "fashion_mnist", "MODEL.NUM_CLASSES", "10", "TRAIN.DATASET", root]
    cfg = load_cfg(None, [*overrides, "TRAIN.IM_SIZE", "28", "TEST.IM_SIZE", "28", "TEST.BATCH_SIZE", "2000"])
    loader = build_loader(cfg, Launch("alone"), torch.device("cpu"), train=False)
    images, labels, *_ = next(iter(loader))
    assert len(loader.images) == 10000 and loader.images.classes[9] == "Ankle boot"
    assert abs(float(images.mean())) < 0.05 and abs(float(images.std()) - 1) < 0.05
    assert torch.equal(images[:, 0], images[:, 2]) and sorted(set(labels.tolist())) == list(range(10))
