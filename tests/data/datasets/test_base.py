"""The interface of a data set: what a new one must define, and what it inherits."""

import csv
from pathlib import Path

import pytest
from support.batches import ALONE, CPU

from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.loader import build_loader
from distribuuuu.engine.preflight import find_run_problems, resolve_num_classes


class CsvImages(ImageDataset):
    has_files = True

    def __init__(self, root, split, classes=None):
        with open(Path(root) / f"{split}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        self.paths = [str(Path(root) / row["image"]) for row in rows]
        self.classes = classes or tuple(sorted({row["label"] for row in rows}))
        self.labels = [self.classes.index(row["label"]) for row in rows]

    @classmethod
    def from_cfg(cls, cfg, train):
        training = cls(cfg.TRAIN.DATASET, cfg.TRAIN.SPLIT)
        return training if train else cls(cfg.TEST.DATASET, cfg.TEST.SPLIT, training.classes)

    def describe(self, index):
        return self.paths[index]


@pytest.fixture
def cfg_of(small_cfg, monkeypatch, tmp_path):
    def make(dataset, *words):
        DATASETS.get("dummy")
        monkeypatch.setitem(DATASETS._table, "mine", dataset)
        cfg = small_cfg("DATA.NAME", "mine", "MODEL.NUM_CLASSES", 0, "OUT_DIR", tmp_path / "out", *words)
        assert find_run_problems(cfg, train=True) == []
        return resolve_num_classes(cfg)

    return make


def test_image_files_need_classes_labels_and_describe(cfg_of, image_folder, tmp_path):
    for split in ("train", "val"):
        paths = sorted((image_folder / split).rglob("*.jpg"))
        lines = [f"{path},{path.parent.name}" for path in paths if split == "train" or path.parent.name != "bee"]
        (tmp_path / f"{split}.csv").write_text("\n".join(["image,label", *lines]))
    cfg = cfg_of(CsvImages, "TRAIN.DATASET", tmp_path, "TEST.DATASET", tmp_path)
    loader = build_loader(cfg, ALONE, CPU, train=False)
    assert loader.images.classes == ("ant", "bee", "cat") and set(loader.images.labels) == {0, 2}
    assert loader.images.read(0) == Path(loader.images.describe(0)).read_bytes()
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "val.csv").write_text("image,label\nempty.jpg,ant\n")
    with pytest.raises(ValueError, match="1 of 1 images are broken: .*empty.jpg: ValueError: the file is empty"):
        build_loader(cfg, ALONE, CPU, train=False)
