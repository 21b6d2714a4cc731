"""ImageNet as it is distributed: the images and labels of class folders, and what is missing."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest
from support.archives import SYNSETS, write_imagenet, write_tar
from support.commands import run_command
from support.runs import errors_of
from support.tables import slow

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.registry import DATASETS
from distribuuuu.data.datasets.imagefolder import ImageFolder

load_cfg(None, ["DATA.NAME", "imagenet"])  # imports the plug-in
ImageNet = DATASETS.get("imagenet")
read_labels = sys.modules[ImageNet.__module__].read_labels

LAYOUTS = ("tars", slow("kaggle"), "flat")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_are_those_of_class_folders(image_folder, small_cfg, tmp_path, capsys, layout):
    root, plain = write_imagenet(image_folder, tmp_path, layout)
    own = small_cfg("DATA.NAME", "imagenet", "TRAIN.DATASET", root)
    folders = small_cfg("TRAIN.DATASET", plain)
    for train in (True, False):
        images, expected = ImageNet.from_cfg(own, train), ImageFolder.from_cfg(folders, train)
        assert images.classes == expected.classes == tuple(sorted(SYNSETS.values()))
        assert [images.read(i) for i in range(len(images))] == [expected.read(i) for i in range(len(expected))]
        assert [images.label(i) for i in range(len(images))] == [expected.label(i) for i in range(len(expected))]
        names = {Path(images.describe(i)).name.rpartition(":")[2] for i in range(len(images))}
        assert names == {Path(expected.describe(i)).name for i in range(len(expected))}
    assert not errors_of(root, tmp_path, "DATA.NAME", "imagenet")
    assert not errors_of(plain, tmp_path, "DATA.NAME", "imagenet")
    assert "as ImageNet is distributed; fix: set DATA.NAME imagenet" in errors_of(root, tmp_path)
    assert run_command("doctor", root) == 2
    command = shlex.split(capsys.readouterr().err.rpartition("as in: ")[2])
    assert run_command("doctor", *command[2:], "DATA.CACHE_DIR", tmp_path / "cache") == 0


def test_what_is_missing_is_named(image_folder, tmp_path):
    root, _ = write_imagenet(image_folder, tmp_path, "tars")
    (root / "ILSVRC2012_devkit_t12.tar.gz").rename(tmp_path / "kit")
    words = "DATA.NAME", "imagenet"
    message = f"{root} has the validation images, but not their labels; fix: put ILSVRC2012_devkit_t12.tar.gz of"
    assert f"TEST.DATASET (command line): {message}" in errors_of(root, tmp_path, *words)
    shutil.copy(tmp_path / "kit", root / "ILSVRC2012_devkit_t12.tar.gz")
    (root / "ILSVRC2012_img_val.tar").unlink()
    assert "has no validation images of ImageNet; expected ILSVRC2012_img_val.tar" in errors_of(root, tmp_path, *words)
    (root / "ILSVRC2012_img_train.tar").unlink()
    assert "has no training images of ImageNet; expected ILSVRC2012_img_train.tar" in errors_of(root, tmp_path, *words)
    assert "no such folder" in errors_of(tmp_path / "none", tmp_path, *words)
    (root / "LOC_val_solution.csv").write_text("ImageId,PredictionString\nILSVRC2012_val_00000001,\n")
    with pytest.raises(ConfigError, match="not a valid folder of validation labels"):
        read_labels(root)


def test_an_image_without_a_label_is_named(image_folder, tmp_path):
    root, _ = write_imagenet(image_folder, tmp_path, "flat")
    shutil.copy(next(root.glob("val/*.JPEG")), root / "val" / "ILSVRC2012_val_00000099.JPEG")
    found = errors_of(root, tmp_path, "DATA.NAME", "imagenet")
    assert f"{root / 'val'} has images without a label: ILSVRC2012_val_00000099.JPEG" in found


def test_a_tar_of_tars_is_checked_to_its_end(image_folder, tmp_path):
    root, _ = write_imagenet(image_folder, tmp_path, "tars")
    whole = (root / "ILSVRC2012_img_train.tar").read_bytes()
    inner = whole.index(b"000.jpg")
    (root / "ILSVRC2012_img_train.tar").write_bytes(whole[: inner + 600])
    assert "ILSVRC2012_img_train.tar:n00000003.tar: ends at byte" in errors_of(root, tmp_path, "DATA.NAME", "imagenet")
    write_tar(root / "ILSVRC2012_img_train.tar", {"n00000001.tar": whole[512 : inner + 600]})
    found = errors_of(root, tmp_path, "DATA.NAME", "imagenet")
    assert "ILSVRC2012_img_train.tar:n00000001.tar:000.jpg: ends at byte" in found


@pytest.mark.parametrize("damage", [b"", b"MATLAB", bytes(200)])
def test_a_damaged_meta_is_refused(image_folder, tmp_path, damage):
    root, _ = write_imagenet(image_folder, tmp_path, "flat")
    (root / "ILSVRC2012_devkit_t12" / "data" / "meta.mat").write_bytes(damage)
    with pytest.raises(ConfigError, match=f"{root}: not a valid folder of validation labels"):
        read_labels(root)
