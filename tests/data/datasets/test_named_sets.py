"""Data sets of torchvision by name: splits, files, labels and settings, and damaged or untrusted files."""

import inspect
import pickle
import re
import shutil
import struct

import numpy as np
import pytest
from support.batches import assert_same_batches, batches_of
from support.images import draw_folder
from torchvision import datasets
from torchvision.datasets.mnist import FashionMNIST

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data.datasets.torchvision_sets import SOURCES, NamedSet, open_source
from distribuuuu.data.loader import build_images
from distribuuuu.engine.preflight import find_run_problems


def write_idx(path, array: np.ndarray) -> None:
    """Write uint8 in the format of MNIST."""
    path.write_bytes(bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """KMNIST, MNIST, GTSRB and Oxford-IIIT Pet of a few images."""
    root = tmp_path_factory.mktemp("named")
    raw, random = root / "KMNIST" / "raw", np.random.default_rng(0)
    raw.mkdir(parents=True)
    for part, num in (("train", 40), ("t10k", 20)):
        write_idx(raw / f"{part}-images-idx3-ubyte", random.integers(0, 256, (num, 28, 28)).astype(np.uint8))
        write_idx(raw / f"{part}-labels-idx1-ubyte", (np.arange(num) % 10).astype(np.uint8))
    shutil.copytree(root / "KMNIST", root / "MNIST")
    draw_folder(root / "gtsrb" / "GTSRB", "Training", {f"{label:05d}": 1 for label in range(3)})
    for path in (root / "gtsrb" / "GTSRB" / "Training").rglob("*.jpg"):
        path.rename(path.with_suffix(".ppm"))
    pets = root / "oxford-iiit-pet"
    draw_folder(pets, "images", {"": 4})
    (pets / "annotations").mkdir()
    names = ["Abyssinian_1 1 1 1", "beagle_2 2 2 1"]
    for number, name in enumerate(names):
        shutil.copy(pets / "images" / f"00{number}.jpg", pets / "images" / f"{name.split()[0]}.jpg")
    for split in ("trainval", "test"):
        (pets / "annotations" / f"{split}.txt").write_text("\n".join(names) + "\n")
    return root


@pytest.fixture
def cfg_of(small_cfg, root):
    def make(name: str, *words):
        return small_cfg("DATA.NAME", f"torchvision/{name}", "TRAIN.DATASET", root, "DATA.DOWNLOAD", False,
                         "MODEL.NUM_CLASSES", SOURCES[name].num_classes, "TRAIN.BATCH_SIZE", 10, *words)  # fmt: skip

    return make


def test_names_exist_in_torchvision_with_their_arguments():
    for name, source in SOURCES.items():
        arguments = inspect.signature(getattr(datasets, name).__init__).parameters
        keyword = [source.keyword] if source.splits else []
        assert all(argument in arguments or "kwargs" in arguments for argument in (*keyword, *source.settings)), name


@pytest.mark.parametrize("words, mean", [((), 0.485), (("DATA.NAME", "mnist"), 0.1307)])
def test_small_images_are_those_of_the_files(cfg_of, root, words, mean):
    cfg = cfg_of("KMNIST", *words)
    assert find_run_problems(cfg, train=True) == []
    for train, part, num in ((True, "train", 40), (False, "t10k", 20)):
        images = build_images(cfg, train)
        pixels = np.frombuffer((root / "KMNIST/raw" / f"{part}-images-idx3-ubyte").read_bytes()[16:], np.uint8)
        assert len(images) == num and images.crop == "pad" and not images.has_files and images.mean[0] == mean
        assert np.array_equal(np.asarray(images.read(7)), pixels.reshape(-1, 28, 28)[7]) and images.label(7) == 7
    assert_same_batches(batches_of(cfg), batches_of(cfg_of("KMNIST", *words, "TRAIN.WORKERS", 3)))


@pytest.mark.parametrize("name, num", [("GTSRB", 3), ("OxfordIIITPet", 2)])
def test_files_are_read_as_they_are(cfg_of, name, num):
    images = NamedSet.from_cfg(cfg_of(name), train=True)
    assert images.has_files and [images.label(index) for index in range(len(images))] == list(range(num))
    assert bytes(images.read(1)) == open(images.describe(1), "rb").read()
    assert len(images.classes) == (43 if name == "GTSRB" else 2)


@pytest.mark.parametrize("name, words, message", [
    ("SVHN", ("TEST.SPLIT", "tets"), "TEST.SPLIT .*got 'tets'; .* has train, test, extra; did you mean test"),
    ("DTD", ("DATA.KWARGS.size", "full"), "DATA.KWARGS.size .*no such setting of .*; expected one of partition"),
    ("KMNIST", ("DATA.KWARGS.size", "full"), "DATA.KWARGS.size .*it has none"),
    ("KMNIST", ("MODEL.NUM_CLASSES", 3), "MODEL.NUM_CLASSES .*3, but DATA.NAME torchvision/KMNIST has 10 classes"),
])  # fmt: skip
def test_mistakes_are_reported_before_the_start(cfg_of, name, words, message):
    (problem,) = map(str, find_run_problems(cfg_of(name, *words), train=True))
    assert re.search(message, problem), problem


def test_unknown_names_and_missing_data(cfg_of, tmp_path):
    with pytest.raises(ConfigError, match="did you mean torchvision/KMNIST"):
        load_cfg(None, ["DATA.NAME", "torchvision/KMNST"])
    with pytest.raises(ConfigError, match="DATA.KWARGS.partition .*1 to 10"):
        cfg_of("DTD", "DATA.KWARGS.partition", 11)
    with pytest.raises(ConfigError, match=f"TRAIN.DATASET: KMNIST is not in {tmp_path}"):
        build_images(cfg_of("KMNIST", "TRAIN.DATASET", tmp_path), train=True)


RAW = [f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]


def test_a_damaged_file_is_one_error(tmp_path):
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    assert FashionMNIST.mirrors
    start = b"\0\0\x08\x03"
    for content in (b"", start, b"\xff" * 64, start + b"\xff" * 12, b"\0\0\x08\x01" + bytes(4), b"\0" * 64):
        for name in RAW:
            (folder / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"TRAIN.DATASET: FashionMNIST .*{tmp_path}") as error:
            open_source("FashionMNIST", str(tmp_path), "TRAIN.DATASET", False, train=True)
        assert "\n" not in str(error.value)


class Attack:
    def __reduce__(self):
        return pytest.fail, ("the pickle was read",)


def test_a_pickle_of_others_is_not_read(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("data_batch_1", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ConfigError, match="TRAIN.DATASET: CIFAR10 is not in"):
        open_source("CIFAR10", str(tmp_path), "TRAIN.DATASET", False, train=True)


def test_a_set_is_downloaded_once_and_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def download(self):
        if is_offline:
            raise OSError("no network")
        draw_folder(tmp_path / "root" / "eurosat", "2750", {"Forest": 10, "River": 10})

    monkeypatch.setattr(datasets.EuroSAT, "download", download)
    (root := tmp_path / "root").mkdir()
    for is_offline in (True, False):
        if is_offline:
            with pytest.raises(ConfigError, match="cannot be downloaded: .*no network"):
                open_source("EuroSAT", str(root), "TRAIN.DATASET", True)
            assert not any(root.iterdir())
        else:
            assert len(open_source("EuroSAT", str(root), "TRAIN.DATASET", True)) == 20
    assert [path.name for path in root.iterdir()] == ["eurosat"]
    monkeypatch.setattr(datasets.EuroSAT, "download", None)
    assert len(open_source("EuroSAT", str(root), "TRAIN.DATASET", True)) == 20
