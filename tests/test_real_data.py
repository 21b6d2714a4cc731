"""Real images, where DATA_ROOT names a folder that has them."""

import json
import os
import tarfile
from pathlib import Path

import pytest
import torch
from support.runs import small_options

from distribuuuu.config import load_cfg
from distribuuuu.data.loader import build_loader
from distribuuuu.launch.detect import Launch
from distribuuuu.trainer import train_model

CPU = torch.device("cpu")

pytestmark = pytest.mark.real_data


def data_root(name: str) -> Path:
    path = Path(os.environ["DATA_ROOT"]) / name
    if not path.exists():
        pytest.skip(f"DATA_ROOT has no {name}")
    return path


def test_fashion_mnist_has_the_mean_and_std_that_are_taken_off():
    root = data_root("FashionMNIST").parent
    words = ["DATA.NAME", "fashion_mnist", "MODEL.NUM_CLASSES", "10", "TRAIN.DATASET", str(root)]
    cfg = load_cfg(None, [*words, "TRAIN.IM_SIZE", "28", "TEST.IM_SIZE", "28", "TEST.BATCH_SIZE", "2000"])
    loader = build_loader(cfg, Launch("alone"), CPU, train=False)
    images, labels = next(iter(loader))
    assert len(loader.images) == 10000 and loader.images.classes[9] == "Ankle boot"
    assert abs(float(images.mean())) < 0.05 and abs(float(images.std()) - 1) < 0.05
    assert torch.equal(images[:, 0], images[:, 2]) and sorted(set(labels.tolist())) == list(range(10))


@pytest.fixture(scope="module")
def clothing(tmp_path_factory) -> Path:
    """The photographs of clothes, unpacked."""
    root = tmp_path_factory.mktemp("clothing10")
    with tarfile.open(data_root("clothing10/clothing10_subset.tar")) as archive:
        archive.extractall(root, filter="data")
    return root


def test_photographs_of_clothes_train(clothing, tmp_path):
    words = ["TRAIN.DATASET", str(clothing), "TEST.SPLIT", "test", "MODEL.NUM_CLASSES", "10", "TRAIN.PRINT_FREQ", "30"]
    sizes = ["TRAIN.IM_SIZE", "32", "TEST.IM_SIZE", "36", "OPTIM.MAX_EPOCH", "2", "TRAIN.WORKERS", "2"]
    cfg = load_cfg(None, [*small_options(clothing, tmp_path / "out"), *words, *sizes])
    train_model(cfg)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-2] < losses[0]
    log = (tmp_path / "out" / "train.log").read_text()
    assert "train: 1,192 images, validation: 372 images, 10 classes" in log
