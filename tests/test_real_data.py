"""Training, normalization and export on the real images in the folder DATA_ROOT."""

import tarfile
from pathlib import Path

import pytest
import torch
from support.commands import command_module
from support.images import find_data
from support.runs import records, small_options

from distribuuuu.config import load_cfg
from distribuuuu.data.decode import DEFAULTS
from distribuuuu.data.loader import build_loader
from distribuuuu.launch.detect import Launch
from distribuuuu.trainer import train_model

CPU = torch.device("cpu")

pytestmark = pytest.mark.real_data


def test_normalized_fashion_mnist_has_mean_0_and_std_1():
    root = find_data("FashionMNIST").parent
    overrides = ["DATA.NAME", "fashion_mnist", "MODEL.NUM_CLASSES", "10", "TRAIN.DATASET", str(root)]
    cfg = load_cfg(None, [*overrides, "TRAIN.IM_SIZE", "28", "TEST.IM_SIZE", "28", "TEST.BATCH_SIZE", "2000"])
    loader = build_loader(cfg, Launch("alone"), CPU, train=False)
    images, labels, *_ = next(iter(loader))
    assert len(loader.images) == 10000 and loader.images.classes[9] == "Ankle boot"
    assert abs(float(images.mean())) < 0.05 and abs(float(images.std()) - 1) < 0.05
    assert torch.equal(images[:, 0], images[:, 2]) and sorted(set(labels.tolist())) == list(range(10))


@pytest.fixture(scope="module")
def clothing(tmp_path_factory) -> Path:
    """Return the extracted folder of clothing10."""
    root = tmp_path_factory.mktemp("clothing10")
    with tarfile.open(find_data("clothing10/clothing10_subset.tar")) as archive:
        archive.extractall(root, filter="data")
    return root


def test_training_on_clothing10_lowers_the_loss(clothing, tmp_path):
    words = ("TEST.SPLIT", "test", "MODEL.NUM_CLASSES", 10, "TRAIN.IM_SIZE", 32, "TEST.IM_SIZE", 36, "TRAIN.WORKERS", 2,
             "TRAIN.PRINT_FREQ", 30, "OPTIM.BASE_LR", 0.01)  # fmt: skip
    train_model(load_cfg(None, small_options(clothing, tmp_path / "out", *words)))
    rows = records(tmp_path / "out")
    first, *_, before_last, last = [row["loss"] for row in rows if row["kind"] == "train"]
    assert (before_last + last) / 2 < first
    log = (tmp_path / "out" / "train.log").read_text()
    assert "train: 1,192 images, validation: 372 images, 10 classes" in log


def test_clothing10_has_no_findings(clothing):
    findings = command_module("doctor.findings")
    scan = command_module("scan.scan").scan_images(findings.open_folder(clothing), DEFAULTS, 2, lambda num: None)
    report = findings.examine(scan, command_module("scan.duplicates").find_groups(scan, DEFAULTS), DEFAULTS)
    assert report["findings"] == [] and report["status"] == "clean" and report["images"] == 1564
