"""Small trained runs that the tests of this folder share."""

from pathlib import Path

import pytest
from support.runs import train_and_evaluate

from distribuuuu.data.datasets.shapes import _draw_all


@pytest.fixture(scope="session")
def shapes_folder(tmp_path_factory) -> Path:
    """A folder of 200 training and 70 evaluation images of ten shapes."""
    root = tmp_path_factory.mktemp("shapes")
    _draw_all(root, {"train": 200, "val": 70}, 40, 0)
    return root


@pytest.fixture(scope="session")
def shapes_run(shapes_folder, tmp_path_factory) -> Path:
    """OUT_DIR of a run on the shapes that is right on some images and wrong on others."""
    return train_and_evaluate(shapes_folder, tmp_path_factory.mktemp("run") / "out", "OPTIM.MAX_EPOCH", 3)


@pytest.fixture(scope="session")
def labels_run(shapes_folder, tmp_path_factory) -> Path:
    """OUT_DIR of a run with several labels per image."""
    root = tmp_path_factory.mktemp("labels")
    for split in ("train", "val"):
        (root / split).symlink_to(shapes_folder / split)
        images = sorted((shapes_folder / split).rglob("*.jpg"))
        lines = [f"{image.relative_to(shapes_folder)},{image.parent.name};{'ab'[number % 2]}" for number, image in
                 enumerate(images)]  # fmt: skip
        (root / f"{split}.csv").write_text("\n".join(["image,labels", *lines, ""]))
    data = ("DATA.NAME", "multilabel", "MODEL.NUM_CLASSES", 12, "LOSS.NAME", "bce", "TEST.BATCH_SIZE", 70)
    return train_and_evaluate(root, tmp_path_factory.mktemp("run") / "out", *data)
